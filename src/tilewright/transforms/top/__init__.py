"""Passes on the float `top` graph, one a file; `TOP_PASSES` is the order they are made for."""

from __future__ import annotations

TOP_PASSES: tuple[str, ...] = (
    "top-eliminate-dead-code",
    "top-widen-half",
    "top-replace-dynamic",
    "top-absorb-weights",
    "top-fold-constants",
    "top-simplify-shapes",
    "top-common-subexpressions",
    "top-normalize",
    "top-recognize-activations",
    "top-absorb-pad",
    "top-fold-batch-norm",
    "top-fold-scale",
    "top-separate-scales",
    "top-fuse-activation",
    "top-absorb-qdq",
    "top-simplify-shapes",
    "top-common-subexpressions",
    "top-eliminate-dead-code",
)
"""Everything but the layout, in order. Recognition comes before folding, which would take
decomposed activations apart; normalisation before both, since they know one spelling only."""

LAYOUT_PASSES: tuple[str, ...] = (
    "top-assign-layout{layout=nhwc}",
    "top-fold-constants",
    "top-eliminate-dead-code",
)
"""For targets that store images channels last; after `TOP_PASSES`."""
