"""Target files as people, and attackers, write them."""

from __future__ import annotations

from importlib import resources

import pytest

from tilewright.diagnostics import TilewrightError
from tilewright.spec.hardware import parse_target

TINY = (resources.files("tilewright.spec") / "targets" / "tiny8.yaml").read_text("utf-8")
BOMB = "a0: &a0 [x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 20)
)


def test_the_text_used_here_is_legal() -> None:
    assert parse_target(TINY).name == "tiny8"


@pytest.mark.parametrize(
    "text",
    [
        "", "[1]", "just words", "a: [", "[" * 5000, "{a: " * 3000, BOMB, "a: &a [*a]\n" + TINY,
        "5: 3\n" + TINY, "~: 3\n" + TINY, "? [1, 2]\n: 3\n" + TINY, "!!python/name:os.system x",
        TINY.replace("[8, 8]", "&a [*a]"), TINY.replace("[8, 8]", "{a: 1}"),
        TINY.replace("32768", "2026-13-45"), TINY.replace("32768", ".nan"),
        TINY.replace("32768", "true"), TINY.replace("32768", "9" * 5000), TINY + "sram: 4\n",
        TINY.replace("half_up", "null"), TINY.replace("[int8]", "int8"),
        TINY.replace("[int8]", "[]"), TINY + "rounding: truncate\n",
    ],
    ids=range(23),
)  # fmt: skip
def test_wrong_target_files_are_refused(text: str) -> None:
    with pytest.raises(TilewrightError) as caught:
        parse_target(text, "chip.yaml")
    assert caught.value.code == "E0201"
    assert "chip.yaml" in caught.value.message
