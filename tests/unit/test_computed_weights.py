"""Products of two activations: the right one is loaded in the weights' place, as it is."""

from __future__ import annotations

from dataclasses import replace

from tests.level_checks import check_model
from tests.transformer_networks import encoder
from tilewright.schedule.footprint import PLAIN
from tilewright.schedule.tiling import Choice, ConvProblem, choose_conv
from tilewright.spec.hardware import load_target


def test_pixels_do_not_share_a_pass() -> None:
    """Weights of several pixels are embedded in zeros, which only constants can be."""
    chip, shared = load_target("tpu_v2"), 0
    for depth in (1, 2, 5):
        constant = ConvProblem("conv", 1, 1, 64, depth, 1, 64, 16, (1, 1))
        for problem in (constant, replace(constant, computed_weights=True)):
            choice = choose_conv(chip, problem)
            assert isinstance(choice, Choice)
            if problem is constant:
                shared += choice.tiling.packing != PLAIN
            else:
                assert choice.tiling.packing == PLAIN
    assert shared > 0


def test_heads_of_one_channel() -> None:
    """A single product of depth 1 gives the same integers at every level."""
    model = encoder(tokens=64, width=1, heads=1, hidden=3)
    check_model(model, {"x": (1, 64, 1)}, load_target("tpu_v2"))
