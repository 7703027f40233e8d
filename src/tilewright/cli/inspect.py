"""`tilewright inspect`: what a package holds."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("package", type=Path, help="the .tpupkg file")
    parser.add_argument("--tensors", action="store_true", help="list the tensors in DDR")
    parser.add_argument("--layers", action="store_true", help="list the layers")
    parser.add_argument("--ir", metavar="LEVEL", help="print the IR of a level (quant, linalg...)")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from tilewright.cli.output import number, print_json, size, table
    from tilewright.diagnostics import UsageError
    from tilewright.runtime.loader import read_package

    content = read_package(options.package)
    program = content.program
    if options.ir is not None:
        levels = sorted(name[3:-5] for name in content.extras if name.startswith("ir/"))
        member = f"ir/{options.ir}.mlir"
        if member not in content.extras:
            raise UsageError(
                "E0702",
                f"the package holds no IR of level `{options.ir}`",
                hint=f"it holds: {', '.join(levels) or 'none'}",
            )
        text = content.extras[member].decode("utf-8", "replace")
        if options.json:
            print_json({"level": options.ir, "ir": text})
        else:
            print(text, end="")
        return 0
    summary = summarise(content, options.package)
    if options.json:
        print_json(summary)
        return 0
    print(f"package   {options.package} ({size(options.package.stat().st_size)})")
    print(f"model     {content.model_name} (SHA3-256 {content.model_sha3[:16]}...)")
    print(f"target    {content.target.name} (digest {content.target.digest()[:16]}...)")
    asked = ", ".join(f"{key} {_words(value)}" for key, value in content.options.items())
    print(f"options   {asked}")
    for kind, ports in (("input", program.inputs), ("output", program.outputs)):
        for port in ports:
            print(f"{kind:<10}{port.name}: {port.dtype} {'x'.join(map(str, port.shape))}")
    print(
        f"DDR       constants {size(program.constants.nbytes)}, "
        f"workspace {size(program.workspace_bytes)}"
    )
    peak, room = program.sram_peak_bytes, content.target.sram_size
    print(f"SRAM      peak {size(peak)} of {size(room)} ({peak / room:.0%})")
    for step in summary["steps"]:
        if step["kind"] == "tpu":
            print(f"step      {step['name']}: {number(step['instructions'])} instructions")
        elif step["kind"] == "host":
            print(
                f"step      {step['name']}: on the host ({step['reason']}): "
                f"{', '.join(step['layers'])}"
            )
    if options.tensors:
        print()
        print(
            table(
                ("tensor", "offset", "shape", "type", "scale", "zero", "layer"),
                [
                    (
                        t.name,
                        number(t.offset),
                        "x".join(map(str, t.shape)),
                        t.dtype,
                        "" if t.scale is None else f"{t.scale:.6g}",
                        str(t.zero_point),
                        t.layer,
                    )
                    for t in program.tensors.values()
                ],
                "lrlrrr",
            )
        )
    if options.layers:
        print()
        print(
            table(
                ("layer", "operation", "device", "MACs", "SRAM bytes"),
                [
                    (
                        str(row.get("name", "")),
                        str(row.get("op", "")),
                        str(row.get("device", "")),
                        number(row.get("macs", 0)),
                        number(row.get("sram_bytes", 0)),
                    )
                    for row in program.layer_info
                ],
                "lllrr",
            )
        )
    return 0


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def summarise(content: Any, path: Path) -> dict[str, Any]:
    """Return what `inspect --json` prints."""
    from tilewright.codegen.program import HostStep, LoadStep, StoreStep

    program = content.program
    steps: list[dict[str, Any]] = []
    for step in program.steps:
        if isinstance(step, StoreStep):
            steps.append({"kind": "store", "value": step.value, "tensor": step.tensor})
        elif isinstance(step, LoadStep):
            steps.append({"kind": "load", "tensor": step.tensor, "value": step.value})
        elif isinstance(step, HostStep):
            steps.append(
                {
                    "kind": "host",
                    "name": step.name,
                    "reason": step.reason,
                    "layers": list(step.layers),
                    "onnx_bytes": len(step.onnx),
                }
            )
        else:
            steps.append(
                {
                    "kind": "tpu",
                    "name": step.name,
                    "instructions": len(step.layers),
                    "code_bytes": len(step.code),
                }
            )

    def ports(items: Any) -> list[dict[str, Any]]:
        return [{"name": p.name, "shape": list(p.shape), "dtype": p.dtype} for p in items]

    return {
        "package": str(path),
        "bytes": path.stat().st_size,
        "digest": content.digest,
        "model": {"name": content.model_name, "sha3_256": content.model_sha3},
        "target": {"name": content.target.name, "digest": content.target.digest()},
        "inputs": ports(program.inputs),
        "outputs": ports(program.outputs),
        "constants_bytes": program.constants.nbytes,
        "workspace_bytes": program.workspace_bytes,
        "sram_peak_bytes": program.sram_peak_bytes,
        "preprocess": content.preprocess,
        "options": content.options,
        "steps": steps,
        "tensors": [
            {
                "name": t.name,
                "offset": t.offset,
                "shape": list(t.shape),
                "dtype": t.dtype,
                "scale": t.scale,
                "zero_point": t.zero_point,
                "layer": t.layer,
            }
            for t in program.tensors.values()
        ],
        "layers": program.layer_info,
        "ir": sorted(name for name in content.extras),
    }
