"""Parsing, error endings and exit codes of `tilewright`.

Data goes to stdout, everything else to stderr. Exit codes: 0 done, 1 something is wrong with the
input, 2 with the command line, 70 with tilewright (then a folder to report is written), 130
interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from tilewright.diagnostics import TilewrightError, UsageError
from tilewright.streams import give_up_output, is_output_failure, open_missing

COMMANDS: dict[str, str] = {
    "compile": "compile a model for a chip",
    "run": "run a compiled model on inputs",
    "simulate": "simulate a compiled model cycle by cycle",
    "cosim": "run a model on the RTL and compare with the simulators",
    "tune": "sweep a chip's parameters over models: time against area",
    "compare": "compare two levels of a model layer by layer",
    "explain": "tell what was decided about a layer, and why",
    "report": "write one HTML page about a compiled model",
    "inspect": "show what a package holds",
    "disasm": "print a package's programs as assembly",
    "place": "place buffers with lifetimes in a memory",
    "zoo": "list and prepare real models to try",
    "doctor": "check this installation",
}
"""Subcommands and their one-line help, in order; each lives in the module of its name."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are `UsageError`s and whose options cannot be abbreviated."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)
        self.chosen: Parser | None = None
        """The subcommand's parser that has its options, if one has."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the whole usage."""
        raise UsageError("E0702", message, hint=f"`{self.prog} --help` explains the options")

    def unknown(self, rest: Sequence[str]) -> NoReturn:
        """Refuse what no option or argument took, naming the nearest option."""
        import difflib

        flag = rest[0].split("=", 1)[0]
        if not flag.startswith("-"):
            self.error(f"`{rest[0]}` is one argument too many")
        options = [name for action in self._actions for name in action.option_strings]
        near = [name for name in options if len(flag) > 3 and name.startswith(flag)]
        near = near[:3] or difflib.get_close_matches(flag, options, n=1)
        raise UsageError(
            "E0702",
            f"there is no option `{flag}`",
            hint=f"did you mean {' or '.join(f'`{name}`' for name in near)}?"
            if near
            else f"`{self.prog} --help` explains the options",
        )


def _common() -> Parser:
    common = Parser(add_help=False)
    group = common.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print JSON on stdout")
    group.add_argument("--quiet", "-q", action="store_true", help="no progress on stderr")
    group.add_argument("--debug", action="store_true", help="show tracebacks")
    return common


def build_parser(only: str | None = None) -> Parser:
    """Return the parser; with `only`, just that subcommand's options are filled in."""
    parser = Parser(
        prog="tilewright",
        description="Compile trained models for your own systolic-array chip, and see why.",
        epilog="Each command has its own --help.",
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    common = _common()
    for name, text in COMMANDS.items():
        if only is not None and name != only:
            continue
        command = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            parents=[common],
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name == only:
            import_module(f"tilewright.cli.{name}").configure(command)
            parser.chosen = command
    return parser


def _named_command(arguments: Sequence[str]) -> str | None:
    word = next((item for item in arguments if not item.startswith("-")), None)
    if word is None:
        return None
    if word not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(word, COMMANDS, n=1)
        raise UsageError(
            "E0702",
            f"there is no command `{word}`",
            hint=f"did you mean `{near[0]}`?" if near else f"commands: {', '.join(COMMANDS)}",
        )
    return word


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    open_missing()
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except TilewrightError as error:
        return _tell(error, arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if isinstance(error, OSError) and is_output_failure(error):
            return give_up_output(error)
        # The outermost frame: what arrives here is a fault of ours, and is said to be one.
        return _internal(error, arguments)


def _dispatch(arguments: list[str]) -> int:
    name = _named_command(arguments)
    parser = build_parser(name)
    options, rest = parser.parse_known_args(arguments)
    if rest:
        (parser.chosen or parser).unknown(rest)
    if options.version:
        from importlib.metadata import version

        print(f"tilewright {version('tilewright')}")
        return 0
    if name is None:
        parser.print_help()
        return 0
    return int(import_module(f"tilewright.cli.{name}").run(options))


def _tell(error: TilewrightError, arguments: Sequence[str]) -> int:
    if "--debug" in arguments:
        traceback.print_exc()
    code = 2 if isinstance(error, UsageError) else 1
    print(error, file=sys.stderr)
    if "--json" in arguments:
        print(
            json.dumps(
                {
                    "error": {
                        "code": error.code,
                        "message": error.message,
                        "details": error.details,
                        "hint": error.hint,
                    }
                }
            )
        )
    return code


def _internal(error: Exception, arguments: Sequence[str]) -> int:
    if "--debug" in arguments:
        traceback.print_exc()
    print(f"internal error: {type(error).__name__}: {error}", file=sys.stderr)
    if "--json" in arguments:
        message = f"{type(error).__name__}: {error}"
        print(json.dumps({"error": {"code": "internal", "message": message}}))
    try:
        folder = write_repro(error, arguments)
    except OSError as problem:
        print(f"hint: run again with `--debug` ({problem})", file=sys.stderr)
    else:
        print("  this is a fault of tilewright, not of your model", file=sys.stderr)
        print(f"hint: what is needed to report it lies in `{folder}`", file=sys.stderr)
    return 70


MAX_REPRO_BYTES = 64 * 1024 * 1024
"""Larger inputs are named in the repro folder, not copied."""


def write_repro(error: Exception, arguments: Sequence[str]) -> Path:
    """Write a folder with the traceback, the command, versions and copies of its input files.

    Raises:
        OSError: it cannot be written.
    """
    import platform
    import shutil
    import tempfile
    from importlib import metadata

    folder = Path(tempfile.mkdtemp(prefix="tilewright-repro-"))
    text = "".join(traceback.format_exception(error))
    (folder / "traceback.txt").write_text(text, "utf-8")
    inputs: list[dict[str, Any]] = []
    for word in arguments:
        path = Path(word)
        if len(word) < 4096 and path.is_file():
            size = path.stat().st_size
            inputs.append({"file": str(path.resolve()), "bytes": size})
            if size <= MAX_REPRO_BYTES:
                shutil.copy(path, folder / f"input{len(inputs)}-{path.name}")
    names = ("tilewright", "xdsl", "numpy", "onnx", "onnxruntime", "ml_dtypes", "pydantic")
    about = {
        "command": ["tilewright", *arguments],
        "folder": os.getcwd(),
        "python": sys.version,
        "platform": platform.platform(),
        "versions": {name: metadata.version(name) for name in names},
        "inputs": inputs,
    }
    (folder / "about.json").write_text(json.dumps(about, indent=2) + "\n", "utf-8")
    return folder
