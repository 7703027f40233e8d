"""Before calibration: loud layers stay in float, and changes stay if they serve the outputs."""

import numpy as np
import pytest
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue

from tests.unit.quant_top_graphs import TopGraph
from tilewright.diagnostics import UsageError
from tilewright.dialects import quant
from tilewright.ir.context import CompileContext
from tilewright.ir.io import new_context
from tilewright.ir.stage import Stage
from tilewright.ptq.condition import condition, trial
from tilewright.ptq.options import QuantOptions, Rounding
from tilewright.ptq.prepare import OutputJudge, Prepared, improve_codes, observe_samples, quantise
from tilewright.quant.graph import KEEP_FLOAT, layer_of, main_function
from tilewright.runtime.float_executor import TopSession
from tilewright.spec.hardware import load_target

WIDTH, ROWS = 16, 12

CHIP = load_target("tiny8").model_copy(update={"vector_rows": True})
"""A chip that normalises by itself: nothing but the search puts a residual sum on the host."""


def encoder() -> Stage:
    """Return two layers with a residual sum between them."""
    rng = np.random.default_rng(0)
    g = TopGraph(x=(1, ROWS, WIDTH))

    def linear(name: str, value: SSAValue, columns: int, shift: SSAValue | None = None) -> SSAValue:
        weight = g.weight(f"{name}.w", rng.normal(size=(columns, WIDTH)) / 4)
        return g.op("linear", name, [value, weight, g.none() if shift is None else shift])

    y = linear("up", g.input("x"), WIDTH, g.weight("up.b", np.zeros(WIDTH)))
    total = g.op("add", "residual", [g.input("x"), y])
    gamma, beta = g.weight("gamma", np.ones(WIDTH)), g.weight("beta", np.zeros(WIDTH))
    norm = g.op("layer_norm", "norm", [total, gamma, beta], None, epsilon=1e-5, axis=2)
    module = g.finish(out=linear("down", norm, WIDTH))
    return Stage(module, g.ctx.weights.copy())


def context_of(stage: Stage) -> CompileContext:
    context = new_context(target=CHIP)
    context.weights = stage.weights.copy()
    return context


PLAIN = QuantOptions(level=0).resolved()


def samples(count: int = 8, outlier: float = 0.0) -> list[dict[str, np.ndarray]]:
    """Return inputs; one channel of the first row is `outlier`."""
    rng = np.random.default_rng(1)
    found = [{"x": rng.normal(size=(1, ROWS, WIDTH)).astype(np.float32)} for _ in range(count)]
    for sample in found:
        sample["x"][0, 0, 5] += outlier
    return found


def kept(module: ModuleOp) -> set[str]:
    return {
        layer_of(op) for op in main_function(module).body.block.ops if KEEP_FLOAT in op.attributes
    }


def conditioned(
    stage: Stage, outlier: float = 0.0, **options: object
) -> tuple[Stage, CompileContext]:
    context = context_of(stage)
    asked = QuantOptions(**{"smooth": 0.0, **options}).resolved()  # pyright: ignore[reportArgumentType]
    return condition(stage, context, samples(outlier=outlier), asked), context


def test_a_loud_sum_stays_in_float_and_its_product_gives_sums() -> None:
    stage, context = conditioned(encoder(), 300.0)
    assert {"residual", "norm"} <= kept(stage.module)
    decisions = context.decisions
    assert any("alone would leave the outputs" in item.reason for item in decisions)
    asked = QuantOptions(smooth=0.0).resolved()
    made = context_of(stage)
    module = stage.module.clone()
    prepared = observe_samples(stage, made, samples(), PLAIN)
    quantise(module, made, prepared, asked)
    linear = [op for op in module.walk() if isinstance(op, quant.LinearOp)]
    assert [op.wide for op in linear] == [True, True]


def test_ordinary_sums_become_codes() -> None:
    rng = np.random.default_rng(2)
    g = TopGraph(x=(1, 6, 6, 4))
    a = g.conv("a", g.input("x"), rng.normal(size=(4, 4, 1, 1)), layout="nhwc")
    total = g.op("add", "sum", [a, g.input("x")])
    out = g.conv("b", total, rng.normal(size=(4, 4, 1, 1)), layout="nhwc")
    plain = Stage(g.finish(out=out), g.ctx.weights.copy())
    context = new_context(target=CHIP)
    data = [{"x": rng.normal(size=(1, 6, 6, 4)).astype(np.float32)} for _ in range(4)]
    assert condition(plain, context, data, QuantOptions().resolved()) is plain


def test_layers_can_be_named_and_unknown_names_are_refused() -> None:
    stage, _ = conditioned(encoder(), float_layers=("residual",))
    assert kept(stage.module) == {"residual"}
    stage, _ = conditioned(encoder(), 300.0, float_layers=())
    assert not kept(stage.module)
    with pytest.raises(UsageError, match="no layer `residul`") as caught:
        conditioned(encoder(), float_layers=("residul",))
    assert "residual" in (caught.value.hint or "")


def test_the_float_function_stays_and_smoothing_is_kept_only_where_it_serves() -> None:
    original = encoder()
    name = "gamma"
    gamma = original.weights.get(name).copy()
    gamma[2] = 64.0
    original.weights.set(name, gamma)
    context = context_of(original)
    asked = QuantOptions(float_layers=()).resolved()
    better = condition(original, context, samples(), asked)
    assert better is not original
    judge = OutputJudge(original, samples())
    after, before = (trial(x, judge, context, asked) for x in (better, original))
    assert after > before
    for sample in samples(2):
        wanted = TopSession(original.module, original.weights).run(sample)["out"]
        got = TopSession(better.module, better.weights).run(sample)["out"]
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_fits_that_do_not_serve_the_outputs_are_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewright.ptq import sequential

    def spoil(top: Stage, stage: Stage, *_: object) -> list[sequential.LayerImprovement]:
        del top
        for key in list(stage.weights):
            if key.endswith(".bias"):
                stage.weights.set(key, stage.weights.get(key) + 1000)
        return [sequential.LayerImprovement("up", 0.1, 0.05, 1, 1, WIDTH)]

    stage = encoder()
    table = observe_samples(stage, context_of(stage), samples(), PLAIN).table

    def biases(rounding: Rounding) -> tuple[list[np.ndarray], list[bool]]:
        context = context_of(stage)
        module = stage.module.clone()
        asked = QuantOptions(rounding=rounding, bias="mean").resolved()
        prepared = Prepared(table, [*samples()], stage)
        quantise(module, context, prepared, asked)
        improve_codes(prepared, module, asked, context)
        fired = [item.fired for item in context.decisions if item.stage == "improve"]
        return [context.weights.get(k) for k in context.weights if k.endswith(".bias")], fired

    plain, _ = biases("nearest")
    monkeypatch.setattr(sequential, "improve", spoil)
    spoilt, fired = biases("learned")
    assert fired == [False]
    for before, after in zip(plain, spoilt, strict=True):
        np.testing.assert_array_equal(before, after)
