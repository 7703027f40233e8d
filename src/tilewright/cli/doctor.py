"""`tilewright doctor`: is everything here that is needed, and does it work?"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Check:
    """One line of the diagnosis."""

    name: str
    ok: bool
    found: str
    needed: bool = True
    """Whether tilewright cannot work without it."""
    hint: str = ""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options: none."""


def run(options: argparse.Namespace) -> int:
    """Run the command; exit code 1 when something needed is wrong."""
    from tilewright.cli.output import print_json

    checks = [*_python(), *_packages(), _onnxruntime(), _targets()]
    checks += [*_rtl(), _cache(), _memory()]
    healthy = all(check.ok for check in checks if check.needed)
    if options.json:
        print_json({"healthy": healthy, "checks": [asdict(check) for check in checks]})
    else:
        for check in checks:
            mark = "ok  " if check.ok else "FAIL" if check.needed else "-   "
            print(f"{mark} {check.name:<14} {check.found}")
            if check.hint and not check.ok:
                print(f"     hint: {check.hint}")
    return 0 if healthy else 1


def _python() -> list[Check]:
    import os
    import platform
    import sys

    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return [
        Check("python", sys.version_info >= (3, 11), found, hint="3.11 or newer is needed"),
        Check("cores", bool(cores), str(cores)),
    ]


def _packages() -> list[Check]:
    import re
    from importlib import metadata

    checks: list[Check] = []
    for line in metadata.requires("tilewright") or []:
        name = re.split(r"[^A-Za-z0-9_.-]", line, maxsplit=1)[0]
        extra = re.search(r"extra == ['\"](\w+)['\"]", line)
        if extra and extra[1] not in ("torch", "rtl"):
            continue
        wanted = line.split(";")[0].strip()
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            hint = f"pip install '{wanted}'"
            checks.append(Check(name, False, "not installed", not extra, hint))
            continue
        fits = _satisfies(version, wanted[len(name) :])
        checks.append(Check(name, fits, f"{version} (wanted {wanted})", not extra))
    return checks


def _satisfies(version: str, wanted: str) -> bool:
    """Return whether `version` fits comma-joined `==`, `>=`, `<` bounds (numbers only)."""
    import re

    def key(text: str) -> list[int]:
        numbers = [int(part) for part in re.findall(r"\d+", text.split("+")[0])[:4]]
        return numbers + [0] * (4 - len(numbers))

    for bound in filter(None, wanted.split(",")):
        match = re.match(r"(==|>=|<)(.+)", bound.strip())
        if match is None:
            continue
        have, limit = key(version), key(match[2])
        if not {"==": have == limit, ">=": have >= limit, "<": have < limit}[match[1]]:
            return False
    return True


def _onnxruntime() -> Check:
    """Run a one-node model: a broken install shows when it is used, not when it is imported."""
    try:
        import numpy as np
        import onnxruntime
        from onnx import TensorProto, helper
    except ImportError as error:
        return Check("float run", False, str(error))
    value = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", value[:1], value[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    found = np.asarray(session.run(None, {"x": np.array([-1, 1], np.float32)})[0])
    return Check("float run", np.array_equal(found, [0, 1]), "onnxruntime runs a model")


def _targets() -> Check:
    from tilewright.diagnostics import TilewrightError
    from tilewright.spec.hardware import load_target, shipped_targets

    try:
        names = [load_target(name).name for name in shipped_targets()]
    except TilewrightError as error:
        return Check("targets", False, error.message)
    return Check("targets", bool(names), ", ".join(names))


def _rtl() -> list[Check]:
    """Look for what `tilewright cosim` and `tpu-mlir-testgen` build the RTL with."""
    import os
    import shutil

    checks: list[Check] = []
    compiler = os.environ.get("CXX") or "g++"
    for name, command in (("verilator", "verilator"), ("C++ compiler", compiler.split()[0])):
        found = shutil.which(command)
        hint = "only for the RTL: apt-get install verilator g++"
        checks.append(Check(name, found is not None, found or "not found", False, hint))
    return checks


def _cache() -> Check:
    from tilewright.codegen.files import check_writable
    from tilewright.diagnostics import TilewrightError
    from tilewright.zoo import cache_folder

    folder = cache_folder()
    hint = "set $TILEWRIGHT_CACHE to a folder you can write"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_writable(folder / "probe")
    except (TilewrightError, OSError) as error:
        return Check("cache", False, f"{folder}: {error}", needed=False, hint=hint)
    return Check("cache", True, str(folder), needed=False)


def _memory() -> Check:
    from pathlib import Path

    info = Path("/proc/meminfo")
    if not info.is_file():
        return Check("memory", True, "unknown", needed=False)
    fields = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
    free = int(fields.get("MemAvailable", "0 kB").split()[0]) / 1024 / 1024
    hint = "a ResNet-50 takes about 2 GiB to compile"
    return Check("memory", free > 2, f"{free:.1f} GiB available", needed=False, hint=hint)
