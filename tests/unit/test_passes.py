"""The pass registry and the pipeline notation."""

from __future__ import annotations

import ast
import time

import pytest

from tilewright import passes
from tilewright.diagnostics import UsageError


def test_every_pass_class_is_found() -> None:
    """Walk the syntax trees, which the registry does not do, and compare."""
    expected: set[tuple[str, str]] = set()
    for root in passes.ROOTS:
        for file in (passes.PACKAGE / root).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ClassDef) and any(
                    isinstance(base, ast.Name) and base.id == "ModulePass" for base in node.bases
                ):
                    expected.add((file.name, node.name))
    found = {(e.file.name, e.attribute) for e in passes.registry().values() if e.file}
    assert found == expected


@pytest.mark.parametrize("name", sorted(passes.registry()))
def test_pass_loads_and_is_named_after_its_file(name: str) -> None:
    entry = passes.registry()[name]
    cls = entry.load()
    assert cls.name == name
    assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    if entry.file:
        kebab = entry.file.stem.replace("_", "-")
        assert name in (kebab, f"{entry.folder}-{kebab}")
        assert (cls.__doc__ or "").strip(), "a pass says what it does"


def test_listing_is_quick() -> None:
    passes.registry.cache_clear()
    start = time.perf_counter()
    passes.registry()
    assert time.perf_counter() - start < 0.25


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("canonicalize", ["canonicalize"]),
        ("builtin.module(canonicalize)", ["canonicalize"]),
        (
            "builtin.module(func.func(canonicalize,lower-affine), canonicalize)",
            ["canonicalize", "lower-affine", "canonicalize"],
        ),
        (" any( canonicalize ) ", ["canonicalize"]),
        ("builtin.module()", []),
        ("", []),
    ],
)
def test_pipelines(text: str, names: list[str]) -> None:
    assert [step.name for step in passes.parse_pipeline(text)] == names


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("builtin.module(canonicalize", "not closed"),
        ("canonicalize)", "without `(`"),
        ("canonicalize canonicalize", "`,` is expected"),
        ("builtin.module(canonicalize))", "without `(`"),
        ("canonicalize{a=1", "not closed"),
        ("canonicalize,", "pass name is expected"),
        ("canonicalize,,canonicalize", "pass name is expected"),
        ("=", "pass name is expected"),
        ("canonicalise", "there is no pass `canonicalise`"),
        ("canonicalize{speed=3}", "cannot be made"),
        ("func.func(" * 20 + ")" * 20, "too deeply"),
    ],
)
def test_bad_pipelines(text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        passes.parse_pipeline(text)
    assert says in str(caught.value)


def test_suggestion() -> None:
    with pytest.raises(UsageError) as caught:
        passes.find_pass("canonicalise")
    assert caught.value.hint == "did you mean `canonicalize`?"
