"""Who may import whom, how long a file may be, and what start-up may load."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "tilewright"

ANY = {"*"}
IR = {"spec", "ir", "diagnostics"}

ALLOWED: dict[str, set[str]] = {
    # The tables know nothing of the compiler.
    "diagnostics": set(),
    "spec": {"diagnostics"},
    # An independent oracle: it must not share a mistake with the compiler.
    "sim": {"spec", "diagnostics"},
    "ir": {"spec", "diagnostics", "levels", "passes"},
    "dialects": IR,
    # The integer definitions stand alone; host ops run on the float executor.
    "quant": IR | {"dialects", "runtime"},
    "interp": IR | {"dialects"},
    "frontends": IR | {"dialects", "passes"},
    # Constant folding runs the float executor, which is all of `runtime` that passes may know.
    "transforms": IR | {"dialects", "frontends", "quant", "schedule", "runtime"},
    "schedule": IR | {"dialects"},
    "codegen": IR | {"dialects", "schedule", "quant", "transforms"},
    "levels": IR | {"dialects", "quant", "interp", "runtime", "sim", "codegen"},
    "passes": {"diagnostics", "ir"},
    "runtime": IR | {"dialects", "codegen", "sim", "frontends", "levels", "quant"},
    "report": IR | {"codegen", "runtime", "sim", "quant"},
    # Users of everything.
    "pipelines": ANY,
    "cli": ANY,
    "tools": ANY,
}
"""Part of the package -> parts it may import, lazily or not. Parts not listed may import all."""

FORBIDDEN: dict[str, set[str]] = {
    # The three executions of an integer model are compared with each other: none may call another.
    "quant/reference.py": {"sim", "interp", "transforms", "codegen"},
    "quant/kernels.py": {"sim", "interp", "transforms", "codegen", "dialects"},
    "quant/kernels_rows.py": {"sim", "interp", "transforms", "codegen", "dialects"},
    "interp": {"sim", "quant"},
    "sim": {"quant", "interp"},
}
"""Stricter rules for single files or parts."""

EXCEPTIONS = {
    # A host step is an ONNX model; the float graph's export lies with its runtime.
    ("codegen/assemble.py", "tilewright.runtime.top_to_onnx"),
    # Host segments have no integer lowering: their floats are computed as the reference does.
    ("interp/host.py", "tilewright.quant.reference"),
    # What a waveform measured is an input of the pass; reading it needs only the tables.
    ("transforms/tpu/annotate_timing.py", "tilewright.waves.retire"),
    ("transforms/tpu/annotate_timing.py", "tilewright.waves.identity"),
    # A new order is only taken if the verifier accepts it.
    ("transforms/tpu/schedule_instructions.py", "tilewright.codegen.verify"),
    ("transforms/tpu/schedule_instructions.py", "tilewright.codegen.verify_parameters"),
    # Only here is it known which constant each read is meant for.
    ("transforms/tpu/lower_affine_to_tpu.py", "tilewright.codegen.verify_parameters"),
}
"""(file, module) allowed against the rules, with the reason."""

HEAVY = ("numpy", "numba", "onnx", "onnxruntime", "torch", "xdsl", "scipy", "pydantic", "PIL")


def sources(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def part_of(file: Path) -> str:
    relative = file.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def imports_of(tree: ast.AST, file: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import, wherever it stands, relative ones resolved."""
    package = ("tilewright", *file.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                kept = package[: len(package) - node.level + 1]
                base = ".".join([*kept, *([base] if base else [])])
            if base == "tilewright":
                for alias in node.names:
                    yield node.lineno, f"tilewright.{alias.name}"
            else:
                yield node.lineno, base
        elif isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else None
            called = node.func.id if isinstance(node.func, ast.Name) else called
            first = node.args[0]
            if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
                yield node.lineno, str(first.value)


def broken_rules(file: Path, text: str) -> list[str]:
    part = part_of(file)
    relative = file.relative_to(PACKAGE).as_posix()
    allowed = ALLOWED.get(part, ANY)
    forbidden = FORBIDDEN.get(part, set()) | FORBIDDEN.get(relative, set())
    found: list[str] = []
    for line, name in imports_of(ast.parse(text), file):
        root, _, rest = name.partition(".")
        if root != "tilewright" or not rest:
            continue
        other = rest.split(".")[0]
        if other == part:
            continue
        if (relative, name) in EXCEPTIONS:
            continue
        if (allowed is not ANY and other not in allowed) or other in forbidden:
            found.append(f"{relative}:{line}: `{part}` must not import `{other}` ({name})")
    return found


def test_direction_of_imports() -> None:
    files = sources(PACKAGE)
    assert len(files) > 20
    broken = [line for file in files for line in broken_rules(file, file.read_text("utf-8"))]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("file", "text", "count"),
    [
        ("sim/functional.py", "from tilewright.spec.isa import decode", 0),
        ("sim/functional.py", "from tilewright.quant.reference import run_quant", 1),
        ("sim/functional.py", "def f():\n    import tilewright.dialects.tpu", 1),
        ("sim/functional.py", "from tilewright import interp", 1),
        ("sim/functional.py", "from ..codegen import image", 1),
        ("sim/functional.py", "from . import trace", 0),
        ("sim/functional.py", "importlib.import_module('tilewright.interp.run')", 1),
        ("spec/isa.py", "from tilewright.ir.context import CompileContext", 1),
        ("dialects/top/ops.py", "from tilewright.transforms.top import fold_bn", 1),
        ("quant/reference.py", "from tilewright.sim import functional", 1),
        ("interp/run.py", "from tilewright.quant import kernels", 1),
    ],
)
def test_the_rule_itself(file: str, text: str, count: int) -> None:
    assert len(broken_rules(PACKAGE / file, text)) == count


def test_files_stay_readable() -> None:
    files = [f for folder in ("src", "tests", "tools", "bench") for f in sources(ROOT / folder)]
    lengths = {file: len(file.read_text("utf-8").splitlines()) for file in files}
    long = [f"{file.relative_to(ROOT)}: {count}" for file, count in lengths.items() if count > 800]
    assert not long, f"over 800 lines: {long}"


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=True, cwd=ROOT
    )


@pytest.mark.parametrize(
    "module",
    [
        "tilewright",
        "tilewright.cli",
        "tilewright.diagnostics",
        "tilewright.passes",
        "tilewright.pipelines",
        "tilewright.tools.opt",
        "tilewright.tools.translate",
        "tilewright.tools.runner",
    ],
)
def test_start_up_imports_nothing_heavy(module: str) -> None:
    code = (
        f"import sys, {module}\n"
        f"print(*sorted(set({HEAVY!r}) & set(n.split('.')[0] for n in sys.modules)))"
    )
    assert _run("-c", code).stdout.strip() == ""


def test_help_is_quick() -> None:
    """0.3 s on an idle machine; what a bare interpreter takes now says how busy this one is."""

    def best(*arguments: str) -> float:
        times: list[float] = []
        for _ in range(5):
            start = time.perf_counter()
            _run(*arguments)
            times.append(time.perf_counter() - start)
        return min(times)

    bare = best("-c", "pass")
    told = best("-c", "from tilewright.cli import main; raise SystemExit(main(['--help']))")
    assert told < max(0.3, 8 * bare), f"--help takes {told:.2f} s, a bare interpreter {bare:.2f} s"
