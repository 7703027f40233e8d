"""`tpu-mlir-translate`: between MLIR and other formats (ONNX in, chip image out)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tilewright.diagnostics import TilewrightError, UsageError
from tilewright.tools.common import ToolParser, read_input, run_tool, write_output

DESCRIPTION = """\
Translate between MLIR and other formats.

  tpu-mlir-translate --import-onnx model.onnx -o model.mlir
  tpu-mlir-translate --import-onnx model.onnx --shape images=1x3x224x224 -o model.mlir
  tpu-mlir-translate --export-tpu model_tpu.mlir -o model.bin
"""


def build_parser() -> ToolParser:
    """Return the parser."""
    parser = ToolParser("tpu-mlir-translate", DESCRIPTION)
    add = parser.add_argument
    add("input", nargs="?", help="file to read")
    add("-o", "--output", metavar="FILE", help="file to write; MLIR may go to standard output")
    add("--import-onnx", action="store_true", help="read ONNX, write a module of `onnx` operations")
    add("--export-tpu", action="store_true", help="read a lowered module, write the chip's image")
    add(
        "--shape",
        metavar="NAME=1x3x224x224",
        action="append",
        default=[],
        help="shape of an input, or size of a symbolic dimension (N=1); may be repeated",
    )
    add(
        "--mlir-print-op-generic", action="store_true", help="print the generic form (of an import)"
    )
    return parser


def parse_shapes(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Read `name=1x3x224x224` (or commas); a name may itself contain `=`.

    Raises:
        UsageError: no name, a size that is not a positive number, or a name given twice.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, equals, sizes = text.rpartition("=")
        words = sizes.replace(",", "x").split("x")
        if not equals or not name or not all(word.isascii() and word.isdecimal() for word in words):
            raise UsageError(
                "E0702",
                f"`--shape {text}` cannot be read",
                hint="write it like `--shape images=1x3x224x224`",
            )
        if name in shapes:
            raise UsageError("E0702", f"the shape of `{name}` is given twice")
        shapes[name] = tuple(int(word) for word in words)
        if 0 in shapes[name]:
            raise UsageError("E0702", f"`--shape {text}`: sizes must be 1 or more")
    return shapes


def run(argv: list[str]) -> int:
    """Do what the arguments say; see `main`."""
    options = build_parser().parse(argv)
    if options.import_onnx == options.export_tpu:
        raise UsageError(
            "E0702", "say what to do: one of `--import-onnx` and `--export-tpu` is needed"
        )
    if options.input is None:
        raise UsageError("E0702", "an input file is needed")
    if options.export_tpu and options.shape:
        raise UsageError("E0702", "`--shape` belongs to `--import-onnx`")
    if options.import_onnx:
        from tilewright.frontends.onnx import import_onnx
        from tilewright.ir.io import new_context

        context = new_context()
        module = import_onnx(Path(options.input), parse_shapes(options.shape), context)
        write_output(module, context, options.output, generic=options.mlir_print_op_generic)
        return 0

    from tilewright.ir.io import write_atomically
    from tilewright.tools.phases import export_image

    if options.output is None:
        raise UsageError("E0702", "an image is binary: name a file with `-o`")
    module, context, name = read_input(options.input, None)
    if context.target is None:
        raise TilewrightError(
            "E0501",
            f"{name}: the module does not say which chip it was lowered for",
            hint="`tpu-mlir-opt --convert-top-to-tpu --hardware-config=...` records it",
        )
    write_atomically(Path(options.output), export_image(module, context))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return run_tool(run, argv)


if __name__ == "__main__":
    sys.exit(main())
