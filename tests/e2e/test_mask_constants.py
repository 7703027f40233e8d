"""Masks of -inf and of the least float before a softmax mean what masks of -1e4 mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.quantised_models import compiled, model, node, run_both, run_ort

Array = np.ndarray[Any, Any]
MASKS = (-1e4, -1e9, -3e38, -3.4e38, float(np.finfo(np.float32).min), -np.inf)
RNG = np.random.default_rng(5)
SAMPLES: list[dict[str, Array]] = [
    {"x": RNG.standard_normal((2, 5, 8)).astype(np.float32)} for _ in range(4)
]


def attention(mask: float) -> Any:
    """Return two causal attentions, one after the other, with one constant mask."""
    rng = np.random.default_rng(6)
    constants: dict[str, Array] = {
        "m": np.where(np.tril(np.ones((5, 5))), 0, mask).astype(np.float32)
    }
    nodes = []
    x = "x"
    for layer in range(2):
        constants[f"k{layer}"] = (rng.standard_normal((8, 8)) / 2).astype(np.float32)
        names = [f"{name}{layer}" for name in ("k", "r", "t", "c", "s", "p", "y")]
        k, r, t, c, s, p, y = names
        y = y if layer == 0 else "y"
        nodes += [
            node("MatMul", [x, k], [r]),
            node("Transpose", [r], [t], perm=[0, 2, 1]),
            node("MatMul", [x, t], [c]),
            node("Add", [c, "m"], [s]),
            node("Softmax", [s], [p], axis=-1),
            node("MatMul", [p, r], [y]),
        ]
        x = y
    return model(nodes, {"x": (2, 5, 8)}, ["y"], constants)


@pytest.mark.parametrize("target", ["edge16", "tiny8"])
def test_masks_give_equal_codes_however_low(target: str) -> None:
    results: list[Array] = []
    for mask in MASKS:
        proto = attention(mask)
        built = compiled(proto, target, SAMPLES)
        results.append(np.stack([run_both(built, feed)["y"] for feed in SAMPLES]))
        wanted = np.stack([run_ort(proto, feed)["y"] for feed in SAMPLES])
        noise = ((wanted - results[-1]) ** 2).sum()
        assert 10 * np.log10((wanted**2).sum() / noise) > 20, mask
        if target == "edge16":
            assert any("the scores' least code" in item.reason for item in built.decisions)
    for found in results[1:]:
        np.testing.assert_array_equal(found, results[0])
