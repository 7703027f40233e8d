"""The report's arithmetic on a hand-made simulation, and its three forms."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.unit.package_samples import copy_content
from tilewright.report.html import to_html
from tilewright.report.report import AccuracyRow, Report, make_report
from tilewright.report.text import layer_table, size, step_table, summary
from tilewright.runtime.runtime import Package
from tilewright.runtime.simulation import Simulation
from tilewright.sim.retire import CycleResult, RetireLog
from tilewright.spec.counters import Scope, names


def _layer(**given: int) -> dict[str, int]:
    return {**dict.fromkeys(names(Scope.LAYER), 0), **given}


def _engine(**given: int) -> dict[str, int]:
    return {**dict.fromkeys(names(Scope.ENGINE), 0), **given}


LAYERS = {
    "a": _layer(ddr_bytes=500, start=10, end=400, instructions=5),
    "relu": _layer(start=390, end=500, instructions=1),
    "b": _layer(ddr_bytes=4000, start=300, end=1000, instructions=6),
}
"""`a` has a load until 400, `relu` is in its nest, `b` has a store from 300 to 1000."""


@pytest.fixture
def report() -> Report:
    """Three layers on the chip, the second fused into the first, and one on the host."""
    return _report(LAYERS)


def _report(layers: dict[str, dict[str, int]], steps: dict[str, int] | None = None) -> Report:
    content = copy_content()
    rows: list[dict[str, Any]] = [
        {"name": "a", "op": "quant.conv", "device": "tpu", "macs": 6400, "array_cycles": 200,
         "min_ddr_bytes": 400, "sram_bytes": 10},
        {"name": "relu", "op": "quant.lut", "device": "tpu", "macs": 0, "array_cycles": 0,
         "min_ddr_bytes": 0, "sram_bytes": 30, "nest": "a"},
        {"name": "b", "op": "quant.conv", "device": "tpu", "macs": 12800, "array_cycles": 100,
         "min_ddr_bytes": 3600, "sram_bytes": 20},
        {"name": "flat", "op": "top.reshape", "device": "tpu", "macs": 0, "array_cycles": 0,
         "min_ddr_bytes": 0, "sram_bytes": 0},
        {"name": "soft", "op": "top.softmax", "device": "host", "reason": "no exponentials"},
    ]  # fmt: skip
    for name, step in (steps or {}).items():
        next(row for row in rows if row["name"] == name)["step"] = step
    content.program.layer_info = rows
    log = RetireLog(
        ("dma_load", "dma_store", "halt"),
        ("a", "b", ""),
        np.arange(3),
        np.array([0, 1, 6]),
        np.array([5, 6, 7]),
        np.array([10, 300, 1009]),
        np.array([400, 1000, 1010]),
    )
    result = CycleResult(
        cycles=1010,
        log=log,
        engines={"mac": _engine(busy=505, wait_semaphore=404, idle=101), "seq": {"busy": 9}},
        layers=layers,
        layer_engines={
            "a": {"dma0": _engine(busy=389), "mac": _engine(busy=300)},
            "b": {"dma1": _engine(busy=699), "mac": _engine(busy=205)},
        },
        totals=_layer(ddr_bytes=4500, instructions=12, end=1010),
        fetch_bytes=128,
        ddr_time=np.zeros(0),
        ddr_rate=np.zeros(0),
    )
    package = Package(content)
    accuracy = [AccuracyRow("top-1", "39/40 right", "some pictures")]
    return make_report(package, Simulation({"tpu_0": result}, 0.5), accuracy)


def test_layers_are_merged_and_add_up(report: Report):
    a, b, soft = report.layers
    # Both channels work from 301 to 400: `a`'s load was dispatched first.
    assert (a.name, a.fused, a.cycles, a.start, a.end) == ("a", ["relu"], 400, 10, 500)
    # `flat` has no instructions; the ten cycles after the last transfer belong to `b`.
    assert (b.name, b.fused, b.cycles, b.start, b.end) == ("b", ["flat"], 610, 300, 1000)
    assert (a.mac_busy, a.sram_bytes, a.ddr_bytes) == (300, 30, 500)
    assert (soft.device, soft.cycles, soft.reason) == ("host", 0, "no exponentials")
    assert sum(row.cycles for row in report.layers) == report.cycles


def test_a_layer_without_transfers_has_a_row_of_its_own():
    # Everything of a layer may lie in SRAM.
    report = _report({**LAYERS, "flat": _layer(start=600, end=700, instructions=1)})
    assert [row.name for row in report.layers] == ["a", "b", "flat", "soft"]


def test_steps_join_layers():
    report = _report(LAYERS)
    assert [row.layers for row in report.steps] == [["a"], ["b"]]
    report = _report(LAYERS, {"a": 0, "b": 0})
    (step,) = report.steps
    a, b, _ = report.layers
    assert (step.layers, step.cycles, step.sram_bytes) == (["a", "b"], report.cycles, 30)
    assert step.bound_cycles == max(a.array_bound + b.array_bound, a.ddr_bound + b.ddr_bound)
    assert (step.ddr_bytes, step.limit, step.limited.what) == (4500, "ddr", "dma")
    text = step_table(report)
    assert "a .. b (2)" in text
    assert "<h2>Steps</h2>" in to_html(report)


def test_bounds(report: Report):
    bandwidth = report.ddr_bytes_per_cycle
    a, b, _ = report.layers
    assert (a.bound_cycles, a.limit) == (max(200, 400 / bandwidth), "array")
    assert (b.bound_cycles, b.limit) == (3600 / bandwidth, "ddr")
    assert report.array_bound == 300
    assert report.ddr_bound == 4000 / bandwidth
    # Two latencies before the first byte, of 8 DMA cycles at half of the core's clock.
    assert (report.bound, report.limit) == (32 + 4000 / bandwidth, "DDR")
    assert report.order_bound == 32 + 300
    assert report.ratio == pytest.approx(1010 / report.bound)
    assert report.macs == 19200
    assert report.array_use == pytest.approx(19200 / (1010 * 64))
    assert report.ddr_bytes == 4628


def test_summary_is_short_and_labelled(report: Report):
    lines = summary(report)
    assert len(lines) <= 20
    figures = [line for line in lines[1:] if line.split()[0] not in ("host", "top-1")]
    for line in figures:
        assert any(f"({word})" in line for word in ("simulated", "estimated", "allocated")), line
    text = "\n".join(lines)
    assert "array busy 50%, waits 40% for semaphores, 10% for work" in text
    assert "39/40 right" in text
    assert "host       1 layer, reads 24 B, writes 0 B, not timed: a test" in text


def test_table_can_be_cut(report: Report):
    assert len(layer_table(report).splitlines()) == 2 + 3
    assert len(layer_table(report, 1).splitlines()) == 2 + 1
    assert "host" in layer_table(report)


def test_json_is_plain(report: Report):
    content = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert content["labels"]["cycles"] == "simulated"
    assert content["ratio"] == report.ratio
    assert [row["name"] for row in content["layers"]] == ["a", "b", "soft"]


def test_html_escapes_the_users_names(report: Report):
    hostile = "<script>alert(1)</script>"
    from dataclasses import replace

    rows = [replace(report.layers[0], name=hostile, fused=[hostile]), *report.layers[1:]]
    page = to_html(
        replace(report, model=hostile, layers=rows, accuracy=[AccuracyRow(hostile, "1", "2")])
    )
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 4
    assert "Roofline" in page


def test_all_on_the_host():
    content = copy_content()
    content.program.layer_info = []
    content.program.steps = [content.program.steps[3]]
    report = make_report(Package(content), Simulation({}, 0.0))
    assert (report.cycles, report.ratio, report.array_use) == (0, 0.0, 0.0)
    assert "nothing to simulate" in "\n".join(summary(report))
    assert "On the host" in to_html(report)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (3 << 20, "3.00 MiB"),
        (1 << 31, "2.00 GiB"),
    ],
)
def test_sizes(count: int, text: str):
    assert size(count) == text
