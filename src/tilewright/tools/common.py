"""What the three `tpu-mlir-*` tools share: error endings, output, targets."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tilewright.diagnostics import TilewrightError, UsageError
from tilewright.streams import give_up_output, is_output_failure, open_missing

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp

    from tilewright.ir.context import CompileContext
    from tilewright.spec.hardware import Hardware

DEFAULT_TARGET = "tpu_v2"
"""The documents' chip, for tools that are not told one."""


class _Version(argparse.Action):
    """Print the version and stop; the package's metadata is only read when asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import version

        print(f"{parser.prog} (tilewright {version('tilewright')})")
        parser.exit()


class ToolParser(argparse.ArgumentParser):
    """A parser without abbreviations, whose errors are `UsageError`s with a hint."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.add_argument("--debug", action="store_true", help="show tracebacks of errors")
        self.add_argument("--version", action=_Version, help="print the version")

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the whole usage."""
        raise UsageError("E0702", message, hint=f"`{self.prog} --help` lists all options")

    def parse(self, argv: Sequence[str], also: Iterable[str] = ()) -> argparse.Namespace:
        """Parse options and positionals in any order.

        Args:
            argv: the words.
            also: further flags that exist, to be suggested when an unknown one comes near.

        Raises:
            UsageError: an unknown option (similar ones are named) or a second positional.
        """
        from tilewright.diagnostics import suggest

        known, rest = self.parse_known_intermixed_args(list(argv))
        if rest:
            flag = rest[0].split("=", 1)[0]
            options = [name for action in self._actions for name in action.option_strings]
            if flag.startswith("-"):
                raise UsageError(
                    "E0702",
                    f"there is no option `{flag}`",
                    hint=suggest(flag, [*options, *also])
                    or f"`{self.prog} --help` lists all options",
                )
            raise UsageError("E0702", f"one input file is expected, `{rest[0]}` is another")
        return known


def run_tool(body: Callable[[list[str]], int], argv: Sequence[str] | None) -> int:
    """Call `body` with the arguments; turn whatever it raises into words and an exit code.

    Returns:
        0 success, 1 the input is wrong, 2 the command line is, 70 a fault of ours, 130 interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    open_missing()
    try:
        code = body(arguments)
        sys.stdout.flush()
        return code
    except TilewrightError as error:
        if debug:
            traceback.print_exc()
        print(error, file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except SystemExit as stop:
        return int(stop.code or 0)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if isinstance(error, OSError) and is_output_failure(error):
            return give_up_output(error)
        # The outermost frame: nothing can be done with it but to say that it is our fault.
        if debug:
            traceback.print_exc()
        print(f"internal error: {type(error).__name__}: {error}", file=sys.stderr)
        print("hint: run again with `--debug` and report what it prints", file=sys.stderr)
        return 70


def load_target(name: str | None) -> Hardware:
    """Return the target called `name`, or described by the file `name` (also `tpu_v2.yaml`).

    Raises:
        TilewrightError: E0201.
    """
    from tilewright.spec.hardware import load_target as load

    wanted = name or DEFAULT_TARGET
    # The documents write `--hardware-config=tpu_v2.yaml`; without such a file, ours is meant.
    if wanted.endswith(".yaml") and "/" not in wanted and not Path(wanted).exists():
        wanted = wanted.removesuffix(".yaml")
    return load(wanted)


def read_input(name: str | None, target: Hardware | None) -> tuple[ModuleOp, CompileContext, str]:
    """Read the module called `name` (`-` or None: standard input, weights in the current folder).

    Returns:
        The module, its context, and what messages call it.
    """
    from tilewright.ir.io import MAX_TEXT_BYTES, module_of, read_module

    if name is None or name == "-":
        text = sys.stdin.read(MAX_TEXT_BYTES + 1)
        if len(text) > MAX_TEXT_BYTES:
            raise TilewrightError("E0501", "standard input is too long for a module")
        return *module_of(text, Path(), target, "<stdin>"), "<stdin>"
    module, context = read_module(Path(name), target)
    return module, context, name


def write_output(
    module: ModuleOp, context: CompileContext, name: str | None, *, generic: bool
) -> None:
    """Write the module and its weights to `name`, or its text to standard output (`-` or None).

    Text on standard output goes on naming the weights file it was read with only if that still
    holds its weights; integers are only printed together with the target they were made for.
    """
    from xdsl.dialects.builtin import StringAttr

    from tilewright.ir.io import (
        TARGET_ATTRIBUTE,
        WEIGHTS_ATTRIBUTE,
        print_module,
        target_text,
        write_module,
    )
    from tilewright.levels import level_of

    if name is None or name == "-":
        if context.weights.version and module.attributes.pop(WEIGHTS_ATTRIBUTE, None):
            sys.stderr.write("the weights have changed and are not written without `-o FILE`\n")
        if context.target is not None and level_of(module) not in ("onnx", "top"):
            module.attributes[TARGET_ATTRIBUTE] = StringAttr(target_text(context.target))
        sys.stdout.write(print_module(module, generic=generic))
    else:
        write_module(module, context, Path(name), generic=generic)
