"""Finding passes by name, reading textual pipelines, running them.

A file of `transforms/` (or `frontends/`) that defines a `ModulePass` provides the pass named after
it: `fold_bn.py` in `transforms/top/` is `fold-bn`, or `top-fold-bn` if the class says so. Finding
reads the files' text only; a pass is imported when it is used, so that listing costs milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tilewright.diagnostics import TilewrightError, UsageError, suggest

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp
    from xdsl.passes import ModulePass

    from tilewright.ir.context import CompileContext

PACKAGE = Path(__file__).parent
ROOTS = ("transforms", "frontends")
"""Folders of the package that are searched for passes."""

UPSTREAM = {
    "canonicalize": "xdsl.transforms.canonicalize:CanonicalizePass",
    "convert-linalg-to-loops": "xdsl.transforms.convert_linalg_to_loops:ConvertLinalgToLoopsPass",
    "lower-affine": "xdsl.transforms.lower_affine:LowerAffinePass",
}
"""xDSL's own passes that work on our levels; one of ours with the same name wins."""

_CLASS = re.compile(r"^class (\w+)\((?:\w+, *)*ModulePass\):", re.MULTILINE)
_NAME = re.compile(r"^    name(?:: ClassVar\[str\])? = \"([^\"]+)\"", re.MULTILINE)


@dataclass(frozen=True)
class PassEntry:
    """Where a pass lives; nothing of it is imported yet."""

    name: str
    """Kebab-case, as written in pipelines."""
    module: str
    """Dotted module."""
    attribute: str
    """Class in that module."""
    file: Path | None
    """Source file; None for xDSL's."""

    def load(self) -> type[ModulePass]:
        """Import and return the class."""
        loaded: type[ModulePass] = getattr(import_module(self.module), self.attribute)
        return loaded

    @property
    def folder(self) -> str:
        """The folder of the pass: "top", "quant", ... or "xdsl"."""
        return self.file.parent.name if self.file else "xdsl"


def _entries_of(file: Path) -> Iterator[PassEntry]:
    text = file.read_text("utf-8")
    for match in _CLASS.finditer(text):
        name = _NAME.search(text, match.end())
        module = ".".join(("tilewright", *file.relative_to(PACKAGE).with_suffix("").parts))
        yield PassEntry(name[1] if name else "", module, match[1], file)


@cache
def registry() -> dict[str, PassEntry]:
    """Return every pass by name, sorted.

    Raises:
        ValueError: two files claim one name, or a pass is not named after its file (our mistake).
    """
    found: dict[str, PassEntry] = {}
    for root in ROOTS:
        for file in sorted((PACKAGE / root).rglob("*.py")):
            for entry in _entries_of(file):
                kebab = file.stem.replace("_", "-")
                if entry.name not in (kebab, f"{file.parent.name}-{kebab}"):
                    raise ValueError(f"{file}: pass {entry.name!r} is not named after its file")
                if entry.name in found:
                    raise ValueError(f"{file}: {found[entry.name].file} has a pass {entry.name!r}")
                found[entry.name] = entry
    for name, place in UPSTREAM.items():
        module, attribute = place.split(":")
        found.setdefault(name, PassEntry(name, module, attribute, None))
    return dict(sorted(found.items()))


def find_pass(name: str) -> PassEntry:
    """Return the entry of the pass called `name`.

    Raises:
        UsageError: there is none; names that come near are suggested.
    """
    known = registry()
    if name not in known:
        raise UsageError(
            "E0702",
            f"there is no pass `{name}`",
            hint=suggest(name, known) or "`tpu-mlir-opt --list-passes` prints all names",
        )
    return known[name]


_BARE_PATH = re.compile(r'"(?:[^"\\]|\\.)*"|=([^\s"{}=,]*(?:/|\.[A-Za-z])[^\s"{}=,]*)')
"""A quoted string, or a file name that should have been quoted."""


def _quote_paths(text: str) -> str:
    return _BARE_PATH.sub(lambda m: f'="{m[1]}"' if m[1] is not None else m[0], text)


def make_pass(text: str) -> ModulePass:
    """Build one pass from `name` or `name{option=value option=a,b}`; file names need no quotes.

    Raises:
        UsageError: unknown pass, unknown option, or a value of the wrong type.
    """
    name = text.split("{", 1)[0].strip()
    entry = find_pass(name)

    from xdsl.passes import get_pass_option_infos
    from xdsl.utils.arg_spec import parse_spec
    from xdsl.utils.exceptions import ArgSpecParseError

    cls = entry.load()
    try:
        # `from_spec` refuses unknown names and wrong types with ValueError.
        return cls.from_spec(parse_spec(_quote_paths(text.strip())))
    except (ValueError, ArgSpecParseError) as error:
        options = [
            f"{info.name.replace('_', '-')}: {info.expected_type}"
            + (f" (default {info.default_value})" if info.default_value is not None else "")
            for info in get_pass_option_infos(cls)
        ]
        raise UsageError(
            "E0702",
            f"pass `{name}` cannot be made from `{text.strip()}`",
            [str(error).strip().splitlines()[-1]],
            f"its options: {'; '.join(options)}" if options else "it takes no options",
        ) from error


def parse_pipeline(text: str) -> list[ModulePass]:
    """Read a pipeline in MLIR's notation: `builtin.module(func.func(fold-bn,cse),dce{keep=1})`.

    An anchor (`builtin.module`, `func.func`, `any`) may be left out. Our passes work on modules, so
    a nested anchor only groups: its passes run over the whole module, in the order written.

    Raises:
        UsageError: the brackets do not match, or as for `make_pass`.
    """
    found: list[ModulePass] = []
    _parse_list(text, 0, found, depth=0)
    return found


_ANCHOR = re.compile(r"\s*((?:[a-z_]+\.[a-z_]+)|any)\s*\(")
_PASS = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9_-]*)\s*")


def _parse_list(text: str, at: int, found: list[ModulePass], depth: int) -> int:
    """Parse `element (, element)*` from `at`; return where it ends: at `)` or the text's end."""
    first = True

    def fail(what: str, where: int) -> UsageError:
        return UsageError("E0702", f"pass pipeline: {what}", [text, " " * where + "^"])

    while True:
        if first and (not text[at:].strip() or text[at:].lstrip().startswith(")")):
            at = len(text) - len(text[at:].lstrip())
        elif anchor := _ANCHOR.match(text, at):
            if depth > 8:
                raise fail("nested too deeply", at)
            at = _parse_list(text, anchor.end(), found, depth + 1)
            if at >= len(text):
                raise fail("`(` is not closed", anchor.end() - 1)
            at += 1
        elif element := _PASS.match(text, at):
            end = element.end()
            if end < len(text) and text[end] == "{":
                end = _closing_brace(text, end)
                if end < 0:
                    raise fail("`{` is not closed", element.end())
            found.append(make_pass(text[element.start() : end]))
            at = end
        else:
            raise fail("a pass name is expected here", at)
        first = False
        rest = len(text) - len(text[at:].lstrip())
        if rest >= len(text) or text[rest] == ")":
            if rest < len(text) and depth == 0:
                raise fail("`)` without `(`", rest)
            return rest
        if text[rest] != ",":
            raise fail("`,` is expected here", rest)
        at = rest + 1


def _closing_brace(text: str, at: int) -> int:
    """Return the index after the `}` that closes the `{` at `at`, strings skipped; or -1."""
    depth, quoted, index = 0, False, at
    while index < len(text):
        char = text[index]
        if quoted:
            if char == "\\":
                index += 1
            elif char == '"':
                quoted = False
        elif char == '"':
            quoted = True
        elif char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                return index + 1
        index += 1
    return -1


class Hook(Protocol):
    """Looks on before and after each pass: prints, verifies, times or executes the module."""

    def before(self, step: ModulePass, module: ModuleOp, context: CompileContext) -> None:
        """Called before `step` runs."""
        ...

    def after(self, step: ModulePass, module: ModuleOp, context: CompileContext) -> None:
        """Called after `step` ran."""
        ...


class VerifyEach:
    """Verifies the module after each pass, so that a broken pass is named and not its victim."""

    def before(self, step: ModulePass, module: ModuleOp, context: CompileContext) -> None:
        """Do nothing."""

    def after(self, step: ModulePass, module: ModuleOp, context: CompileContext) -> None:
        """Verify.

        Raises:
            TilewrightError: E0501, naming the pass.
        """
        from xdsl.utils.exceptions import VerifyException

        try:
            module.verify()
        except VerifyException as error:
            raise TilewrightError(
                "E0501",
                f"the module does not verify after pass `{step.name}`",
                _tail(str(error)),
                f"this is a fault of the compiler; `--print-ir-after={step.name}` shows the module",
            ) from error


def _tail(text: str, lines: int = 6) -> list[str]:
    """Return the last non-empty lines of `text`: where xDSL says what is wrong."""
    return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]


def run_passes(
    module: ModuleOp,
    context: CompileContext,
    steps: Iterable[ModulePass],
    hooks: Iterable[Hook] = (),
) -> None:
    """Apply `steps` to `module` in order, in place.

    Raises:
        TilewrightError: as raised by a pass or a hook.
    """
    watching = list(hooks)
    for step in steps:
        for hook in watching:
            hook.before(step, module, context)
        step.apply(context, module)
        for hook in watching:
            hook.after(step, module, context)
