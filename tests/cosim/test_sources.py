"""Modules of a user in place of ours: what joins, what differs, and what a broken folder says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.cosim.own import slow_engine, wrong_constant
from tests.cosim.support import needs_verilator
from tests.unit.sim_programs import conv_case
from tilewright.cosim.build import build_library
from tilewright.cosim.compare import Comparison, compare_program, counter_differences
from tilewright.cosim.driver import RtlSimulator
from tilewright.cosim.sources import (
    RTL_FOLDER,
    missing_pins,
    name_places,
    port_widths,
    read_sources,
    rtl_sources,
    wrong_ports,
)
from tilewright.diagnostics import TilewrightError, UsageError
from tilewright.rtl.package import sv_package
from tilewright.spec.hardware import load_target

TINY = load_target("tiny8")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rtl"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    folder = tmp_path / "my_rtl"
    folder.mkdir()
    return folder


def compare(folder: Path, seed: int = 3) -> Comparison:
    case = conv_case(TINY, seed)
    chip = RtlSimulator(TINY, sources=tuple(rtl_sources(folder)))
    return compare_program(chip, case.program, case.ddr)


def fails(folder: Path) -> TilewrightError:
    with pytest.raises(TilewrightError) as caught:
        build_library(TINY, sources=rtl_sources(folder))
    assert caught.value.code == "E0803"
    return caught.value


def test_what_takes_the_place_of_what(own: Path) -> None:
    for name in ("tw_mac.v", "tw_dma.sv", "mine.sv", "zz.v", "sizes.svh", "notes.txt", ".x.sv"):
        (own / name).write_text("module x; endmodule\n")
    (own / "types.sv").write_text("// types\npackage my_types;\nendpackage\n")
    ours = {path.name for path in rtl_sources()}
    files = rtl_sources(own)
    names = [path.name for path in files]
    assert names[0] == "types.sv"
    assert names[-1] == "sizes.svh"
    added = {"tw_mac.v", "types.sv", "mine.sv", "zz.v", "sizes.svh"}
    assert set(names) == (ours - {"tw_mac.sv"}) | added
    assert {path.name for path in files if path.parent == own} == {*added, "tw_dma.sv"}


def test_folders_that_cannot_be_used(own: Path) -> None:
    with pytest.raises(UsageError, match="there are no modules"):
        rtl_sources(own)
    (own / "a.sv").write_text("")
    (own / "a.v").write_text("")
    with pytest.raises(UsageError, match=r"`a\.sv` and `a\.v`"):
        rtl_sources(own)
    with pytest.raises(UsageError, match="is not a folder"):
        rtl_sources(own / "a.sv")
    with pytest.raises(TilewrightError, match="cannot read") as caught:
        rtl_sources(own / "nowhere")
    assert caught.value.code == "E0701"
    (own / "a.v").unlink()
    (own / "a.sv").unlink()
    (own / "a.sv").symlink_to(own / "gone")
    with pytest.raises(TilewrightError, match=r"cannot read .*a\.sv") as caught:
        build_library(TINY, sources=rtl_sources(own))
    assert caught.value.code == "E0701"


@needs_verilator
def test_a_wrong_constant_is_a_wrong_value(own: Path) -> None:
    found = compare(wrong_constant(own))
    assert not found.same_values
    assert found.same_times
    assert any(item.writer and item.writer.name == "vec_drain" for item in found.bytes)


@needs_verilator
def test_a_slower_engine_is_a_difference_of_times_only(own: Path) -> None:
    found = compare(slow_engine(own))
    assert found.same_values
    assert not found.same_times
    first = found.times[0]
    assert first.engine == "mac"
    assert first.found[1] == first.expected[1] + 1
    assert f"start must be {first.expected[1]}, not {first.found[1]}" in "\n".join(found.lines())


@needs_verilator
def test_an_added_file_and_a_header_make_another_library(own: Path, cache: Path) -> None:
    text = (RTL_FOLDER / "tw_sem.sv").read_text()
    (own / "tw_sem.sv").write_text('`include "note.svh"\n' + text)
    (own / "note.svh").write_text("// a\n")
    first = build_library(TINY, sources=rtl_sources(own))
    assert first.built
    assert not build_library(TINY, sources=rtl_sources(own)).built
    (own / "note.svh").write_text("`error is not SystemVerilog\n")
    assert "note.svh" in read_sources(rtl_sources(own), TINY, "")[0]
    error = fails(own)
    assert any(f"{own}/note.svh:1" in line for line in error.details)


@needs_verilator
def test_a_mistake_names_the_users_file(own: Path, cache: Path) -> None:
    text = (RTL_FOLDER / "tw_sem.sv").read_text()
    (own / "tw_sem.v").write_text(text.replace("endmodule", "assign nothing here\nendmodule"))
    line = text.splitlines().index("endmodule") + 1
    details = fails(own).details
    assert any(f"{own}/tw_sem.v:{line}:" in item or f"{own}/tw_sem.v:{line + 1}:" in item
               for item in details)  # fmt: skip


@needs_verilator
def test_a_module_in_two_files(own: Path, cache: Path) -> None:
    (own / "mine.sv").write_text((RTL_FOLDER / "tw_sem.sv").read_text())
    details = "\n".join(fails(own).details)
    assert "Duplicate declaration of module: 'tw_sem'" in details
    assert f"{own}/mine.sv" in details


@needs_verilator
def test_ports_an_engine_lacks(own: Path, cache: Path) -> None:
    text = (RTL_FOLDER / "tw_mac.sv").read_text()
    text = text.replace(",\n    output logic accumulator_stall\n", "\n    ")
    text = text.replace("  assign accumulator_stall = state_q == RUN && !half_free;\n", "")
    assert "accumulator_stall" not in text
    (own / "tw_mac.v").write_text(text)
    assert fails(own).details[0] == (
        f"`{own}/tw_mac.v`: module `tw_mac` has no port `accumulator_stall`"
    )


@needs_verilator
def test_ports_a_chip_lacks(own: Path, cache: Path) -> None:
    text = (Path(__file__).with_name("stub_top.sv")).read_text()
    text = text.replace("output logic trapped,", "").replace(", trapped}", "}")
    text = text.replace("[5:0] engine_idle", "[3:0] engine_idle")
    (own / "tw_top.sv").write_text(text)
    error = fails(own)
    assert f"`{own}/tw_top.sv` lacks ports of `tw_top`" in error.message
    assert error.details == [
        "it has no output `trapped` of 1 bit",
        "it needs output `engine_idle` of 6 bits, not output of 4",
    ]


@needs_verilator
def test_a_package_of_the_users(own: Path, cache: Path) -> None:
    """The package of the target may lie in the folder; another cannot be meant."""
    (own / "tw_sem.sv").write_text((RTL_FOLDER / "tw_sem.sv").read_text())
    (own / "tw_pkg.sv").write_text(sv_package(TINY))
    assert build_library(TINY, sources=rtl_sources(own)).path.is_file()
    (own / "tw_pkg.sv").write_text(sv_package(load_target("edge16")))
    error = fails(own)
    assert f"`{own}/tw_pkg.sv` is not the package of target `tiny8`" in error.message
    assert "python -m tilewright.rtl.package tiny8" in (error.hint or "")


def test_all_ports_of_our_top_are_known() -> None:
    """The list of ports is that of the shipped top, but for bits."""
    text = (RTL_FOLDER / "tw_top.sv").read_text()
    head = text[: text.index(");")]
    found = {
        line.split()[-1].strip(","): line.split()[0]
        for line in head.splitlines()
        if line.strip().startswith(("input", "output"))
    }
    assert found == {name: direction for name, (direction, _) in port_widths(TINY).items()}


def test_ports_in_a_header() -> None:
    kinds = {1: "8", 6: "8", 40: "64", 32: ""}
    lines = [
        f"    VL_{'IN' if direction == 'input' else 'OUT'}{kinds.get(bits, 'W')}(&{name},"
        f"{bits - 1},0{',2' if bits not in kinds else ''});"
        for name, (direction, bits) in port_widths(TINY).items()
    ]
    assert wrong_ports("\n".join(lines), TINY) == []
    assert wrong_ports("\n".join(lines[1:]), TINY) == ["it has no input `clk` of 1 bit"]
    larger = TINY.model_copy(update={"ddr_bus_bytes": 2 * TINY.ddr_bus_bytes})
    assert [line.split("`")[1] for line in wrong_ports("\n".join(lines), larger)] == [
        "mem_read_data", "mem_mask", "mem_data",
    ]  # fmt: skip


def test_places_are_named_whole() -> None:
    own = {"a.sv": Path("/u/a.sv"), "b.v": Path("/u/b.v")}
    assert name_places("%Error: a.sv:3:1: x", own) == "%Error: /u/a.sv:3:1: x"
    assert name_places("%Error: aa.sv:3:1: a.sv is read", own) == "%Error: aa.sv:3:1: a.sv is read"
    text = {"tw_top.sv": b"  tw_x x (\n   .a\n  );\n  tw_y #(1) y (\n   .b\n"}
    lines = ["%Error: tw_top.sv:5:4: Pin not found: 'b'", "%Error: a.sv:1:1: Pin not found: 'q'"]
    assert missing_pins(lines, text, own) == ["module `tw_y` has no port `b`"]


@needs_verilator
def test_counters_tied_to_zero_are_not_compared() -> None:
    case = conv_case(TINY, 3)
    found = compare_program(RtlSimulator(TINY), case.program, case.ddr)
    none = {engine: dict.fromkeys(own, 0) for engine, own in found.rtl.counters.items()}
    rtl = replace(found.rtl, counters=none)
    assert counter_differences(rtl, found.cycle), "it still counts cycles"
    assert counter_differences(replace(rtl, counted_cycles=0), found.cycle) == []
