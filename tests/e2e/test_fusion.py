"""Additions inside the loop nests of the layers before them: the same integers, less traffic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import onnx
import pytest
from onnx import helper

from tests.e2e.test_edges import graph, normal
from tests.e2e.test_wild_networks import REFUSALS
from tests.level_checks import assert_levels_agree, normal_sample
from tests.random_targets import random_target
from tilewright.codegen.package import PackageContent
from tilewright.compiler import Compiled, compile_model, front_end
from tilewright.diagnostics import TilewrightError
from tilewright.ptq.options import Activations, QuantOptions
from tilewright.report.report import Report, make_report
from tilewright.runtime.runtime import Executor, Package
from tilewright.runtime.simulation import simulate
from tilewright.schedule.plan import Plan
from tilewright.spec.hardware import Hardware, load_target
from tilewright.transforms.affine import fusion, layers

SMALL = load_target("tiny8").model_copy(update={"name": "tiny8_4k", "sram_size": 4096})
TWO_BANKS = load_target("tiny8").model_copy(update={"name": "two_banks", "quant_banks": 2})
"""Parameters of channels and of the addition take each other's place."""
TARGETS = [SMALL, TWO_BANKS, *(load_target(name) for name in ("tiny8", "edge16", "tpu_v2"))]
SHAPE = (1, 6, 11, 9)

each_target = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)


def node(kind: str, inputs: Sequence[str], output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(kind, list(inputs), [output], name=output, **attributes)


def block(kind: str, swapped: bool = False, curve: bool = False, batch: int = 1) -> onnx.ModelProto:
    """A residual block of two convolutions, then two more whose results are joined."""
    end = "curved" if curve else "b"
    pair = [end, "a"] if swapped else ["a", end]
    nodes = [
        node("Conv", ["x", "w0"], "a"),
        node("Conv", ["a", "w1"], "b", pads=[1, 1, 1, 1]),
        *([node("HardSwish", ["b"], "curved")] if curve else []),
        node(kind, pair, "sum"),
        node("Relu", ["sum"], "r"),
        node("Conv", ["r", "w2"], "c", group=20, pads=[0, 1, 2, 1]),
        node("Conv", ["r", "w3"], "d"),
        node(kind, ["c", "d"], "y"),
    ]
    return graph(
        nodes,
        {"x": (batch, *SHAPE[1:])},
        ["y"],
        w0=normal(20, 6, 1, 1) / 2,
        w1=normal(20, 20, 3, 3, seed=1) / 10,
        w2=normal(20, 1, 3, 3, seed=2) / 3,
        w3=normal(20, 20, 1, 1, seed=3) / 4,
    )


def both_ways(
    model: onnx.ModelProto,
    shapes: dict[str, tuple[int, ...]],
    target: Hardware,
    dtype: Literal["int8", "fp16"] = "int8",
    activations: Activations = "symmetric",
) -> tuple[Compiled, Compiled]:
    """Compile with and without fusion, and check that it changes no result."""
    rng = np.random.default_rng(0)
    samples = [normal_sample(shapes, rng) for _ in range(2)]
    made = [
        compile_model(
            front_end(model, target), target, samples=samples, dtype=dtype,
            quant=QuantOptions(level=0, activations=activations), fuse=fuse,
        )
        for fuse in (True, False)
    ]  # fmt: skip
    loud = {name: array * np.float32(1.5) for name, array in samples[0].items()}
    if dtype == "int8":
        assert_levels_agree(made[0], loud)
    got, wanted = (Executor(item.program, target).run(loud) for item in made)
    for name, array in wanted.items():
        np.testing.assert_array_equal(got[name], array, name)
    return made[0], made[1]


def joined(compiled: Compiled) -> dict[str, str]:
    """Return which layer's nest every fused layer runs in."""
    return {str(row["name"]): row["nest"] for row in compiled.program.layer_info if row["nest"]}


def reasons(compiled: Compiled, fired: bool) -> dict[str, str]:
    return {
        item.layer: item.reason
        for item in compiled.decisions
        if item.stage == "tile-and-bufferize" and item.fired == fired and "join" in item.reason
    }


@each_target
@pytest.mark.parametrize(
    ("kind", "swapped", "activations"),
    [
        ("Add", False, "symmetric"),
        ("Add", True, "asymmetric"),
        ("Sub", False, "asymmetric"),
        ("Sub", True, "symmetric"),
        ("Mul", True, "asymmetric"),
    ],
)
def test_fusion_changes_no_integer(
    kind: str, swapped: bool, activations: Activations, target: Hardware
) -> None:
    fused, apart = both_ways(block(kind, swapped), {"x": SHAPE}, target, activations=activations)
    # The later of two convolutions takes the operation; the first's result is in DDR by then.
    wanted = {"sum": "b", "y": "d"}
    if target.sram_size > SMALL.sram_size:
        assert joined(fused) == wanted
    assert joined(fused).items() <= wanted.items()
    assert joined(apart) == {}
    assert reasons(fused, True).keys() == joined(fused).keys()
    assert not reasons(apart, True)
    kept, stored = fused.program.tensors.keys(), apart.program.tensors.keys()
    assert stored - kept >= set(joined(fused).values())


@each_target
def test_a_lookup_before_the_addition_stays_in_the_nest(target: Hardware) -> None:
    shape = (2, *SHAPE[1:])
    fused, _ = both_ways(block("Add", curve=True, batch=2), {"x": shape}, target)
    if target.sram_size > SMALL.sram_size:
        assert joined(fused) == {"curved": "b", "sum": "b", "y": "d"}


def test_halves_are_joined_as_well() -> None:
    target = load_target("tpu_v2")
    both_ways(block("Add", curve=True), {"x": SHAPE}, target, "fp16")
    fused, _ = both_ways(block("Sub", swapped=True), {"x": SHAPE}, target, "fp16")
    assert joined(fused) == {"sum": "b", "y": "d"}


@each_target
def test_products_and_window_sums_take_additions(target: Hardware) -> None:
    model = graph(
        [
            node("Conv", ["x", "w"], "c"),
            node("AveragePool", ["c"], "mean", kernel_shape=[3, 3], pads=[1, 1, 1, 1],
                 count_include_pad=1),
            node("Add", ["c", "mean"], "sum"),
            node("GlobalAveragePool", ["sum"], "all"),
            node("Flatten", ["all"], "flat"),
            node("Gemm", ["flat", "v"], "fc", transB=1),
            node("Add", ["fc", "flat"], "y"),
        ],
        {"x": SHAPE},
        ["y"],
        w=normal(24, 6, 1, 1) / 2,
        v=normal(24, 24, seed=1) / 4,
    )  # fmt: skip
    fused, _ = both_ways(model, {"x": SHAPE}, target)
    if target.sram_size > SMALL.sram_size:
        assert joined(fused) == {"sum": "mean", "y": "fc"}


@each_target
def test_results_that_others_read_stay_in_memory(target: Hardware) -> None:
    model = graph(
        [
            node("Conv", ["x", "w"], "a"),
            node("Conv", ["x", "v"], "b"),
            node("Add", ["a", "b"], "sum"),
            node("Conv", ["sum", "u"], "c"),
            node("GlobalAveragePool", ["sum"], "mean"),
            node("Mul", ["c", "mean"], "gated"),
            node("Add", ["gated", "gated"], "twice"),
        ],
        {"x": SHAPE},
        ["twice", "b"],
        w=normal(8, 6, 1, 1) / 2,
        v=normal(8, 6, 1, 1, seed=1) / 2,
        u=normal(8, 8, 1, 1, seed=2) / 2,
    )
    fused, _ = both_ways(model, {"x": SHAPE}, target)
    # `b` is an output, `c` is made before what it is multiplied by, and has another shape.
    assert joined(fused) == {}
    assert "different shapes" in reasons(fused, False)["gated"]


def hold_nothing(patch: pytest.MonkeyPatch) -> None:
    """Let every tensor go through DDR, so that only additions are fused."""
    plan_network = layers.plan_network

    def plan(*args: Any, **options: Any) -> Plan:
        return plan_network(*args, **{**options, "effort": 0})

    patch.setattr(layers, "plan_network", plan)


def reports_of(made: Sequence[Compiled], target: Hardware) -> list[Report]:
    packages = [Package(PackageContent(item.program, target, "m", "")) for item in made]
    return [make_report(package, simulate(package)) for package in packages]


def test_the_report_counts_an_addition_in_its_nest(monkeypatch: pytest.MonkeyPatch) -> None:
    target = load_target("edge16")
    hold_nothing(monkeypatch)
    reports = reports_of(both_ways(block("Add"), {"x": SHAPE}, target), target)
    rows = [{row.name: row for row in report.layers if row.device == "tpu"} for report in reports]
    assert rows[0].keys() == {"a", "b", "c", "d"}
    assert {name: row.fused for name, row in rows[0].items()} == {
        "a": [], "b": ["sum"], "c": [], "d": ["y"],
    }  # fmt: skip
    for table, report in zip(rows, reports, strict=True):
        assert sum(row.cycles for row in table.values()) == report.cycles
        # `halt` and the like come after the last instruction that belongs to a layer.
        assert 0 <= report.cycles - max(row.end for row in table.values()) <= 4
    # Neither stored nor read again; smaller tiles read a little more of other things.
    size = 20 * 11 * 9
    saved = [
        rows[1][conv].ddr_bytes + rows[1][total].ddr_bytes - rows[0][conv].ddr_bytes
        for conv, total in (("b", "sum"), ("d", "y"))
    ]
    assert min(saved) > 0
    assert 2 * size < sum(saved) < 6 * size, saved
    assert reports[0].cycles < reports[1].cycles
    assert reports[0].bound == reports[1].bound


def test_tensors_between_layers_are_not_in_ddr() -> None:
    target = load_target("edge16")
    made = both_ways(block("Add"), {"x": SHAPE}, target)
    assert "y" in made[0].program.tensors
    assert not made[0].program.tensors.keys() & {"a", "b", "c", "d", "sum"}
    held, apart = reports_of(made, target)
    # Written once, and read: `a` and `sum` twice, `b`, `c` and `d` once.
    passed = (2 * 3 + 3 * 2) * 20 * 11 * 9
    saved = apart.ddr_bytes - held.ddr_bytes
    # Without them, smaller tiles read a little more of other things.
    assert passed < saved < 1.2 * passed, saved
    assert held.cycles < apart.cycles


def residual_network(seed: int) -> tuple[onnx.ModelProto, tuple[int, ...]]:
    """Return blocks of branches that keep the shape, joined in pairs, and the input's shape."""
    rng = np.random.default_rng(seed)
    channels, batch = int(rng.choice([1, 6, 12, 24, 40, 72])), int(rng.integers(1, 3))
    shape = (batch, channels, int(rng.integers(1, 18)), int(rng.integers(1, 18)))
    nodes: list[onnx.NodeProto] = []
    constants: dict[str, np.ndarray] = {}

    def add(kind: str, *inputs: str, **attributes: Any) -> str:
        nodes.append(node(kind, inputs, f"{kind.lower()}{len(nodes)}", **attributes))
        return nodes[-1].output[0]

    def branch(value: str) -> str:
        choice = rng.integers(8)
        if choice == 0:
            return value
        if choice == 1:
            edges = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1}
            return add("AveragePool", value, **edges)
        rows, columns, step = (int(rng.choice(options)) for options in ((1, 3), (1, 3, 5), (1, 2)))
        group = int(rng.choice([n for n in (1, 1, 2, 3, channels) if channels % n == 0]))
        pads = [rows // 2 * step, columns // 2 * step] * 2
        depth = channels // group
        scale = np.float32(1 / np.sqrt(depth * rows * columns))
        name = f"w{len(constants)}"
        constants[name] = normal(channels, depth, rows, columns, seed=len(nodes)) * scale
        made = add("Conv", value, name, pads=pads, dilations=[step, step], group=group)
        return add(str(rng.choice(["HardSwish", "Relu"])), made) if rng.integers(3) == 0 else made

    value, outputs = branch("x"), list[str]()
    for _ in range(4):
        pair = [branch(value), branch(value)]
        kind = str(rng.choice(["Add", "Add", "Sub", "Mul", "Max"]))
        value = add(kind, *(pair if rng.integers(2) else pair[::-1]))
        if rng.integers(3) == 0:
            value = add("Relu", value)
        if rng.integers(6) == 0 and pair[0] != "x":
            outputs.append(pair[0])
    return graph(nodes, {"x": shape}, [*dict.fromkeys(outputs), value], **constants), shape


def check_residual(seed: int, target: Hardware) -> int:
    model, shape = residual_network(seed)
    activations = "asymmetric" if seed % 2 else "symmetric"
    return len(joined(both_ways(model, {"x": shape}, target, activations=activations)[0]))


@each_target
def test_random_blocks(target: Hardware) -> None:
    assert sum(check_residual(seed, target) for seed in range(4)) >= 4


@pytest.mark.slow
@each_target
@pytest.mark.parametrize("seed", range(100, 140))
def test_many_more_random_blocks(seed: int, target: Hardware) -> None:
    check_residual(seed, target)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_random_blocks_on_any_legal_chip(seed: int) -> None:
    try:
        check_residual(seed, random_target(seed))
    except TilewrightError as error:
        if error.code not in REFUSALS:
            raise


def test_a_slower_nest_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion.vector, "elementwise_cycles", lambda *_: -1000.0)
    hold_nothing(monkeypatch)
    fused, apart = both_ways(block("Add"), {"x": SHAPE}, load_target("edge16"))
    assert joined(fused) == {}
    assert fused.program.tensors.keys() == apart.program.tensors.keys()
    assert {layer: reason.split(":")[0] for layer, reason in reasons(fused, False).items()} == {
        "sum": "does not join the nest of b", "y": "does not join the nest of d",
    }  # fmt: skip
    assert "two nests are estimated at" in reasons(fused, False)["y"]
