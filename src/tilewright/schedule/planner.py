"""Plans a network: which units make a step together, and where every tensor lies."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.schedule.box import BoxNoFit, BoxProblem, choose_box
from tilewright.schedule.plan import Home, Plan, Step, TensorSpec, UnitSpec
from tilewright.schedule.tiling import NoFit, choose_conv
from tilewright.spec.hardware import Hardware


class UnitDoesNotFitError(Exception):
    """No tile of a unit fits SRAM, or the chip has no instruction for it."""

    def __init__(self, unit: int, answer: NoFit | BoxNoFit) -> None:
        super().__init__(f"no tile of unit {unit} fits")
        self.unit = unit
        self.answer = answer


def plan_network(
    hardware: Hardware, units: Sequence[UnitSpec], tensors: Sequence[TensorSpec], *, effort: int = 2
) -> Plan:
    """Return steps and homes for a function's units.

    Args:
        hardware: the chip.
        units: in program order.
        tensors: between them, by the numbers that the units name.
        effort: 0: every unit by itself, every tensor in DDR.

    Raises:
        UnitDoesNotFitError: a unit that does not fit however it is cut.
    """
    return _layer_by_layer(hardware, units, tensors)


def _layer_by_layer(
    hardware: Hardware, units: Sequence[UnitSpec], tensors: Sequence[TensorSpec]
) -> Plan:
    steps: list[Step] = []
    cycles, most = 0.0, 0
    for number, unit in enumerate(units):
        problem = unit.in_ddr or unit.problem
        if problem is None:
            steps.append(Step((number,), (None,), reason="tiles itself"))
            continue
        if isinstance(problem, BoxProblem):
            choice = choose_box(hardware, problem)
        else:
            choice = choose_conv(hardware, problem)
        if isinstance(choice, NoFit | BoxNoFit):
            raise UnitDoesNotFitError(number, choice)
        steps.append(Step((number,), (choice.tiling,), reason="by itself"))
        cycles += choice.cycles
        most = max(most, choice.sram_bytes)
    homes = tuple(Home(ddr=True, held=False) for _ in tensors)
    return Plan(tuple(steps), homes, cycles, 0.0, most)
