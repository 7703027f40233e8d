"""`tpu-mlir-runner`: execute a module, whatever its level, against a chip's description."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.diagnostics import TilewrightError, UsageError
from tilewright.tools.common import ToolParser, load_target, read_input, run_tool

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[Any]

DESCRIPTION = """\
Execute a module of any level and print or write its outputs.

A module of instructions is first checked against the chip's limits (burst size, banks, registers).

  tpu-mlir-runner model_tpu.mlir --hardware-config=tpu_v2.yaml --inputs in.npz --outputs out.npz
"""


def build_parser() -> ToolParser:
    """Return the parser."""
    parser = ToolParser("tpu-mlir-runner", DESCRIPTION)
    add = parser.add_argument
    add("input", nargs="?", help="module to run; `-` or nothing is standard input")
    add("--hardware-config", metavar="TARGET", help="name of a shipped target, or a YAML file")
    add("--inputs", metavar="FILE.npz", help="inputs by name (default: random ones, see --seed)")
    add("--outputs", metavar="FILE.npz", help="write the outputs here")
    add("--seed", type=int, metavar="N", default=0, help="seed of random inputs (default 0)")
    add("--json", action="store_true", help="print the summary of the outputs as JSON")
    return parser


def load_inputs(path: Path, wanted: Sequence[tuple[str, tuple[int, ...], str]]) -> dict[str, Array]:
    """Read an .npz (or the only input from an .npy) and check names, shapes and types.

    Raises:
        TilewrightError: E0701 unreadable, E0103 it does not fit.
    """
    import zipfile

    import numpy as np

    try:
        # Opened here: numpy leaves a file that it opened and could not read to the collector.
        with path.open("rb") as file:
            loaded: Any = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                arrays: dict[str, Array] = {wanted[0][0]: loaded} if len(wanted) == 1 else {}
            else:
                arrays = {name: loaded[name] for name in loaded.files}
    except OSError as error:
        raise TilewrightError(
            "E0701", f"cannot read `{path}`", [error.strerror or str(error)]
        ) from error
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise TilewrightError("E0701", f"`{path}` is not an .npz file", [str(error)]) from error
    wrong: list[str] = []
    for name, shape, kind in wanted:
        if name not in arrays:
            wrong.append(f"{name!r} is missing; the file has {sorted(arrays)}")
            continue
        want = _dtype(kind)
        if arrays[name].shape != shape or arrays[name].dtype != want:
            have = f"{arrays[name].dtype}{list(arrays[name].shape)}"
            wrong.append(f"{name!r} is {have}, the module takes {want}{list(shape)}")
    extra = sorted(set(arrays) - {name for name, _, _ in wanted})
    if extra:
        wrong.append(f"the module has no input {extra[0]!r}")
    if wrong:
        raise TilewrightError("E0103", f"`{path}` does not fit the module", wrong)
    return arrays


def _dtype(kind: str) -> np.dtype[Any]:
    import numpy as np

    if kind == "i1":
        return np.dtype(np.bool_)
    return np.dtype(f"{'f' if kind.startswith('f') else 'i'}{int(kind[1:]) // 8}")


def summarise(outputs: Mapping[str, Array]) -> list[dict[str, Any]]:
    """Return name, type, shape, least, mean and greatest value of each output."""
    rows: list[dict[str, Any]] = []
    for name, array in outputs.items():
        row: dict[str, Any] = {
            "name": name,
            "dtype": str(array.dtype),
            "shape": list(array.shape),
        }
        if array.size:
            row |= {
                "min": float(array.min()),
                "mean": float(array.mean()),
                "max": float(array.max()),
            }
        rows.append(row)
    return rows


def run(argv: list[str]) -> int:
    """Do what the arguments say; see `main`."""
    options = build_parser().parse(argv)
    from tilewright.levels import check_limits, execute, level_of, seeded_inputs, signature

    target = load_target(options.hardware_config) if options.hardware_config else None
    if options.outputs and not options.outputs.endswith(".npz"):
        raise UsageError("E0702", f"`--outputs {options.outputs}`: the name must end in .npz")
    module, context, name = read_input(options.input, target)
    level = level_of(module)
    if context.target is None and level == "tpu":
        context.target = load_target(None)
    check_limits(module, context)
    if options.inputs:
        inputs = load_inputs(Path(options.inputs), signature(module, context))
    else:
        sys.stderr.write(f"random inputs, seed {options.seed}\n")
        inputs = seeded_inputs(module, context, options.seed)
    sys.stderr.write(f"running {name} at level `{level}`\n")
    outputs = execute(module, context, inputs)
    if options.outputs:
        _save(Path(options.outputs), outputs)
    rows = summarise(outputs)
    if options.json:
        print(json.dumps(rows))
        return 0
    for row in rows:
        shape = "x".join(str(size) for size in row["shape"])
        values = (
            f"min {row['min']:.6g}  mean {row['mean']:.6g}  max {row['max']:.6g}"
            if "min" in row
            else "empty"
        )
        print(f"{row['name']}  {row['dtype']}  {shape or 'scalar'}  {values}")
    return 0


def _save(path: Path, outputs: Mapping[str, Array]) -> None:
    from io import BytesIO
    from zipfile import ZipFile, ZipInfo

    import numpy as np

    from tilewright.ir.io import write_atomically

    # Not np.savez: it takes names as keywords, and a tensor may be called "file".
    buffer = BytesIO()
    with ZipFile(buffer, "w") as archive:
        for name, array in outputs.items():
            entry = BytesIO()
            np.lib.format.write_array(entry, np.asanyarray(array), allow_pickle=False)
            # A fixed date: same outputs, same bytes.
            archive.writestr(ZipInfo(f"{name}.npy"), entry.getvalue())
    write_atomically(path, buffer.getvalue())


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return run_tool(run, argv)


if __name__ == "__main__":
    sys.exit(main())
