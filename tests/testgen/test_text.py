"""Stress tests as text: they come back the same, and no head is taken on trust."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tilewright.diagnostics import TilewrightError
from tilewright.spec.hardware import load_target
from tilewright.spec.program import encode_program
from tilewright.testgen.memory import CHUNK, Window, make_ddr
from tilewright.testgen.programs import generate
from tilewright.testgen.text import MAX_WINDOW_BYTES, from_text, to_text

TINY = load_target("tiny8")
HEAD = ["; name: x-1", "; target: tiny8", "; seed: 1", "; window: 0x0 0x11000"]


def text(*lines: str, **changed: str) -> str:
    """Return a test; a line of the head may be changed by its key, lines be added behind it."""
    head = [f"; {key}: {changed[key]}" if (key := line[2:].split(":")[0]) in changed else line
            for line in HEAD]  # fmt: skip
    return "\n".join([*head, *lines, "halt"]) + "\n"


@pytest.mark.parametrize("profile", ["control", "address"])
def test_text_round_trip(profile: str) -> None:
    case = generate(TINY, profile, 11)
    again = from_text(to_text(case, "time: late\nby one"), load_target)
    assert encode_program(again.program) == encode_program(case.program)
    assert (again.name, again.seed, again.windows, again.registers) == (
        case.name, case.seed, case.windows, case.registers,
    )  # fmt: skip
    assert [i.layer for i in again.program] == [i.layer for i in case.program]


@pytest.mark.parametrize("key", ["name", "target", "seed", "window"])
def test_an_incomplete_head_is_refused(key: str) -> None:
    lines = [line for line in HEAD if not line.startswith(f"; {key}:")]
    with pytest.raises(TilewrightError, match="head of the stress test is incomplete") as caught:
        from_text("\n".join([*lines, "halt"]), load_target)
    assert caught.value.code == "E0601"
    assert caught.value.details == [f"there is no line `; {key}: `"]


WINDOW = "window in the DDR of `tiny8` must be 0x0..0xffffffff, not "


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("seed", "-1", f"line 3: seed must be 0..{2**63 - 1}, not -1"),
        ("seed", "9" * 30, "line 3: seed must be 0.."),
        ("seed", "9" * 5000, "line 3: seed must be 0.."),
        ("seed", "1.5", "line 3: seed must be 0.."),
        ("seed", "\u0663", "line 3: seed must be 0.."),
        ("window", "-0x10 0x11000", f"line 4: address of a {WINDOW}-0x10"),
        ("window", "0x100000000 0x11000", f"line 4: address of a {WINDOW}0x100000000"),
        ("window", "0 -5", "line 4: size of a window (all of them together: 0x4000000 bytes) must "
         "be 0x1..0x4000000, not -5"),
        ("window", "0 0", "must be 0x1..0x4000000, not 0"),
        ("window", "0 0x4000001", "must be 0x1..0x4000000, not 0x4000001"),
        ("window", "0 0x10000000000", "must be 0x1..0x4000000, not 0x10000000000"),
        ("window", "0xffff0000 0x10001", "line 4: size of a window at 0xffff0000 in the DDR of "
         "`tiny8` must be 0x1..0x10000, not 0x10001"),
        ("window", "0x0 0xfff", "line 4: a window must hold the parameters and tables at "
         "0x0..0xfff: address 0, size 0x1000 or more"),
        ("window", "0x8000 0x11000", "line 4: a window must hold the parameters"),
        ("window", "0", "line 4: window must be an address and a size, not '0'"),
        ("window", "0 1 2", "line 4: window must be an address and a size, not '0 1 2'"),
        ("name", "../../../x", "line 1: name must be 1..100 of A-Z a-z 0-9 _ . -, not a dot first, "
         "not '../../../x'"),
        ("name", ".x", "line 1: name must be"),
        ("name", "a/b", "line 1: name must be"),
        ("name", "a b", "line 1: name must be"),
        ("name", "a" * 101, "line 1: name must be"),
    ],
)  # fmt: skip
def test_values_of_the_head_are_checked(key: str, value: str, message: str) -> None:
    with pytest.raises(TilewrightError, match=re.escape(message)) as caught:
        from_text(text(**{key: value}), load_target)
    assert caught.value.code == "E0601"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("; register: 0 0x5", "line 5: number of a register must be 1..15, not 0"),
        ("; register: 16 0x5", "line 5: number of a register must be 1..15, not 16"),
        ("; register: -1 0x5", "line 5: number of a register must be 1..15, not -1"),
        ("; register: 1 -1", "line 5: value of register 1 must be 0x0..0xffffffffff, not -1"),
        ("; register: 1 0x10000000000", "must be 0x0..0xffffffffff, not 0x10000000000"),
        ("; register: 1", "line 5: register must be a number and a value, not '1'"),
        ("; seed: 2", "line 5: `; seed: ` is given twice"),
        ("; window: 0x20000 0x4000000", "line 5: size of a window (all of them together: 0x4000000 "
         "bytes) must be 0x1..0x3fef000, not 0x4000000"),
    ],
)  # fmt: skip
def test_further_lines_of_the_head_are_checked(line: str, message: str) -> None:
    with pytest.raises(TilewrightError, match=re.escape(message)) as caught:
        from_text(text(line), load_target)
    assert caught.value.code == "E0601"


def test_a_register_is_given_once_and_windows_end() -> None:
    with pytest.raises(TilewrightError, match="line 6: register 3 is given twice"):
        from_text(text("; register: 3 1", "; register: 3 2"), load_target)
    with pytest.raises(TilewrightError, match="line 5: all windows together must be at most"):
        from_text(text("; window: 0x100000 1", window=f"0 {MAX_WINDOW_BYTES}"), load_target)


def test_the_ends_of_the_ranges_are_legal() -> None:
    lines = ["; register: 15 0xffffffffff", "; register: 1 0", "; window: 0xfffff000 4096"]
    case = from_text(
        text(*lines, name="A-b_0.9", seed=str(2**63 - 1), window="0 4096"), load_target
    )
    assert case.registers == {15: (1 << 40) - 1, 1: 0}
    assert case.windows == (Window(0, 4096), Window(0xFFFFF000, 4096))
    assert (case.name, case.seed) == ("A-b_0.9", 2**63 - 1)
    assert case.ddr().content.size == 1 << 32


def test_large_windows_are_filled_in_parts() -> None:
    size = 2 * CHUNK + 4096
    content = make_ddr(TINY, 3, (Window(0, size),)).content
    parts = [content[start : start + 65536] for start in (65536, CHUNK, 2 * CHUNK - 65536)]
    assert all(len(np.unique(part)) == 256 for part in parts)
    assert len(np.unique(content[2 * CHUNK :])) > 100
    assert (parts[0] != parts[1]).any()
