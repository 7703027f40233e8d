"""Modules on disk: `NAME.mlir` beside `NAME.weights.safetensors` (docs/concepts/ir.md).

Text comes from users and may be hostile: its size is bounded, it may only name weights beside
itself, and whatever is wrong with it is reported with line and column. Writing is atomic: a reader
sees the old file or the new one, never a part.
"""

from __future__ import annotations

import contextlib
import os
import re
from importlib import import_module
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING

from typing_extensions import override

from tilewright.diagnostics import TilewrightError

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp
    from xdsl.ir import Dialect, Operation
    from xdsl.parser import Parser

    from tilewright.ir.context import CompileContext
    from tilewright.ir.weights import WeightStore
    from tilewright.spec.hardware import Hardware

WEIGHTS_ATTRIBUTE = "tilewright.weights"
"""Module attribute that names the weights file, relative to the module's."""

TARGET_ATTRIBUTE = "tilewright.target"
"""Module attribute: the chip the module is made for, a shipped target's name or a YAML text."""

GRAPH_ATTRIBUTE = "tilewright.graph"
"""Module attribute of a lowered module: the text of the integer graph it was lowered from."""

MAX_TEXT_BYTES = 256 * 1024 * 1024
"""Largest module text that is read; weights are not text, so real ones have a few megabytes."""

UPSTREAM_DIALECTS = {
    "affine": "xdsl.dialects.affine:Affine",
    "arith": "xdsl.dialects.arith:Arith",
    "builtin": "xdsl.dialects.builtin:Builtin",
    "func": "xdsl.dialects.func:Func",
    "linalg": "xdsl.dialects.linalg:Linalg",
    "math": "xdsl.dialects.math:Math",
    "memref": "xdsl.dialects.memref:MemRef",
    "scf": "xdsl.dialects.scf:Scf",
    "tensor": "xdsl.dialects.tensor:Tensor",
}


def dialect_names() -> list[str]:
    """Return the names of our own dialects: one file or folder of `tilewright/dialects/` each."""
    folder = Path(__file__).parent.parent / "dialects"
    names = {
        entry.stem
        for entry in folder.iterdir()
        if (entry.suffix == ".py" or (entry / "__init__.py").exists())
        and not entry.name.startswith("_")
    }
    return sorted(names)


def load_dialect(name: str) -> Dialect:
    """Import and return the dialect called `name`, ours or xDSL's.

    Raises:
        KeyError: there is no such dialect.
    """
    from xdsl.ir import Dialect

    if name in UPSTREAM_DIALECTS:
        module, attribute = UPSTREAM_DIALECTS[name].split(":")
        upstream: Dialect = getattr(import_module(module), attribute)
        return upstream
    if name in dialect_names():
        for value in vars(import_module(f"tilewright.dialects.{name}")).values():
            if isinstance(value, Dialect) and value.name == name:
                return value
    raise KeyError(name)


def new_context(
    weights: WeightStore | None = None, target: Hardware | None = None
) -> CompileContext:
    """Return a context in which every dialect is registered; each is imported when first met."""
    from tilewright.ir.context import CompileContext

    context = CompileContext(weights, target)
    names = [*UPSTREAM_DIALECTS, *(n for n in dialect_names() if n not in UPSTREAM_DIALECTS)]
    for name in names:
        context.register_dialect(name, lambda name=name: load_dialect(name))
    return context


def parse_text(text: str, context: CompileContext, source: str = "input") -> ModuleOp:
    """Parse and verify a module.

    Args:
        text: MLIR text, custom or generic form.
        context: where its dialects are registered.
        source: what messages call the text; a file name, usually.

    Raises:
        TilewrightError: E0501, with line and column, or with the op that does not verify.
    """
    from xdsl.utils.exceptions import (
        DiagnosticException,
        ParseError,
        UnregisteredConstructException,
    )

    try:
        module = _parser(context, text, source).parse_module()
    except ParseError as error:
        line, column = _position(error.span.start, text)
        raise TilewrightError(
            "E0501",
            f"{source}:{line}:{column}: {_first_line(error.msg)}",
            _excerpt(text, line, column),
        ) from error
    except DiagnosticException as error:
        raise TilewrightError("E0501", f"{source}: {_first_line(str(error))}") from error
    except (UnregisteredConstructException, ValueError, OverflowError) as error:
        # What attribute constructors raise for values that they refuse (a negative width, for one).
        raise TilewrightError("E0501", f"{source}: {_first_line(str(error))}") from error
    except RecursionError as error:
        raise TilewrightError("E0501", f"{source}: nested too deeply") from error
    except MemoryError as error:
        # A splat or an integer type may declare more than any machine has.
        raise TilewrightError("E0501", f"{source}: an attribute is too large") from error
    verify(module, source)
    return module


def _parser(context: CompileContext, text: str, source: str) -> Parser:
    """Return xDSL's parser with two faults of its 0.75 lexer mended.

    It repeats a repetition in its expression for strings: a quote that is not closed takes time
    exponential in what follows it on the line, and a damaged file would hang the compiler. And it
    takes a literal with escapes for bytes unless it is ASCII: a node name like "é", which is
    printed with escapes, would not come back as the string that it was.
    """
    from xdsl.parser import Parser
    from xdsl.utils.lexer import Input, Token
    from xdsl.utils.mlir_lexer import MLIRLexer, MLIRTokenKind, StringLiteral

    class Lexer(MLIRLexer):
        _unescaped_characters_regex = re.compile(
            r'"(?:[^"\\\n\v\f]|\\(?:["nt\\]|[0-9A-Fa-f]{2}))*"'
        )

        @override
        def _lex_string_literal(self, start_pos: int) -> Token[MLIRTokenKind, str]:
            token = super()._lex_string_literal(start_pos)
            if token.kind is MLIRTokenKind.BYTES_LIT:
                literal = StringLiteral(token.span.start, token.span.end, token.span.input)
                with contextlib.suppress(UnicodeDecodeError):
                    literal.bytes_contents.decode("utf-8")
                    return Token(MLIRTokenKind.STRING_LIT, literal)
            return token

    parser = Parser(context, "", source)
    state = parser._parser_state
    state.lexer = Lexer(Input(text, source))
    state.current_token = state.lexer.lex()
    return parser


def verify(module: ModuleOp, source: str = "module") -> None:
    """Verify `module`.

    Raises:
        TilewrightError: E0501, with the verifier's words.
    """
    from xdsl.utils.exceptions import DiagnosticException

    try:
        module.verify()
    except DiagnosticException as error:
        lines = [line.rstrip() for line in str(error).splitlines() if line.strip()]
        # xDSL prints the op with its faulty line marked, the reason last.
        raise TilewrightError(
            "E0501", f"{source}: {lines[-1].strip(' ^|') if lines else error}", lines[-8:-1]
        ) from error
    except KeyError as error:
        # Some of xDSL's verifiers read a property before its presence is checked.
        raise TilewrightError("E0501", f"{source}: an operation lacks {error}") from error
    except RecursionError as error:
        raise TilewrightError("E0501", f"{source}: nested too deeply") from error


def print_module(module: ModuleOp, *, generic: bool = False) -> str:
    """Return the module as text, ending in a newline.

    Args:
        module: what to print.
        generic: print the generic form, which a stock `mlir-opt` reads.
    """
    from io import StringIO

    from xdsl.printer import Printer

    out = StringIO()
    Printer(out, print_generic_format=generic).print_op(module)
    return out.getvalue().rstrip("\n") + "\n"


def read_module(
    path: Path, target: Hardware | None = None, *, max_bytes: int = MAX_TEXT_BYTES
) -> tuple[ModuleOp, CompileContext]:
    """Read a module and open the weights it names.

    Args:
        path: the `.mlir` file.
        target: the chip, for the context; None: the one the module names, if it does.
        max_bytes: refuse longer texts.

    Raises:
        TilewrightError: E0701 a file cannot be read; E0501 text, weights name or content is wrong,
            or the module was made for another chip than `target`.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1)
    except OSError as error:
        raise TilewrightError(
            "E0701", f"cannot read `{path}`", [error.strerror or str(error)]
        ) from error
    if len(raw) > max_bytes:
        raise TilewrightError(
            "E0501", f"`{path}` is too long for a module", [f"the limit is {max_bytes} bytes"]
        )
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TilewrightError(
            "E0501", f"`{path}` is not MLIR text", [f"byte {error.start} is not UTF-8"]
        ) from error
    return module_of(text, path.parent, target, str(path))


def module_of(
    text: str, folder: Path, target: Hardware | None, source: str
) -> tuple[ModuleOp, CompileContext]:
    """Parse a module and restore its context from what its attributes record.

    Args:
        text: the module.
        folder: where its weights file lies.
        target: the chip asked for, or None.
        source: what messages call the text.

    Raises:
        TilewrightError: as `read_module`.
    """
    from xdsl.dialects.builtin import StringAttr

    context = new_context(target=target)
    module = parse_text(text, context, source)
    context.target = _target_of(module, target, source)
    weights = module.attributes.get(WEIGHTS_ATTRIBUTE)
    if weights is not None:
        context.weights = _open_weights(folder, weights, source)
        check_weights(module, context.weights, source)
    graph = module.attributes.pop(GRAPH_ATTRIBUTE, None)
    if graph is not None:
        if not isinstance(graph, StringAttr):
            raise TilewrightError("E0501", f"{source}: `{GRAPH_ATTRIBUTE}` must be a string")
        context.graph = parse_text(graph.data, context, f"{source}: {GRAPH_ATTRIBUTE}")
        check_weights(context.graph, context.weights, f"{source}: {GRAPH_ATTRIBUTE}")
    return module, context


def _target_of(module: ModuleOp, given: Hardware | None, source: str) -> Hardware | None:
    """Return the chip the module was made for; quantised numbers depend on it (its rounding)."""
    from xdsl.dialects.builtin import StringAttr

    from tilewright.levels import level_of
    from tilewright.spec.hardware import (
        differences,
        load_target,
        parse_target,
        shipped_targets,
    )

    attribute = module.attributes.get(TARGET_ATTRIBUTE)
    if attribute is None:
        return given
    if not isinstance(attribute, StringAttr):
        raise TilewrightError("E0501", f"{source}: `{TARGET_ATTRIBUTE}` must be a string")
    text = attribute.data
    known = text in shipped_targets()
    own = load_target(text) if known else parse_target(text, f"{source}: {TARGET_ATTRIBUTE}")
    if given is None or given.digest() == own.digest():
        return own
    if level_of(module) in ("onnx", "top"):
        return given
    raise TilewrightError(
        "E0501",
        f"{source} was made for target `{own.name}`, not for `{given.name}`",
        differences(own, given) if own.name == given.name else [],
        "begin again from the unquantised module",
    )


def target_text(target: Hardware) -> str:
    """Return the name of a shipped target, or the whole description of another."""
    from tilewright.spec.hardware import load_target, shipped_targets

    shipped = target.name in shipped_targets()
    same = shipped and load_target(target.name).digest() == target.digest()
    return target.name if same else target.to_yaml()


def _open_weights(folder: Path, attribute: object, source: str) -> WeightStore:
    from safetensors import SafetensorError
    from xdsl.dialects.builtin import StringAttr

    from tilewright.ir.weights import WeightStore

    if not isinstance(attribute, StringAttr):
        raise TilewrightError("E0501", f"{source}: `{WEIGHTS_ATTRIBUTE}` must be a string")
    name = attribute.data
    posix = PurePosixPath(name)
    if (
        not posix.parts
        or posix.is_absolute()
        or ".." in posix.parts
        or "\\" in name
        or "\0" in name
        or PureWindowsPath(name).drive
    ):
        raise TilewrightError(
            "E0501",
            f"{source}: weights file {name!r} is refused",
            ["it must be a relative path without `..`"],
        )
    folder = folder.resolve()
    file = (folder / name).resolve()
    if not file.is_relative_to(folder):
        raise TilewrightError(
            "E0501", f"{source}: weights file {name!r} is refused", ["it leads out of its folder"]
        )
    try:
        return WeightStore.load(file)
    except OSError as error:
        raise TilewrightError(
            "E0701",
            f"cannot read the weights of `{source}`",
            [f"{file}: {error.strerror or error}"],
            "a module and its weights file are moved together",
        ) from error
    except SafetensorError as error:
        raise TilewrightError("E0501", f"`{file}` is not a weights file", [str(error)]) from error


def check_weights(module: ModuleOp, store: WeightStore, source: str = "module") -> None:
    """Check that each `top.weight` exists in the store with the element count its type says.

    Raises:
        TilewrightError: E0501, naming up to eight of the weights that are missing or differ.
    """
    from xdsl.dialects.builtin import StringAttr, TensorType

    wrong: list[str] = []
    for op in module.walk():
        if op.name != "top.weight":
            continue
        name = op.properties.get("name", op.attributes.get("name"))
        kind = op.results[0].type
        if not isinstance(name, StringAttr) or not isinstance(kind, TensorType):
            continue  # the verifier's business
        if name.data not in store:
            wrong.append(f"{name.data!r} is not in the weights file")
        elif (have := store.shape(name.data)) != (want := kind.get_shape()):
            wrong.append(f"{name.data!r} has shape {list(have)}, the module says {list(want)}")
    if wrong:
        more = [f"and {len(wrong) - 8} more"] if len(wrong) > 8 else []
        raise TilewrightError("E0501", f"{source}: weights do not fit", [*wrong[:8], *more])


def write_module(
    module: ModuleOp, context: CompileContext, path: Path, *, generic: bool = False
) -> None:
    """Write `path` and, if there are weights, the safetensors file beside it.

    The text also names the weights file, the target and, once lowered, the graph the module came
    from; `module` itself is left as it is. A device or pipe (`/dev/null`) gets the text only.

    Raises:
        TilewrightError: E0701; what stood there before is still there.
    """
    weights_name = f"{path.name.removesuffix('.mlir')}.weights.safetensors"
    text = text_with_records(module, context, weights_name, generic=generic)
    if is_special(path):
        write_atomically(path, text.encode())
        return
    with _scratch(path) as scratch:
        scratch.write_text(text, "utf-8")
        if len(context.weights):
            _save_weights(context.weights, path.with_name(weights_name))
        scratch.replace(path.resolve())


def text_with_records(
    module: ModuleOp, context: CompileContext, weights_name: str, *, generic: bool = False
) -> str:
    """Return the text of `module` with the attributes from which a context is restored."""
    from xdsl.dialects.builtin import StringAttr

    own = dict(module.attributes)
    for key in (WEIGHTS_ATTRIBUTE, TARGET_ATTRIBUTE, GRAPH_ATTRIBUTE):
        module.attributes.pop(key, None)
    if len(context.weights):
        module.attributes[WEIGHTS_ATTRIBUTE] = StringAttr(weights_name)
    if context.target is not None:
        module.attributes[TARGET_ATTRIBUTE] = StringAttr(target_text(context.target))
    if context.graph is not None:
        module.attributes[GRAPH_ATTRIBUTE] = StringAttr(print_module(context.graph))
    try:
        return print_module(module, generic=generic)
    finally:
        module.attributes.clear()
        module.attributes.update(own)


def _save_weights(store: WeightStore, path: Path) -> None:
    from safetensors import SafetensorError

    try:
        store.save(path)
    except (OSError, SafetensorError) as error:
        path.with_name(path.name + ".partial").unlink(missing_ok=True)
        raise TilewrightError("E0701", f"cannot write `{path}`", [str(error)]) from error


def is_special(path: Path) -> bool:
    """Return whether `path` is there and not a file: a device, a pipe, a folder."""
    return path.exists() and not path.is_file()


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that it is there wholly or not at all.

    Symbolic links are followed. A device or pipe is written to: renaming would replace it, and
    root may rename over `/dev/null`.

    Raises:
        TilewrightError: E0701.
    """
    if is_special(path):
        try:
            with path.open("wb") as file:
                file.write(data)
        except OSError as error:
            raise TilewrightError(
                "E0701", f"cannot write `{path}`", [error.strerror or str(error)]
            ) from error
        return
    with _scratch(path) as scratch:
        scratch.write_bytes(data)
        scratch.replace(path.resolve())


@contextlib.contextmanager
def _scratch(path: Path):
    """Yield a path beside `path`; it is gone afterwards unless it was renamed."""
    real = path.resolve()
    scratch = real.with_name(f".{real.name}.{os.getpid()}.partial")
    try:
        yield scratch
    except OSError as error:
        raise TilewrightError(
            "E0701", f"cannot write `{path}`", [error.strerror or str(error)]
        ) from error
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)


def _position(offset: int, text: str) -> tuple[int, int]:
    """Return 1-based line and column of `offset`."""
    before = text[:offset]
    return before.count("\n") + 1, offset - (before.rfind("\n") + 1) + 1


def _excerpt(text: str, line: int, column: int) -> list[str]:
    """Return the line and a caret; a window of 90 columns when the line is long."""
    lines = text.split("\n")
    if line > len(lines):
        return []
    start = max(0, column - 60)
    return [lines[line - 1][start : start + 90], " " * (column - 1 - start) + "^"]


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "malformed")


def layer_name(op: Operation) -> str:
    """Return the user's node name that `op` carries (`layer` or `name`), or the op's own name."""
    from xdsl.dialects.builtin import StringAttr

    for key in ("layer", "name"):
        value = op.properties.get(key, op.attributes.get(key))
        if isinstance(value, StringAttr):
            return value.data
    return op.name
