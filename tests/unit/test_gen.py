"""The generated-docs check must fail on each kind of drift."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tools import gen


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A scratch docs/reference with two cheap pages, up to date."""
    reference = tmp_path / "docs" / "reference"
    monkeypatch.setattr(gen, "FOLDER", reference)
    pages: dict[str, Callable[[], str]] = {"errors.md": gen.errors, "isa.md": gen.isa}
    monkeypatch.setattr(gen, "PAGES", pages)
    assert gen.main([]) == 0
    return reference


def test_up_to_date(folder: Path) -> None:
    assert gen.main(["--check"]) == 0


def test_edited_missing_and_stray_pages(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = folder / "isa.md"
    text = page.read_text()
    page.write_text(text.replace("halt", "stop"))
    assert gen.main(["--check"]) == 1
    assert "isa.md" in capsys.readouterr().err
    page.unlink()
    assert gen.main(["--check"]) == 1
    assert not page.exists(), "--check writes nothing"
    assert gen.main([]) == 0
    assert page.read_text() == text
    (folder / "old.md").write_text("left over")
    assert gen.main(["--check"]) == 1


def test_a_changed_table_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewright import diagnostics

    monkeypatch.setitem(diagnostics.CODES, "E9999", "Something new.")
    assert gen.main(["--check"]) == 1


def test_pages_hold_every_row() -> None:
    from tilewright.diagnostics import CODES
    from tilewright.passes import registry
    from tilewright.spec.counters import COUNTERS
    from tilewright.spec.hardware import Hardware
    from tilewright.spec.isa import INSTRUCTIONS

    assert all(f"| {code} |" in gen.errors() for code in CODES)
    isa = gen.isa()
    for instruction in INSTRUCTIONS:
        assert f"## {instruction.name}\n" in isa
        assert all(f"`{field.name}`" in isa for field in instruction.own_fields)
    targets = gen.targets()
    assert all(f"| `{name}` |" in targets for name in Hardware.model_fields)
    counters = gen.counters()
    assert all(f"| `{counter.name}` | {counter.scope.value} |" in counters for counter in COUNTERS)
    passes = gen.passes()
    assert all(f"### {name}\n" in passes for name in registry())


def test_cells_cannot_break_the_table() -> None:
    assert gen.table(("a",), [("x | y\nz",)]) == "| a |\n|---|\n| x \\| y z |\n"
