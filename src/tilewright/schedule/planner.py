"""Plans a network: which units make a step together, and where every tensor lies.

The search (`planner_search.py`) takes its steps from estimates; the plan it finds is then placed,
and found again with more room left where that fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from tilewright.schedule.box import BoxChoice, BoxNoFit, BoxProblem, choose_box
from tilewright.schedule.plan import Home, Plan, Stage, Step, TensorSpec, UnitSpec
from tilewright.schedule.planner_cascade import build
from tilewright.schedule.planner_items import first_misfit, kept_bytes
from tilewright.schedule.planner_memory import activation_bytes
from tilewright.schedule.planner_network import Network
from tilewright.schedule.planner_search import EFFORTS, Action, Effort, Search, Size, State
from tilewright.schedule.tiling import Choice, NoFit, choose_conv
from tilewright.spec.hardware import Hardware

Goal = Literal["speed", "size"]
GOALS: tuple[Goal, ...] = ("speed", "size")
ATTEMPTS = 12
"""Plans that are placed before all tensors go to DDR."""


SLACK = (1.03, 1.1, 1.25)
"""How much of the least memory is allowed: a little more, as the very last bytes cost many times
the cycles (tiles of a few pixels); then more while what is found cannot be placed."""


class ConstantsDoNotFitError(Exception):
    """Constants that shall stay in SRAM leave too little room."""

    def __init__(self, wanted_bytes: int, unit: int | None, needed_bytes: int) -> None:
        super().__init__(f"{wanted_bytes} bytes of constants do not fit")
        self.wanted_bytes = wanted_bytes
        self.unit = unit
        """The unit whose tiles have no room; None: several need more banks together."""
        self.needed_bytes = needed_bytes
        """What that unit needs beside them."""


class UnitDoesNotFitError(Exception):
    """No tile of a unit fits SRAM, or the chip has no instruction for it."""

    def __init__(self, unit: int, answer: NoFit | BoxNoFit) -> None:
        super().__init__(f"no tile of unit {unit} fits")
        self.unit = unit
        self.answer = answer


def plan_network(
    hardware: Hardware,
    units: Sequence[UnitSpec],
    tensors: Sequence[TensorSpec],
    *,
    effort: int = 2,
    goal: Goal = "speed",
    progress: Callable[[float], None] | None = None,
) -> Plan:
    """Return steps and homes for a function's units.

    Args:
        hardware: the chip.
        units: in program order.
        tensors: between them, by the numbers that the units name.
        effort: 0: every unit by itself, every tensor in DDR; 1: tensors are held; 2: cascades too;
            3: more is tried.
        goal: `speed`: the fewest cycles, then the fewest bytes of DDR traffic. `size`: the least
            memory for activations (`Plan.activation_bytes`), within 3 %, then the fewest cycles.
        progress: told what part of the network is planned, again from 0 for every attempt.

    Raises:
        UnitDoesNotFitError: a unit that does not fit however it is cut.
        ConstantsDoNotFitError: the weights of problems with `kept` constants do not.
    """
    if effort == 0 or not units:
        plan = _layer_by_layer(hardware, units, tensors)
    else:
        network = Network(hardware, units, tensors, progress)
        tried = EFFORTS[min(effort, len(EFFORTS) - 1)]
        plan = _placed(network, tried, None) if goal == "speed" else _smallest(network, tried)
        if plan is None and tried.longest:
            plan = _placed(network, EFFORTS[1], None)
        if plan is None:
            why = "by itself, its tensors in DDR: no plan that was found could be placed"
            apart = _layer_by_layer(hardware, units, tensors)
            steps = tuple(replace(step, reason=why) for step in apart.steps)
            plan = replace(apart, steps=steps)
    wanted = kept_bytes(hardware, units, tensors, plan)
    if wanted and first_misfit(hardware, units, tensors, plan) is not None:
        raise ConstantsDoNotFitError(wanted, None, 0)
    taken = activation_bytes(hardware, units, tensors, plan)
    return replace(plan, activation_bytes=taken, kept_bytes=wanted)


def _smallest(network: Network, effort: Effort) -> Plan | None:
    """Return the fastest plan of those with the least activations, or None."""
    least = Search(network, effort, _reserved(network, network.kept_bytes), Size()).run()
    if least is None:
        return None
    plans = (_placed(network, effort, Size(int(least.peak * slack))) for slack in SLACK)
    return next((plan for plan in plans if plan is not None), None)


def _placed(network: Network, effort: Effort, size: Size | None) -> Plan | None:
    """Return the first plan found that can be placed, or None."""
    hardware, units, tensors = network.hardware, network.units, network.tensors
    kept = network.kept_bytes
    reserve = _reserved(network, kept)
    for _ in range(ATTEMPTS):
        state = Search(network, effort, reserve, size).run()
        if state is None:
            return None
        plan = _Builder(network, state, grow=size is None).build()
        if isinstance(plan, Plan):
            wanted = kept_bytes(hardware, units, tensors, plan)
            if wanted > kept:
                # Its packings of pixels take more weights than was reckoned with.
                kept = wanted
                reserve = _reserved(network, kept)
                continue
            misfit = first_misfit(hardware, units, tensors, plan)
            if misfit is None:
                return plan
            tight = plan.steps[misfit].units
        else:
            tight = plan
        for unit in tight:
            reserve[unit] = reserve.get(unit, 0) + hardware.bank_size // 2
    return None


def _reserved(network: Network, size: int) -> dict[int, int]:
    """Return a reserve of SRAM for every unit."""
    return dict.fromkeys(range(len(network.units)), size) if size else {}


def _layer_by_layer(
    hardware: Hardware, units: Sequence[UnitSpec], tensors: Sequence[TensorSpec]
) -> Plan:
    """Return the plan that has every unit by itself; what is kept is made room for."""
    reserved = 0
    while True:
        plan = _by_themselves(hardware, units, tensors, reserved)
        wanted = kept_bytes(hardware, units, tensors, plan)
        if wanted <= reserved:
            return plan
        reserved = wanted


def _by_themselves(
    hardware: Hardware, units: Sequence[UnitSpec], tensors: Sequence[TensorSpec], reserved: int
) -> Plan:
    steps: list[Step] = []
    cycles, traffic, most = 0.0, 0.0, 0
    for number, unit in enumerate(units):
        problem = unit.in_ddr or unit.problem
        if problem is None:
            steps.append(Step((number,), (None,), reason="it tiles itself, its tensors in DDR"))
            continue
        choice: Choice | NoFit | BoxChoice | BoxNoFit
        if isinstance(problem, BoxProblem):
            choice = choose_box(hardware, problem, reserved)
        elif reserved:
            choice = choose_conv(hardware, problem.as_loaded(), reserved)
        else:
            choice = choose_conv(hardware, problem.as_loaded())
        if isinstance(choice, NoFit | BoxNoFit):
            if reserved:
                needed = choice.needed_bytes - reserved
                raise ConstantsDoNotFitError(reserved, number, needed)
            raise UnitDoesNotFitError(number, choice)
        steps.append(Step((number,), (choice.tiling,), reason="by itself, its tensors in DDR"))
        cycles += choice.cycles
        traffic += choice.cost.ddr_bytes
        most = max(most, choice.sram_bytes)
    homes = tuple(Home(ddr=True, held=False) for _ in tensors)
    return Plan(tuple(steps), homes, cycles, traffic, most)


class _Builder:
    """Turns the chain of states into a plan."""

    def __init__(self, network: Network, state: State, *, grow: bool) -> None:
        self.network = network
        self.grow = grow
        self.end = state
        self.states: list[State] = []
        at: State | None = state
        while at is not None and at.before is not None:
            self.states.append(at)
            at = at.before
        self.states.reverse()

    def build(self) -> Plan | tuple[int, ...]:
        """Return the plan, or the units of cascades that take more SRAM than was estimated."""
        homes = self._homes()
        steps: list[Step] = []
        tight: list[int] = []
        for number, state in enumerate(self.states):
            assert state.action is not None
            assert state.before is not None
            step = self._step(state.action, self._reason(number, state, homes))
            if step is None:
                tight += range(state.action.first, state.action.last + 1)
            else:
                steps.append(step)
        if tight:
            return tuple(tight)
        by_tensor = [
            homes[self.network.buffer(number)] for number in range(len(self.network.tensors))
        ]
        most = max(
            (state.action.price.used_bytes for state in self.states if state.action is not None),
            default=0,
        )
        return Plan(
            tuple(steps),
            tuple(by_tensor),
            max(self.end.engines, self.end.ddr),
            self.end.ddr_bytes,
            min(most, self.network.hardware.sram_size),
        )

    def _homes(self) -> dict[int, Home]:
        homes = {buffer: Home(ddr=True, held=False) for buffer in self.network.buffers}
        for number, state in enumerate(self.states):
            assert state.action is not None
            assert state.before is not None
            for buffer in state.action.inner:
                homes[buffer] = Home(ddr=False, held=False)
            # What is held during a step: from before, or held by it for later readers.
            for buffer in state.before.held:
                homes[buffer] = replace(homes[buffer], until=number)
            for buffer in state.held - state.before.held:
                homes[buffer] = Home(buffer in state.copied, held=True, until=number)
            for buffer in state.copied & state.held:
                homes[buffer] = replace(homes[buffer], ddr=True)
        return homes

    def _step(self, action: Action, reason: str) -> Step | None:
        units = tuple(range(action.first, action.last + 1))
        outline = action.outline
        if outline is None or action.chain is None:
            return Step(units, action.tilings, reason=reason)
        cascade = build(
            self.network.hardware,
            action.chain,
            outline.rows,
            outline.skewed,
            action.reserved,
            self.grow,
        )
        if cascade is None:
            return None
        stages = tuple(
            Stage(
                stage.kind,
                action.first + stage.index
                if stage.kind == "compute"
                else action.numbers[stage.index],
                stage.first,
                stage.last,
            )
            for stage in cascade.stages
        )
        capacity = {action.numbers[buffer]: rows for buffer, rows in cascade.capacity}
        return Step(units, cascade.tilings, stages, capacity, reason)

    def _reason(self, number: int, state: State, homes: dict[int, Home]) -> str:
        action, network = state.action, self.network
        assert action is not None
        assert state.before is not None
        if action.outline is None:
            text = "by itself"
        else:
            order = (
                "one round behind each other" if action.outline.skewed else "one after the other"
            )
            text = (
                f"a cascade of {action.last - action.first + 1} units, "
                f"{action.outline.rows} rows a round, {order}; "
                f"{action.outline.weight_bytes} bytes of weights stay"
            )
        notes = [text]
        for unit in range(action.first, action.last + 1):
            buffer = network.buffer(network.units[unit].writes)
            item, home = network.buffers[buffer], homes[buffer]
            if item.writers[-1] != unit:
                continue
            name = network.units[unit].layer
            if home.held:
                notes.append(
                    f"{item.held_bytes} bytes of the result of {name} stay in SRAM until step "
                    f"{home.until}"
                )
            elif item.ddr_only:
                notes.append(f"the result of {name} goes to DDR: {item.ddr_only}")
            elif home.ddr:
                why = self._why(number, state, buffer)
                notes.append(f"the result of {name} goes to DDR: {why}")
        return "; ".join(notes)

    def _why(self, number: int, state: State, buffer: int) -> str:
        """Return why a tensor that may be held is not."""
        item, size = self.network.buffers[buffer], self.network.hardware.sram_size
        assert state.action is not None
        end = next(
            at
            for at, later in enumerate(self.states)
            if later.action is not None and later.action.last >= item.last_reader
        )
        left = size - item.held_bytes
        if left <= 0:
            return f"it takes {item.held_bytes} bytes, SRAM has {size}"
        return (
            f"holding its {item.held_bytes} bytes until step {end} leaves {left} of {size} to the "
            "steps between, which is too little or slower"
        )
