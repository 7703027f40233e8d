"""The first write of a run that differs from its program, from waveforms that were spoilt."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.sim_programs import ConvCase, conv_case
from tests.waves.runs import TOP, UnitWrite, write_run
from tilewright.diagnostics import TilewrightError
from tilewright.spec.hardware import load_target
from tilewright.spec.program import Instr
from tilewright.waves.difference import first_difference

TINY = load_target("tiny8")


@pytest.fixture(scope="module")
def case() -> ConvCase:
    made = conv_case(TINY, 3, height=5, width=4)
    for number, instr in enumerate(made.program):
        instr.layer = f"node{number}"
    return made


def place_of(case: ConvCase, name: str) -> int:
    return next(i for i, instr in enumerate(case.program) if instr.name == name)


def of(writes: list[UnitWrite], name: str) -> list[UnitWrite]:
    return sorted((w for w in writes if w.item.name == name), key=lambda w: w.cycle)


@pytest.mark.parametrize("ddr_ports", [True, False])
def test_a_right_run_has_none(tmp_path: Path, case: ConvCase, ddr_ports: bool) -> None:
    path = write_run(tmp_path / "a.vcd", case.program, TINY, case.ddr, ddr_ports=ddr_ports)
    assert first_difference(path, case.program, TINY, case.ddr) is None


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", ["dma_load", "vec_drain", "dma_store"])
def test_a_wrong_bit_is_found_where_it_is_written(
    tmp_path: Path, case: ConvCase, name: str, split: bool
) -> None:
    seen: list[UnitWrite] = []

    def spoil(writes: list[UnitWrite]) -> None:
        own = of(writes, name)
        # A later one is wrong too, and must not be the one that is told.
        for write in (own[len(own) // 2], own[-1]):
            write.data ^= 1 << 8 * ((write.mask & -write.mask).bit_length() - 1)
        seen.append(own[len(own) // 2])

    path = write_run(tmp_path / "a.vcd", case.program, TINY, case.ddr, spoil, split=split)
    found = first_difference(path, case.program, TINY, case.ddr)
    assert found is not None
    (wrong,) = seen
    offset = (wrong.mask & -wrong.mask).bit_length() - 1
    assert (found.kind, found.cycle, found.name) == ("value", wrong.cycle, name)
    assert found.index == wrong.item.index
    assert found.layer == f"node{wrong.item.index}"
    assert found.address == wrong.address + offset
    assert found.found == found.expected ^ 1
    assert found.memory == ("ddr" if name == "dma_store" else "sram")
    port = 4 if name == "vec_drain" else 5 + wrong.item.engine
    signal = "mem_data" if name == "dma_store" else f"sram.request[{port}]"
    assert found.signal == f"{TOP}.{signal}"
    assert found.op.startswith(f"tpu.{name} #tpu.f<")
    assert found.conv == (place_of(case, "mac_conv") if name == "vec_drain" else -1)
    text = "\n".join(found.lines())
    for part in (f"cycle {wrong.cycle}", f"0x{found.address:x}", f'"node{wrong.item.index}"'):
        assert part in text
    assert found.to_json()["address"] == found.address


def test_a_write_elsewhere_is_found(tmp_path: Path, case: ConvCase) -> None:
    def spoil(writes: list[UnitWrite]) -> None:
        of(writes, "vec_drain")[2].address += TINY.bank_size // 2

    path = write_run(tmp_path / "a.vcd", case.program, TINY, case.ddr, spoil)
    found = first_difference(path, case.program, TINY, case.ddr)
    assert found is not None
    assert (found.kind, found.name, found.expected) == ("outside", "vec_drain", -1)


@pytest.mark.parametrize("name", ["dma_load", "vec_drain", "dma_store"])
def test_a_write_left_out_is_found_when_the_instruction_ends(
    tmp_path: Path, case: ConvCase, name: str
) -> None:
    lost: list[UnitWrite] = []

    def spoil(writes: list[UnitWrite]) -> None:
        lost.append(of(writes, name)[1])
        writes.remove(lost[0])

    path = write_run(tmp_path / "a.vcd", case.program, TINY, case.ddr, spoil)
    found = first_difference(path, case.program, TINY, case.ddr)
    assert found is not None
    offset = (lost[0].mask & -lost[0].mask).bit_length() - 1
    assert (found.kind, found.name, found.found) == ("missing", name, -1)
    assert found.address == lost[0].address + offset


def test_a_write_of_an_idle_engine_is_found(tmp_path: Path, case: ConvCase) -> None:
    def spoil(writes: list[UnitWrite]) -> None:
        of(writes, "vec_drain")[0].cycle = 3

    path = write_run(tmp_path / "a.vcd", case.program, TINY, case.ddr, spoil)
    found = first_difference(path, case.program, TINY, case.ddr)
    assert found is not None
    assert (found.kind, found.cycle, found.index, found.layer) == ("idle", 3, -1, "")


def test_another_dispatch_is_found(tmp_path: Path, case: ConvCase) -> None:
    """The chip runs a program whose fifth instruction is not the one expected."""
    path = write_run(tmp_path / "a.vcd", case.program, TINY, case.ddr)
    other = [Instr(i.name, dict(i.fields), i.layer) for i in case.program]
    place = place_of(case, "dma_store")
    other.insert(place, Instr("fence", {}, "extra"))
    found = first_difference(path, other, TINY, case.ddr)
    assert found is not None
    assert (found.kind, found.index, found.layer) == ("dispatch", place, "extra")


def test_what_is_needed_and_missing_is_named(tmp_path: Path, case: ConvCase) -> None:
    path = write_run(tmp_path / "a.vcd", case.program, TINY, case.ddr)
    hidden = tmp_path / "hidden.vcd"
    hidden.write_text(path.read_text().replace(" granted ", " g "))
    with pytest.raises(TilewrightError, match="does not show the ports of SRAM"):
        first_difference(hidden, case.program, TINY, case.ddr)
    with pytest.raises(TilewrightError, match="is not of target `edge16`"):
        first_difference(path, case.program, load_target("edge16"), case.ddr)
