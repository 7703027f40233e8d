"""Plans of networks: complete, in an order in which everything read is there, within SRAM."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from tests.unit.planner_nets import Net, mobilenet, resnet
from tilewright.schedule import planner
from tilewright.schedule.cascade import buffer_of, events_of, held_at, places_of
from tilewright.schedule.footprint import align
from tilewright.schedule.placement import TileDoesNotFit, place_network
from tilewright.schedule.plan import Plan, Stage, Step
from tilewright.schedule.planner import UnitDoesNotFitError, plan_network
from tilewright.schedule.planner_items import items_of
from tilewright.schedule.planner_memory import activation_bytes
from tilewright.schedule.rolling import least_capacity
from tilewright.schedule.tiling import Choice, ConvProblem, choose_conv
from tilewright.spec.hardware import Hardware, load_target

TARGETS = ("edge16", "tpu_v2", "tpu_v2_1m", "tiny8")


def small() -> Net:
    """Return a few units with a skip and a tensor that is read late."""
    net = Net()
    x = net.tensor(28, 28, 16, "an argument")
    a = net.conv(x, 32, 3)
    b = net.conv(a, 64)
    c = net.conv(b, 64, 3, 2, depthwise=True)
    d = net.conv(c, 32)
    e = net.conv(d, 32, second=d)
    f = net.conv(a, 32, 3, 2)
    return net.finish(net.conv(f, 32, second=e))


def concatenating() -> Net:
    """Return two convolutions that write the halves of one tensor."""
    net = Net()
    x = net.tensor(14, 14, 16, "an argument")
    squeezed = net.conv(x, 16)
    whole = net.tensor(14, 14, 64)
    left = net.tensor(14, 14, 32, inside=whole)
    right = net.tensor(14, 14, 32, inside=whole, channel=32)
    net.conv(squeezed, 32, into=left)
    net.conv(squeezed, 32, 3, into=right)
    return net.finish(net.conv(whole, 16))


NETS = {"small": small, "concatenating": concatenating, "mobilenet": mobilenet, "resnet": resnet}


def check(hardware: Hardware, net: Net, plan: Plan) -> None:
    """Assert what every plan must be."""
    assert [unit for step in plan.steps for unit in step.units] == list(range(len(net.units)))
    in_ddr = {
        buffer_of(net.tensors, number)
        for number, tensor in enumerate(net.tensors)
        if tensor.ddr_only == "an argument"
    }
    for number, step in enumerate(plan.steps):
        assert step.reason
        assert len(step.tilings) == len(step.units)
        made = {buffer_of(net.tensors, net.units[unit].writes) for unit in step.units}
        for unit in step.units:
            for read in net.units[unit].reads:
                buffer = buffer_of(net.tensors, read.tensor)
                near = held_at(plan.homes[buffer], number) or buffer in made
                assert near or buffer in in_ddr, (number, buffer)
        if step.stages:
            check_stages(net, plan, number, step)
        in_ddr |= {buffer for buffer in made if plan.homes[buffer].ddr}
    for number, tensor in enumerate(net.tensors):
        if tensor.ddr_only:
            assert plan.homes[number].ddr
            assert not plan.homes[number].held
    placed = place_network(hardware, items_of(hardware, net.units, net.tensors, plan))
    assert not isinstance(placed, TileDoesNotFit)
    assert plan.sram_bytes <= hardware.sram_size


def check_stages(net: Net, plan: Plan, number: int, step: Step) -> None:
    """Assert that the stages of a cascade make all rows, and that its capacities do."""
    for unit in step.units:
        of_unit = [s for s in step.stages if s.kind == "compute" and s.index == unit]
        assert covers(of_unit, net.units[unit].rows)
        target = net.units[unit].writes
        if plan.homes[target].ddr and not held_at(plan.homes[target], number):
            stored = [s for s in step.stages if s.kind == "store" and s.index == target]
            assert covers(stored, net.units[unit].rows)
    # `roll` refuses reads of rows that are not written yet.
    assert places_of(step, net.units, net.tensors, plan.homes, number) is not None
    events = events_of(step, net.units, net.tensors, plan.homes, number)
    assert set(step.capacity) == set(events)
    for buffer, of_buffer in events.items():
        assert step.capacity[buffer] >= least_capacity(net.tensors[buffer].rows, of_buffer)


def covers(stages: list[Stage], rows: int) -> bool:
    """Tell whether stages make rows 0 to `rows`, each once and in order."""
    ends = [(stage.first, stage.last) for stage in stages]
    return (
        bool(ends)
        and ends[0][0] == 0
        and ends[-1][1] == rows
        and all(one[1] == two[0] for one, two in pairwise(ends))
    )


@pytest.mark.parametrize("effort", [1, 2])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["small", "concatenating"])
def test_plans_are_complete_ordered_and_fit(name: str, target: str, effort: int) -> None:
    net, hardware = NETS[name](), load_target(target)
    check(hardware, net, plan_network(hardware, net.units, net.tensors, effort=effort))


@pytest.mark.parametrize(
    ("name", "target"), [("mobilenet", "edge16"), ("resnet", "tpu_v2"), ("resnet", "edge16")]
)
def test_plans_of_whole_networks(name: str, target: str) -> None:
    net, hardware = NETS[name](), load_target(target)
    apart = plan_network(hardware, net.units, net.tensors, effort=0)
    plan = plan_network(hardware, net.units, net.tensors)
    check(hardware, net, plan)
    assert plan.cycles < apart.cycles
    assert plan.ddr_bytes < apart.ddr_bytes


def test_more_effort_is_not_slower() -> None:
    net, hardware = mobilenet(), load_target("edge16")
    held, cascades = (
        plan_network(hardware, net.units, net.tensors, effort=effort) for effort in (1, 2)
    )
    assert not any(step.stages for step in held.steps)
    assert any(step.stages for step in cascades.steps)
    assert cascades.cycles < held.cycles


def test_effort_0_is_layer_by_layer() -> None:
    net, hardware = small(), load_target("edge16")
    plan = plan_network(hardware, net.units, net.tensors, effort=0)
    assert all(home.ddr and not home.held for home in plan.homes)
    for number, (unit, step) in enumerate(zip(net.units, plan.steps, strict=True)):
        assert isinstance(unit.problem, ConvProblem)
        choice = choose_conv(hardware, unit.problem)
        assert isinstance(choice, Choice)
        assert step.units == (number,)
        assert step.tilings == (choice.tiling,)


def test_weights_share_banks_with_rows_of_other_units_where_nothing_else_fits() -> None:
    net, hardware = Net(), load_target("tpu_v2")
    x = net.tensor(56, 56, 64, "an argument")
    other = net.tensor(56, 56, 256, "an argument")
    net.finish(net.conv(net.conv(x, 64, 3), 256, second=other))
    plan = plan_network(hardware, net.units, net.tensors)
    check(hardware, net, plan)
    assert [step.units for step in plan.steps] == [(0, 1)]
    sizes = [0, 0]
    for item in items_of(hardware, net.units, net.tensors, plan):
        sizes[item.role == "weights"] += item.slots * item.size_bytes
    assert sum(sizes) <= hardware.sram_size
    assert sum(align(size, hardware.bank_size) for size in sizes) > hardware.sram_size


def test_the_goal_of_size_takes_the_least_memory_for_activations() -> None:
    net, hardware = mobilenet(), load_target("edge16_vela_512k")
    fast = plan_network(hardware, net.units, net.tensors)
    lean = plan_network(hardware, net.units, net.tensors, goal="size")
    check(hardware, net, lean)
    assert lean.activation_bytes == activation_bytes(hardware, net.units, net.tensors, lean)
    assert lean.activation_bytes <= 354 * 1024 < fast.activation_bytes
    assert fast.cycles < lean.cycles < 1.2 * fast.cycles


def test_the_last_bytes_are_not_bought_with_many_cycles() -> None:
    net, hardware = mobilenet(), load_target("tiny8")
    fast = plan_network(hardware, net.units, net.tensors)
    lean = plan_network(hardware, net.units, net.tensors, goal="size")
    assert lean.activation_bytes <= fast.activation_bytes
    assert lean.cycles < 1.5 * fast.cycles


def test_activations_by_hand() -> None:
    net, hardware = Net(), load_target("edge16")
    x = net.tensor(8, 8, 16, "an argument")
    net.finish(net.conv(net.conv(x, 32), 16))
    plan = plan_network(hardware, net.units, net.tensors, effort=0)
    # Step 0: the argument and its result in DDR, each in a tile besides; step 1 likewise.
    assert plan.activation_bytes == 2 * (8 * 8 * 16 + 8 * 8 * 32)


def test_pixels_that_are_passed_over_are_not_loaded() -> None:
    problem = ConvProblem(
        "conv", 1, 28, 28, 256, 14, 14, 128, (1, 1), (2, 2), skips=True
    )  # fmt: skip
    loaded = problem.as_loaded()
    assert (loaded.in_rows, loaded.in_columns, loaded.strides) == (14, 14, (1, 1))
    held = replace(problem, held=("input",))
    assert held.as_loaded() is held
    hardware = load_target("edge16")
    all_pixels, used = (choose_conv(hardware, item) for item in (problem, loaded))
    assert isinstance(all_pixels, Choice)
    assert isinstance(used, Choice)
    assert used.cost.ddr_bytes < all_pixels.cost.ddr_bytes
    assert used.cycles < all_pixels.cycles


def test_without_room_for_any_plan_every_step_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    net, hardware = small(), load_target("edge16")
    monkeypatch.setattr(planner, "first_misfit", lambda *_: 0)
    plan = plan_network(hardware, net.units, net.tensors)
    assert all(home.ddr and not home.held for home in plan.homes)
    assert all("could be placed" in step.reason for step in plan.steps)


def test_plans_are_deterministic() -> None:
    net, hardware = small(), load_target("tiny8")
    one, two = (plan_network(hardware, net.units, net.tensors) for _ in range(2))
    assert one == two


def test_an_opaque_unit_is_alone_and_works_on_ddr() -> None:
    net, hardware = small(), load_target("edge16")
    net.units[2] = replace(net.units[2], problem=None, stripable=False)
    plan = plan_network(hardware, net.units, net.tensors)
    step = next(step for step in plan.steps if 2 in step.units)
    assert step.units == (2,)
    assert step.tilings == (None,)
    assert plan.homes[net.units[2].writes].ddr
    assert not plan.homes[net.units[2].writes].held
    assert plan.homes[net.units[2].reads[0].tensor].ddr


def test_reasons_say_what_is_left() -> None:
    small, large = resnet((1,)), resnet((1, 1))
    for net, target, why in (
        (small, "tiny8", "SRAM has 32768"), (large, "edge16", "to the steps between")
    ):  # fmt: skip
        plan = plan_network(load_target(target), net.units, net.tensors)
        reasons = " ".join(step.reason for step in plan.steps)
        assert "a result" in reasons
        assert why in reasons


def test_a_unit_that_never_fits_is_named() -> None:
    net = Net()
    x = net.tensor(1, 1, 1 << 20, "an argument")
    net.finish(net.conv(x, 8))
    net.units[0] = replace(net.units[0], problem=replace(problem_of(net), strides=(1, 1 << 20)))
    with pytest.raises(UnitDoesNotFitError) as caught:
        plan_network(load_target("tiny8"), net.units, net.tensors)
    assert caught.value.unit == 0


def problem_of(net: Net) -> ConvProblem:
    """Return the problem of the first unit."""
    problem = net.units[0].problem
    assert isinstance(problem, ConvProblem)
    return problem
