"""Measured times in the IR: from a waveform, kept by printing, used by the scheduler."""

from __future__ import annotations

from pathlib import Path

import pytest
from xdsl.dialects.builtin import ModuleOp

from tests.transforms.tpu.test_lower_affine_to_tpu import compiled, small_network
from tests.transforms.tpu.test_schedule_instructions import chain, module_of, whole
from tests.waves.vcd import log_signals, write_vcd
from tilewright.compiler import Compiled, compile_model
from tilewright.diagnostics import TilewrightError, UsageError
from tilewright.dialects.tpu import ProgramOp, TimingConstraintOp
from tilewright.ir.context import CompileContext
from tilewright.ir.io import new_context, parse_text, print_module
from tilewright.passes import make_pass
from tilewright.sim.cycle import CycleSimulator
from tilewright.sim.retire import RetireLog
from tilewright.spec.hardware import load_target
from tilewright.spec.program import Dispatched, Instr, full_fields
from tilewright.transforms.tpu.annotate_timing import constraints_of

TINY = load_target("tiny8")


def log_of(program: list[Instr]) -> RetireLog:
    return CycleSimulator(TINY).run(program).log


def slowed(log: RetireLog, place: int, cycles: int) -> RetireLog:
    """Return a log in which one instruction takes `cycles` more, and what is later waits for it."""
    at = int(log.end[place])
    later = log.start >= at
    issue = log.issue + (log.issue >= at) * cycles
    start, end = log.start + later * cycles, log.end + later * cycles
    end[place] += cycles
    return RetireLog(log.names, log.layers, log.index, log.engine, issue, start, end)


def annotated(module: ModuleOp, path: Path, options: str = "") -> CompileContext:
    context: CompileContext = new_context(target=TINY)
    make_pass(f"annotate-timing{{waveform={path}{options}}}").apply(context, module)
    module.verify()
    return context


def constraints(module: ModuleOp) -> list[TimingConstraintOp]:
    return [op for op in module.ops if isinstance(op, TimingConstraintOp)]


def two_chains() -> list[Instr]:
    return whole(chain("a", 0, 0, 640), chain("b", 1, 1, 640))


def test_every_instruction_gets_its_measured_time(tmp_path: Path) -> None:
    program = two_chains()
    log = log_of(program)
    module = module_of(program)
    path = write_vcd(tmp_path / "run.vcd", log_signals(log))
    context = annotated(module, path)
    found = {(op.text("layer"), op.instruction.data): op for op in constraints(module)}
    assert len(found) == len(program) - 1
    for place, instr in enumerate(program[:-1]):
        op = found[instr.layer, instr.name]
        assert op.cycles.value.data == int(log.end[place] - log.start[place])
        assert op.number("clock_fs") == 2_000_000
        assert op.text("waveform") == "run.vcd"
    assert context.decisions[-1].fired


def test_equal_instructions_of_a_layer_share_a_constraint(tmp_path: Path) -> None:
    program = whole(chain("a", 0, 0, 640)[:1], chain("a", 1, 0, 640)[:1])
    log = slowed(log_of(program), 0, 101)
    module = module_of(program)
    annotated(module, write_vcd(tmp_path / "run.vcd", log_signals(log)))
    (op,) = constraints(module)
    cycles = sorted(int(c) for c in (log.end - log.start)[:2])
    assert [op.number("lowest"), op.number("highest")] == cycles
    assert op.cycles.value.data == -(-sum(cycles) // 2)
    assert op.number("count") == 2


def test_a_slow_load_in_a_waveform_changes_the_schedule(tmp_path: Path) -> None:
    """The round trip: compile, run, measure, compile again."""
    program = two_chains()
    step = make_pass("schedule-instructions")

    def copies(log: RetireLog | None) -> list[str]:
        module = module_of(program)
        if log is not None:
            path = write_vcd(tmp_path / "run.vcd", log_signals(log))
            annotated(module, path)
            # Printed and read again in between.
            context = new_context(target=TINY)
            module = parse_text(print_module(module), context)
        step.apply(new_context(target=TINY), module)
        (op,) = (op for op in module.ops if isinstance(op, ProgramOp))
        return [i.layer for i in op.instructions() if i.name == "vec_copy"]

    log = log_of(program)
    first = next(p for p, i in enumerate(program) if (i.name, i.layer) == ("dma_load", "a"))
    ten_times = 9 * int(log.end[first] - log.start[first])
    assert copies(None) == ["a", "b"]
    assert copies(log) == ["a", "b"]
    assert copies(slowed(log, first, ten_times)) == ["b", "a"]


def test_constraints_are_replaced_not_repeated(tmp_path: Path) -> None:
    program = two_chains()
    log = log_of(program)
    module = module_of(program)
    path = write_vcd(tmp_path / "run.vcd", log_signals(log))
    annotated(module, path)
    text = print_module(module)
    annotated(module, path)
    assert sorted(print_module(module).splitlines()) == sorted(text.splitlines())
    annotated(module, write_vcd(path, log_signals(slowed(log, 0, 50))))
    assert len(constraints(module)) == len(program) - 1
    assert print_module(module) != text


def test_times_hold_for_the_same_instruction_elsewhere(tmp_path: Path) -> None:
    """Keyed by what decides the time: another address of equal alignment is the same."""
    program = two_chains()
    module = module_of(program)
    annotated(module, write_vcd(tmp_path / "run.vcd", log_signals(log_of(program))))
    table = constraints_of(module, TINY)
    fields = {"ddr": 8 * 4096, "sram": TINY.bank_size * 2, "n0": 640, "stream": 1}

    def cycles(layer: str, **changes: int) -> int | None:
        whole_fields = full_fields(Instr("dma_load", {**fields, **changes}))
        return table.cycles(Dispatched(0, "dma_load", 0, whole_fields, layer))

    assert cycles("a") is not None
    assert cycles("a") == cycles("another layer")
    assert cycles("a", signal=7) == cycles("a")
    assert cycles("a", n0=641) is None
    assert cycles("a", sram=TINY.bank_size * 2 + 1) is None


def test_a_waveform_of_something_else_is_refused_with_the_place(tmp_path: Path) -> None:
    program = two_chains()
    path = write_vcd(tmp_path / "run.vcd", log_signals(log_of(program)))
    other = [Instr(i.name, dict(i.fields), i.layer) for i in program]
    other[1], other[2] = other[2], other[1]
    with pytest.raises(TilewrightError, match="is not a run of this program") as caught:
        annotated(module_of(other), path)
    assert 'of layer "a"' in caught.value.message
    with pytest.raises(TilewrightError, match="ends before the program"):
        annotated(module_of([*program[:-1], Instr("fence"), Instr("halt")]), path)


def test_the_program_is_found_or_named(tmp_path: Path) -> None:
    program, other = two_chains(), whole(chain("c", 0, 0, 64))
    path = write_vcd(tmp_path / "run.vcd", log_signals(log_of(program)))
    module = module_of(other, program)
    annotated(module, path)
    assert {op.text("layer") for op in constraints(module)} == {"a", "b"}
    with pytest.raises(UsageError, match="fits several programs"):
        annotated(module_of(program, program), path)
    module = module_of(program, program)
    annotated(module, path, " program=tpu_1")
    assert constraints(module)
    with pytest.raises(UsageError, match="no program @tpu_7"):
        annotated(module, path, " program=tpu_7")


def test_what_the_pass_needs() -> None:
    with pytest.raises(UsageError, match="needs `waveform=FILE`"):
        make_pass("annotate-timing").apply(new_context(target=TINY), module_of(two_chains()))
    with pytest.raises(TilewrightError, match="need a target"):
        make_pass("annotate-timing{waveform=a.vcd}").apply(new_context(), module_of(two_chains()))


@pytest.fixture(scope="module")
def network() -> Compiled:
    return compiled()


def again(network: Compiled, timing: Path) -> Compiled:
    return compile_model(small_network(), TINY, table=network.table, timing=timing)


def test_a_recompile_uses_the_waveform_and_the_binary_has_no_trace_of_it(
    tmp_path: Path, network: Compiled
) -> None:
    (step,) = network.program.tpu_steps
    log = CycleSimulator(TINY).run(step.code).log
    path = write_vcd(tmp_path / "run.vcd", log_signals(log))
    made = again(network, path)
    assert constraints(made.stages["tpu"].module)
    (new,) = made.program.tpu_steps
    assert len(new.code) == len(step.code)
    # The IR that was annotated serves as well as the waveform.
    text = tmp_path / "measured.mlir"
    text.write_text(print_module(made.stages["tpu"].module))
    assert again(network, text).program.tpu_steps[0].code == new.code
    assert sorted(new.layers) == sorted(step.layers)


def test_a_recompile_refuses_what_does_not_fit(tmp_path: Path, network: Compiled) -> None:
    other = two_chains()
    path = write_vcd(tmp_path / "other.vcd", log_signals(log_of(other)))
    with pytest.raises(TilewrightError, match=r"other\.vcd") as caught:
        again(network, path)
    assert caught.value.hint
    empty = tmp_path / "empty.mlir"
    empty.write_text(print_module(module_of(other)))
    with pytest.raises(TilewrightError, match=r"has no `tpu\.timing_constraint`"):
        again(network, empty)


def test_a_model_without_programs_of_the_chip_is_said(tmp_path: Path) -> None:
    path = write_vcd(tmp_path / "run.vcd", log_signals(log_of(two_chains())))
    with pytest.raises(UsageError, match="the model has no program of the chip"):
        annotated(ModuleOp([]), path)
    with pytest.raises(UsageError, match="there is no program @tpu_9"):
        annotated(module_of(two_chains()), path, " program=tpu_9")


def test_what_a_waveform_does_not_prove_is_a_decision(tmp_path: Path) -> None:
    path = write_vcd(tmp_path / "run.vcd", log_signals(log_of(two_chains())))
    context = annotated(module_of(two_chains()), path)
    assert "does not show its chip" in context.decisions[-1].details["warning"]
