"""The list scheduler: it reorders what gains, keeps what must stay, and never changes results."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from xdsl.dialects.builtin import DictionaryAttr, ModuleOp

from tests.props.random_programs import Generator, setup, synchronise
from tests.transforms.tpu.test_lower_affine_to_tpu import compiled
from tilewright.codegen.verify import verify_program
from tilewright.dialects.tpu import ProgramOp
from tilewright.ir.context import CompileContext
from tilewright.ir.io import new_context
from tilewright.passes import make_pass
from tilewright.runtime.runtime import Executor
from tilewright.schedule.constraints import Constraint, Constraints, duration_fields
from tilewright.schedule.list_schedule import Bandwidth
from tilewright.sim.cycle import CycleSimulator
from tilewright.sim.functional import FunctionalSimulator
from tilewright.sim.state import State
from tilewright.spec.hardware import load_target
from tilewright.spec.program import Dispatched, Instr, full_fields
from tilewright.spec.timing import dma_cycles
from tilewright.transforms.tpu.schedule_instructions import schedule_program

TINY = load_target("tiny8")
NONE = Constraints(TINY, [])
BANK = TINY.bank_size


def module_of(*programs: list[Instr]) -> ModuleOp:
    return ModuleOp([ProgramOp.of(f"tpu_{n}", p, None) for n, p in enumerate(programs)])


def scheduled(program: list[Instr], measured: Constraints = NONE) -> tuple[list[Instr], bool, str]:
    op = ProgramOp.of("tpu_0", program, None)
    fired, reason = schedule_program(op, TINY, measured)
    op.verify()
    return op.instructions(), fired, reason


def layers(program: list[Instr], name: str) -> list[str]:
    return [instr.layer for instr in program if instr.name == name]


def chain(layer: str, place: int, channel: int, size: int) -> list[Instr]:
    """Return load -> copy -> store of `size` bytes in a part of the SRAM of its own."""
    sram = place * BANK
    load = {"channel": channel, "ddr": place * 4096, "sram": sram, "n0": size, "stream": 1}
    copy = {"src": sram, "dst": sram + 1024, "n0": size, "src_s0": 1, "dst_s0": 1}
    store = {"channel": channel, "ddr": (4 + place) * 4096, "sram": sram + 1024, "n0": size,
             "stream": 1}  # fmt: skip
    return [
        Instr("dma_load", load, layer),
        Instr("vec_copy", copy, layer),
        Instr("dma_store", store, layer),
    ]


def whole(*parts: list[Instr]) -> list[Instr]:
    """Return a program with the semaphores its bytes ask for."""
    return [*synchronise([instr for part in parts for instr in part], TINY), Instr("halt")]


def two_chains() -> list[Instr]:
    """Return two independent chains on two channels."""
    return whole(chain("a", 0, 0, 640), chain("b", 1, 1, 640))


def measured(program: list[Instr], layer: str, name: str, cycles: int) -> Constraints:
    instr = next(i for i in program if i.layer == layer and i.name == name)
    key = (name, duration_fields(TINY, name, full_fields(instr)))
    return Constraints(TINY, [Constraint(layer, key, cycles, 1)])


def test_a_slow_load_changes_who_goes_first() -> None:
    program = two_chains()
    plain, _, _ = scheduled(program)
    assert layers(plain, "vec_copy") == ["a", "b"]
    # Measured as fast as estimated, or slow where it is last anyway: nothing to change.
    cycles = dma_cycles(TINY, full_fields(program[0]))
    as_estimated, _, _ = scheduled(program, measured(program, "a", "dma_load", cycles))
    assert layers(as_estimated, "vec_copy") == ["a", "b"]
    slow_b, _, _ = scheduled(program, measured(program, "b", "dma_load", 3000))
    assert layers(slow_b, "vec_copy") == ["a", "b"]
    slow_a, fired, reason = scheduled(program, measured(program, "a", "dma_load", 3000))
    assert fired
    assert "measured" in reason
    assert layers(slow_a, "vec_copy") == ["b", "a"]
    verify_program(slow_a, TINY)


def test_work_that_can_start_is_moved_forward() -> None:
    """The second layer's load waits behind the first layer's store for no reason."""
    program = whole(chain("a", 0, 0, 900), chain("b", 1, 0, 900))
    result, fired, reason = scheduled(program)
    assert fired, reason
    names = [(i.name, i.layer) for i in result]
    assert names.index(("dma_load", "b")) < names.index(("dma_store", "a"))
    before = CycleSimulator(TINY).run(program).cycles
    assert CycleSimulator(TINY).run(result).cycles < before


@pytest.mark.parametrize("kind", ["raw", "war", "waw"])
def test_dependencies_keep_their_order(kind: str) -> None:
    """The second chain goes first when it can; bytes they share forbid it."""

    def program(shared: bool) -> list[Instr]:
        first, second = chain("a", 0, 0, 640), chain("b", 1, 1, 640)
        if shared and kind == "raw":  # b loads what a stores
            second[0].fields["ddr"] = first[2].fields["ddr"]
        elif shared and kind == "war":  # b stores over what a loads
            second[2].fields["ddr"] = first[0].fields["ddr"]
        elif shared:  # both store to one place
            second[2].fields["ddr"] = first[2].fields["ddr"]
        return whole(first, second)

    early, late = {
        "raw": (("dma_store", "a"), ("dma_load", "b")),
        "war": (("dma_load", "a"), ("dma_store", "b")),
        "waw": (("dma_store", "a"), ("dma_store", "b")),
    }[kind]

    def places(shared: bool) -> dict[tuple[str, str], int]:
        original = program(shared)
        slow = measured(original, "a", "dma_load", 10_000)
        result, _, _ = scheduled(original, slow)
        verify_program(result, TINY)
        return {(i.name, i.layer): at for at, i in enumerate(result)}

    kept, free = places(True), places(False)
    assert kept[early] < kept[late]
    if kind != "war":
        assert free[early] > free[late], "without the shared bytes it does move"


def test_scheduling_twice_changes_nothing() -> None:
    once, fired, _ = scheduled(whole(chain("a", 0, 0, 900), chain("b", 1, 0, 900)))
    assert fired
    module = module_of(whole(chain("a", 0, 0, 900), chain("b", 1, 0, 900)))
    context: CompileContext = new_context(target=TINY)
    step = make_pass("schedule-instructions")
    step.apply(context, module)
    text = str(module)
    step.apply(context, module)
    assert str(module) == text
    (program,) = (op for op in module.ops if isinstance(op, ProgramOp))
    assert program.instructions() == once
    assert [item.fired for item in context.decisions] == [True, False]
    assert "scheduled by these times already" in context.decisions[1].reason


def test_a_long_program_keeps_its_order_without_measured_times() -> None:
    program = whole(chain("a", 0, 0, 900), chain("b", 1, 0, 900))
    module = module_of(program)
    context: CompileContext = new_context(target=TINY)
    text = str(module)
    make_pass("schedule-instructions{max-instructions=6}").apply(context, module)
    assert str(module) == text
    assert context.decisions[0].reason == "7 instructions are above max-instructions=6"
    make_pass("schedule-instructions{max-instructions=7}").apply(context, module)
    assert str(module) != text


def test_what_is_left_alone_and_why() -> None:
    _, fired, reason = scheduled(whole(chain("a", 0, 0, 640)))
    assert not fired
    assert "no order is better" in reason
    loop = [Instr("loop", {"count": 3}), *two_chains()[:-1], Instr("end_loop"), Instr("halt")]
    _, fired, reason = scheduled(loop)
    assert not fired
    assert "loops" in reason
    waiting = [
        Instr("dma_load", {"stream": 1, "signal": 1}),
        Instr("fence", {"wait": 1}),
        Instr("halt"),
    ]
    _, fired, reason = scheduled(waiting)
    assert not fired
    assert "sequencer" in reason


def test_accumulators_stay_together() -> None:
    """A reduction in two parts keeps its half; no other multiplication comes between."""
    part = {"act": 0, "wgt": BANK, "out_w": 8, "c_last": 8, "c_rows": 8, "cols": 8, "cols_last": 8,
            "wgt_pitch": 8, "ox_stride": 8}  # fmt: skip
    drain = {"out_w": 8, "cols": 8, "cols_last": 8, "ox_stride": 8}
    slow = Instr("dma_load", {"ddr": 0, "sram": 0, "n0": 4096, "stream": 1}, "slow")
    program = [
        slow,
        Instr("mac_conv", {**part, "push": 0}, "one"),
        Instr("mac_conv", {**part, "accumulate": 1}, "one"),
        Instr("vec_drain", {**drain, "dst": 2 * BANK}, "one"),
        Instr("mac_conv", {**part, "act": 3 * BANK + 1024}, "two"),
        Instr("vec_drain", {**drain, "dst": 2 * BANK + 512}, "two"),
    ]
    result, _, _ = scheduled([*setup(TINY), *whole(program)])
    assert layers(result, "mac_conv") == ["one", "one", "two"]
    verify_program(result, TINY)


def run(program: list[Instr], ddr: np.ndarray, seed: int | None = None) -> np.ndarray:
    memory = ddr.copy()
    order = "program" if seed is None else "random"
    FunctionalSimulator(TINY).run(program, memory, order=order, seed=seed or 0)
    return memory


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**20), length=st.integers(2, 40))
def test_random_programs_keep_their_meaning(seed: int, length: int) -> None:
    generator = Generator(TINY, seed)
    body = generator.program(length)
    program = [*setup(TINY), *synchronise(body, TINY), Instr("halt")]
    result, fired, _ = scheduled(program)
    verify_program(result, TINY)
    if not fired:
        return
    ddr = np.random.default_rng(seed).integers(0, 256, 8192).astype(np.uint8)
    ddr[2048 : 2048 + 9 * TINY.vector_lanes] = 0
    wanted = run(program, ddr)
    np.testing.assert_array_equal(run(result, ddr), wanted)
    for order in range(2):
        np.testing.assert_array_equal(run(result, ddr, order), wanted)


def test_the_random_programs_do_get_reordered() -> None:
    """The property above would say nothing if no program were ever changed."""
    fired = 0
    for seed in range(20):
        body = Generator(TINY, seed).program(30)
        fired += scheduled([*setup(TINY), *synchronise(body, TINY), Instr("halt")])[1]
    assert fired >= 10


def chain_of_convolutions() -> onnx.ModelProto:
    """Return three convolutions whose weights take several tiles, on a 3 x 9 x 7 image."""
    rng = np.random.default_rng(0)
    sizes = [3, 96, 96, 3]
    nodes = [
        helper.make_node("Conv", [f"v{i}", f"w{i}"], [f"v{i + 1}"], f"conv{i}", pads=[1] * 4)
        for i in range(3)
    ]
    weights = [
        numpy_helper.from_array(
            (rng.standard_normal((sizes[i + 1], sizes[i], 3, 3)) / 9).astype(np.float32), f"w{i}"
        )
        for i in range(3)
    ]
    nodes[0].input[0], nodes[2].output[0] = "x", "y"
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 3, 9, 7]) for n in "xy"]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def test_written_says_when_tensors_are_complete_in_the_new_order() -> None:
    made = compiled(model=chain_of_convolutions(), fuse=False)
    module = made.stages["tpu"].module
    (op,) = (item for item in module.ops if isinstance(item, ProgramOp))
    assert any(item.stage == "schedule-instructions" and item.fired for item in made.decisions)
    written = op.attributes["written"]
    assert isinstance(written, DictionaryAttr)
    at = {value.value.data: name for name, value in written.data.items()}  # pyright: ignore[reportAttributeAccessIssue]
    executor = Executor(made.program, TINY)
    inputs = {"x": np.random.default_rng(2).standard_normal((1, 3, 9, 7)).astype(np.float32)}
    _, wanted = executor.run_tensors(inputs)
    found: dict[str, np.ndarray] = {}

    def hook(item: Dispatched, state: State) -> None:
        name = at.get(item.index)
        if name is not None:
            info = made.program.tensors[name]
            start = executor.base + info.offset
            found[name] = state.ddr[start : start + info.size_bytes].copy()

    executor.run(inputs, hook)
    assert found.keys() == set(at.values()) == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name].view(np.int8), value.reshape(-1), name)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3000), st.sampled_from([1, 63, 64, 65, 200, 1000, 9000])),
        max_size=40,
    )
)
def test_bandwidth_is_given_out_slice_by_slice(asked: list[tuple[int, int]]) -> None:
    size = Bandwidth.SLICE
    left: dict[int, int] = {}

    def take(start: int, cycles: int) -> int:
        number, at = start // size, start
        while True:
            at = max(at, number * size)
            free = left.get(number, size)
            taken = min(cycles, free, (number + 1) * size - at)
            left[number], cycles = free - taken, cycles - taken
            if not cycles:
                return at + taken
            number += 1

    bandwidth = Bandwidth()
    for start, cycles in asked:
        assert bandwidth.take(start, cycles) == take(start, cycles)
