"""The report's figures: what a package costs on its chip, layer by layer, against its roofline.

Bounds are rooflines (docs/concepts/bound.md), of the network a floor besides; their parts come from
the compiler (`Program.layer_info`). What limits a layer is found in the retire log
(`report.limits`).

Cycles of a layer, with those fused into it: those in which the array, else the vector unit, else
DMA works for it, and the waits before it (`report.shares`): every cycle is counted once, also where
layers take turns, and the column adds up to the whole. A layer whose work is hidden behind
another's can so be shown below its own bound.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from tilewright.codegen.program import HostStep, LoadStep, Program, StoreStep
from tilewright.report.limits import NOT_SIMULATED, SLOW, Limit, Spans, layer_spans, limit_of
from tilewright.report.network import binding, floor, padded, roofline
from tilewright.report.shares import cycles_of

if TYPE_CHECKING:
    from tilewright.runtime.runtime import Package
    from tilewright.runtime.simulation import Simulation
    from tilewright.spec.hardware import Hardware
    from tilewright.spec.program import Dispatched


@dataclass(frozen=True)
class LayerRow:
    """One layer, or a chain of fused ones."""

    name: str
    op: str
    device: str
    fused: list[str]
    """Layers executed within this one."""
    macs: int
    cycles: int
    """Simulated; 0 on the host."""
    bound_cycles: float
    limit: str
    """What the bound is: "array", "vector" or "ddr"."""
    ddr_bytes: int
    """Simulated, data only."""
    min_ddr_bytes: int
    sram_bytes: int
    mac_busy: int
    """Cycles the array works on it."""
    start: int
    end: int
    reason: str
    """Why it is on the host."""
    array_bound: float = 0.0
    vector_bound: float = 0.0
    ddr_bound: float = 0.0
    """Cycles; the largest of the three is the bound."""
    spans: Spans = field(default_factory=Spans)
    """Where the cycles of its span go, engine by engine."""
    limited: Limit = NOT_SIMULATED
    """What limits it."""
    mapping: str = ""
    """How the array's part of the roofline lays it on the array: pixels of a pass, groups, kernel
    columns of a step; "plain", "diagonal"."""
    step: int = -1
    """The step of the plan it is part of (docs/concepts/groups.md); -1 where none is known."""

    @property
    def ratio(self) -> float:
        """Cycles over bound; 0 without a bound."""
        return self.cycles / self.bound_cycles if self.bound_cycles else 0.0


@dataclass(frozen=True)
class StepRow:
    """One step of the plan: a layer by itself, or a cascade of several."""

    layers: list[str]
    """Rows of the table of layers."""
    cycles: int
    """Simulated: the sum of the layers'."""
    bound_cycles: float
    limit: str
    """What the bound is: "array", "vector" or "ddr"."""
    ddr_bytes: int
    """Simulated, data only."""
    sram_bytes: int
    limited: Limit

    @property
    def ratio(self) -> float:
        """Cycles over bound; 0 without a bound."""
        return self.cycles / self.bound_cycles if self.bound_cycles else 0.0


@dataclass(frozen=True)
class Transfer:
    """A DMA transfer, for the memory map."""

    kind: str
    """`load` or `store`."""
    layer: str
    start: int
    end: int
    ddr_low: int
    ddr_high: int


@dataclass(frozen=True)
class AccuracyRow:
    """How near the integer model is to the float one."""

    name: str
    value: str
    """With its unit."""
    over: str
    """On what inputs."""


@dataclass(frozen=True)
class Report:
    """All figures of one package."""

    model: str
    target: str
    clock_mhz: int
    cycles: int
    """Simulated core cycles of the chip's part."""
    milliseconds: float
    """The same at the target's clock."""
    bound: float
    """The roofline: cycles by the best mapping of every layer."""
    bound_by: str
    """What sets it: "array", "vector", "ddr" (sums over the layers) or "order" (of the layers)."""
    array_bound: float
    """Cycles, summed over the layers."""
    ddr_bound: float
    """Cycles, summed over the layers."""
    vector_bound: float
    """Cycles, summed over the layers."""
    order_bound: float
    """Cycles, by what must follow what."""
    floor: float
    """Cycles no program can beat, whatever its mappings."""
    floor_by: str
    """What sets it; as `bound_by`."""
    padded: float
    """Cycles with products padded to whole blocks, one result pixel a pass: what a program that
    packs no pixels comes down to."""
    macs: int
    array_size: int
    ddr_bytes: int
    """Simulated: data and code."""
    min_ddr_bytes: int
    ddr_bytes_per_cycle: float
    sram_peak: int
    sram_size: int
    constants_bytes: int
    workspace_bytes: int
    instructions: int
    host: list[dict[str, Any]]
    """Each step on the host: `name`, `layers`, `reason`, and the DDR bytes the host reads and
    writes for it (`read_bytes`, `write_bytes`)."""
    engines: dict[str, dict[str, int]]
    """Counters of each engine, all programs summed."""
    layers: list[LayerRow]
    steps: list[StepRow]
    """In order; a layer whose step is not known is one of its own."""
    transfers: list[Transfer]
    simulator_seconds: float
    accuracy: list[AccuracyRow] = field(default_factory=list[AccuracyRow])
    spans: Spans = field(default_factory=Spans)
    """Where the cycles of all programs go, engine by engine."""
    limited: Limit = NOT_SIMULATED
    """What limits the network."""
    half_bytes: int = 0
    """Bytes of all weights of 4 bits as they lie in DDR, two a byte."""
    padding_bytes: int = 0
    """What of these only aligns rows."""

    @property
    def limit(self) -> str:
        """What sets the bound, in words."""
        return in_words(self.bound_by)

    @property
    def ratio(self) -> float:
        """Cycles over bound; 1 is perfect, of the mappings that are counted."""
        return self.cycles / self.bound if self.bound else 0.0

    @property
    def slow(self) -> list[LayerRow]:
        """Layers above `SLOW` times their bound, and those without a bound that take 1% or more of
        the time; the slowest first.
        """  # noqa: D205
        found = [
            row
            for row in self.layers
            if row.ratio > SLOW or (not row.bound_cycles and row.cycles >= self.cycles / 100 > 0)
        ]
        return sorted(found, key=lambda row: -row.cycles)

    @property
    def array_use(self) -> float:
        """Useful multiply-accumulates over what the array could do in the time, 0..1."""
        room = self.cycles * self.array_size**2
        return self.macs / room if room else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, the transfers left out."""
        content = asdict(self)
        del content["transfers"]
        for key, rows in (("layers", self.layers), ("steps", self.steps)):
            for entry, row in zip(content[key], rows, strict=True):
                entry["ratio"] = row.ratio
        return {
            **content,
            "limit": self.limit,
            "ratio": self.ratio,
            "array_use": self.array_use,
            "slow_layers": [row.name for row in self.slow],
            "labels": {
                "cycles": "simulated",
                "milliseconds": "simulated",
                "ddr_bytes": "simulated",
                "bound": "estimated",
                "floor": "estimated",
                "padded": "estimated",
                "sram_peak": "allocated",
            },
        }


def make_report(
    package: Package, simulation: Simulation, accuracy: list[AccuracyRow] | None = None
) -> Report:
    """Combine a package and its simulation."""
    program, target = package.content.program, package.content.target
    info = program.layer_info
    bandwidth = target.ddr_bytes_per_cycle
    engines: dict[str, dict[str, int]] = {}
    for result in simulation.programs.values():
        for engine, counters in result.engines.items():
            sums = engines.setdefault(engine, dict.fromkeys(counters, 0))
            for name, value in counters.items():
                sums[name] += value
    least = sum(int(row.get("min_ddr_bytes", 0)) for row in info)
    streams = _streams(package, simulation)
    spans = Spans()
    for name, stream in streams.items():
        result = simulation.programs[name]
        spans.add(layer_spans(result, stream, [list(result.layers)])[0])
    ddr_cycles = simulation.ddr_bytes / bandwidth if simulation.programs else 0.0
    bound, least_of_all = roofline(info, target), floor(info, target)
    layers, steps = _layer_rows(info, simulation, streams, target)
    return Report(
        model=package.content.model_name,
        target=target.name,
        clock_mhz=target.core_clock_mhz,
        cycles=simulation.cycles,
        milliseconds=simulation.cycles / target.core_clock_mhz / 1000,
        bound=bound.cycles,
        bound_by=bound.limit,
        array_bound=bound.array,
        ddr_bound=bound.ddr,
        vector_bound=bound.vector,
        order_bound=bound.order,
        floor=least_of_all.cycles,
        floor_by=least_of_all.limit,
        padded=padded(info, bound),
        macs=sum(int(row.get("macs", 0)) for row in info if row.get("device") == "tpu"),
        array_size=target.array_size,
        ddr_bytes=simulation.ddr_bytes,
        min_ddr_bytes=least,
        ddr_bytes_per_cycle=bandwidth,
        sram_peak=program.sram_peak_bytes,
        sram_size=target.sram_size,
        constants_bytes=program.constants.nbytes,
        workspace_bytes=program.workspace_bytes,
        instructions=simulation.total("instructions") if simulation.programs else 0,
        host=[_host_step(program, step) for step in program.host_steps],
        engines=engines,
        layers=layers,
        steps=steps,
        transfers=_transfers(streams, simulation),
        simulator_seconds=simulation.seconds,
        accuracy=accuracy or [],
        spans=spans,
        limited=limit_of(spans, ddr_cycles),
        half_bytes=sum(int(row.get("half_bytes", 0)) for row in info),
        padding_bytes=sum(int(row.get("padding_bytes", 0)) for row in info),
    )


def in_words(part: str) -> str:
    """Return the name of a part of a bound as users read it."""
    return {"ddr": "DDR", "order": "the order of layers"}.get(part, part)


def _streams(package: Package, simulation: Simulation) -> dict[str, list[Dispatched]]:
    """Return every simulated program as dispatched, by name."""
    from tilewright.spec.program import sequence

    executor = package.executor
    return {
        step.name: list(
            sequence(executor.code(step), executor.target.scalar_registers, executor.registers)
        )
        for step in executor.program.tpu_steps
        if step.name in simulation.programs
    }


def _host_step(program: Program, step: HostStep) -> dict[str, Any]:
    """Describe a host step and what it costs in DDR traffic beside the chip's."""

    def moved(kind: type[LoadStep | StoreStep], values: tuple[str, ...]) -> int:
        return sum(
            program.tensors[other.tensor].size_bytes
            for other in program.steps
            if isinstance(other, kind) and other.value in values
        )

    return {
        "name": step.name,
        "layers": list(step.layers),
        "reason": step.reason,
        "read_bytes": moved(LoadStep, step.inputs),
        "write_bytes": moved(StoreStep, step.outputs),
    }


def _layer_rows(
    info: list[dict[str, Any]],
    simulation: Simulation,
    streams: dict[str, list[Dispatched]],
    target: Hardware,
) -> tuple[list[LayerRow], list[StepRow]]:
    """Merge the compiler's layers with the simulator's; fused ones join the layer of their nest."""
    measured = _measured(simulation)
    groups: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in info:
        nest = by_name.get(str(row.get("nest", "")))
        if nest is not None:
            nest.append(row)
            continue
        # Others without instructions of their own belong to the layer before.
        works = str(row.get("name")) in measured
        on_chip = row.get("device") == "tpu"
        if on_chip and not works and groups and groups[-1][0].get("device") == "tpu":
            groups[-1][1].append(row)
        else:
            groups.append((row, []))
        by_name[str(row.get("name"))] = groups[-1][1]
    names = [[str(r.get("name")) for r in (head, *tail)] for head, tail in groups]
    spent = [0] * len(groups)
    for result in simulation.programs.values():
        for at, cycles in enumerate(cycles_of(result, names)):
            spent[at] += cycles
    spans = _spans(simulation, streams, names)
    bandwidth = target.ddr_bytes_per_cycle
    rows: list[LayerRow] = []
    for (head, tail), cycles, span in zip(groups, spent, spans, strict=True):
        every = [head, *tail]
        array = float(sum(int(row.get("array_cycles", 0)) for row in every))
        vector = float(sum(int(row.get("vector_cycles", 0)) for row in every))
        least = sum(int(row.get("min_ddr_bytes", 0)) for row in every)
        ddr = least / bandwidth
        parts = [measured[str(r["name"])] for r in every if str(r.get("name")) in measured]
        moved_bytes = sum(part[1]["ddr_bytes"] for part in parts)
        rows.append(
            LayerRow(
                name=str(head.get("name", "")),
                op=str(head.get("op", "")),
                device=str(head.get("device", "")),
                fused=[str(row.get("name", "")) for row in tail],
                macs=sum(int(row.get("macs", 0)) for row in every),
                cycles=cycles,
                bound_cycles=max(array, vector, ddr),
                limit=binding(array, vector, ddr),
                ddr_bytes=moved_bytes,
                min_ddr_bytes=least,
                sram_bytes=max(int(row.get("sram_bytes", 0)) for row in every),
                mac_busy=sum(part[0] for part in parts),
                start=min((part[1]["start"] for part in parts), default=0),
                end=max((part[1]["end"] for part in parts), default=0),
                reason=str(head.get("reason", "")),
                array_bound=array,
                vector_bound=vector,
                ddr_bound=ddr,
                spans=span,
                limited=limit_of(span, moved_bytes / bandwidth, array, vector),
                mapping=str(head.get("mapping", "")),
                step=int(head.get("step", -1)),
            )
        )
    return rows, _step_rows(rows, names, simulation, streams, bandwidth)


def _measured(simulation: Simulation) -> dict[str, tuple[int, dict[str, int]]]:
    """Return the array's busy cycles and the counters of each layer, by name."""
    measured: dict[str, tuple[int, dict[str, int]]] = {}
    base = 0
    for result in simulation.programs.values():
        for name, counters in result.layers.items():
            busy = result.layer_engines.get(name, {}).get("mac", {}).get("busy", 0)
            moved = {**counters, "start": base + counters["start"], "end": base + counters["end"]}
            measured[name] = (busy, moved)
        base += result.cycles
    return measured


def _spans(
    simulation: Simulation, streams: dict[str, list[Dispatched]], names: list[list[str]]
) -> list[Spans]:
    """Return the spans of groups of layers, over all programs."""
    spans = [Spans() for _ in names]
    for program, stream in streams.items():
        found = layer_spans(simulation.programs[program], stream, names)
        for span, more in zip(spans, found, strict=True):
            span.add(more)
    return spans


def _step_rows(
    rows: list[LayerRow],
    names: list[list[str]],
    simulation: Simulation,
    streams: dict[str, list[Dispatched]],
    bandwidth: float,
) -> list[StepRow]:
    """Return the steps of the plan; `names` are the layers of each row."""
    members: dict[int, list[int]] = {}
    for at, row in enumerate(rows):
        if row.device == "tpu":
            # Unknown steps get numbers of their own, below all known ones.
            members.setdefault(row.step if row.step >= 0 else -1 - at, []).append(at)
    groups = list(members.values())
    merged = [[name for at in group for name in names[at]] for group in groups]
    steps: list[StepRow] = []
    for group, span in zip(groups, _spans(simulation, streams, merged), strict=True):
        own = [rows[at] for at in group]
        array, vector, ddr = (
            sum(getattr(row, key) for row in own)
            for key in ("array_bound", "vector_bound", "ddr_bound")
        )
        moved = sum(row.ddr_bytes for row in own)
        steps.append(
            StepRow(
                layers=[row.name for row in own],
                cycles=sum(row.cycles for row in own),
                bound_cycles=max(array, vector, ddr),
                limit=binding(array, vector, ddr),
                ddr_bytes=moved,
                sram_bytes=max(row.sram_bytes for row in own),
                limited=limit_of(span, moved / bandwidth, array, vector),
            )
        )
    return steps


MAX_TRANSFERS = 6000
"""So many are drawn; of more, the largest."""


def _transfers(streams: dict[str, list[Dispatched]], simulation: Simulation) -> list[Transfer]:
    """Return the DMA transfers with their times and DDR ranges."""
    found: list[Transfer] = []
    base = 0
    for name, stream in streams.items():
        result = simulation.programs[name]
        starts, ends = result.log.start.tolist(), result.log.end.tolist()
        for at, start, end in zip(stream, starts, ends, strict=False):
            if at.name not in ("dma_load", "dma_store"):
                continue
            f = at.fields
            span = f["n0"] + sum((f[f"n{i}"] - 1) * f[f"ddr_s{i}"] for i in (1, 2, 3))
            found.append(
                Transfer(
                    at.name.removeprefix("dma_"),
                    at.layer,
                    base + start,
                    base + end,
                    f["ddr"],
                    f["ddr"] + span,
                )
            )
        base += result.cycles
    if len(found) > MAX_TRANSFERS:
        found.sort(key=lambda item: item.ddr_low - item.ddr_high)
        found = sorted(found[:MAX_TRANSFERS], key=lambda item: item.start)
    return found
