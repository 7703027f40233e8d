# pyright: basic
"""The MAC array: readers of activations and weights; part of the cycle simulator's kernel.

`a` is the array's state, `p` where its instruction's plan begins in `plans`.
"""

from __future__ import annotations

from tilewright.sim.cycle_state import (
    A_ALEFT,
    A_AWORD,
    A_BEGUN,
    A_CB,
    A_FIRST,
    A_HALF,
    A_KX,
    A_KY,
    A_LINE,
    A_NCB,
    A_NEXT,
    A_NKX,
    A_NKY,
    A_NOB,
    A_NPB,
    A_OB,
    A_PB,
    A_PIXEL,
    A_ROW,
    A_ROW_BYTES,
    A_ROWS,
    A_VEC,
    A_WCURSOR,
    A_WLEFT,
    A_WWORD,
    A_X,
    A_Y,
    A_YS,
    C_ACT,
    C_CB,
    C_CBS,
    C_COLS,
    C_COLS_LAST,
    C_DIAG,
    C_H,
    C_HALF,
    C_KH,
    C_KW,
    C_KX,
    C_KY,
    C_OB,
    C_OBS,
    C_OX,
    C_OY,
    C_PITCH,
    C_ROW,
    C_ROW_LAST,
    C_ROWS,
    C_ROWS_BLOCK,
    C_ROWS_LAST,
    C_VEC,
    C_VEC_LAST,
    C_W,
    C_WGT,
    C_WOB,
    unit,
)


@unit
def _row(a, w):
    first = a[A_ROW] >> w
    a[A_WWORD] = first
    a[A_WLEFT] = ((a[A_ROW] + a[A_ROW_BYTES] - 1) >> w) - first + 1


@unit
def _weights(a, plans, p, w):
    """Point the loader to the weights of the next step."""
    ob = a[A_NOB]
    if a[A_FIRST]:
        a[A_WCURSOR] = plans[p + C_WGT] + ob * plans[p + C_WOB]
    a[A_ROW] = a[A_WCURSOR]
    a[A_ROWS] = plans[p + C_ROWS_LAST] if a[A_NCB] == plans[p + C_CBS] - 1 else plans[p + C_ROWS]
    a[A_ROW_BYTES] = plans[p + C_ROW_LAST] if ob == plans[p + C_OBS] - 1 else plans[p + C_ROW]
    a[A_WCURSOR] += a[A_ROWS] * plans[p + C_PITCH]
    _row(a, w)


@unit
def mac_start(a, plans, p, w):
    """Set up the instruction of plan `p`: the weights of its first step are loaded."""
    a[:] = 0
    a[A_HALF] = plans[p + C_HALF]
    a[A_FIRST] = 1
    a[A_NEXT] = 1
    _weights(a, plans, p, w)


@unit
def mac_following(a, plans, p):
    """Make the next step the current one, and find that after it."""
    a[A_OB] = a[A_NOB]
    a[A_PB] = a[A_NPB]
    a[A_KY] = a[A_NKY]
    a[A_KX] = a[A_NKX]
    a[A_CB] = a[A_NCB]
    a[A_BEGUN] = 0
    a[A_FIRST] = 0
    a[A_NCB] += 1
    if a[A_NCB] < plans[p + C_CBS]:
        return
    a[A_NCB] = 0
    a[A_NKX] += 1
    if a[A_NKX] < plans[p + C_KW]:
        return
    a[A_NKX] = 0
    a[A_NKY] += 1
    if a[A_NKY] < plans[p + C_KH]:
        return
    a[A_NKY] = 0
    a[A_FIRST] = 1
    a[A_NPB] += 1
    if a[A_NPB] * plans[p + C_ROWS_BLOCK] < plans[p + C_H]:
        return
    a[A_NPB] = 0
    a[A_NOB] += 1
    if a[A_NOB] == plans[p + C_OBS]:
        a[A_NEXT] = 0


@unit
def _pixel(a, w):
    first = a[A_PIXEL] >> w
    a[A_AWORD] = first
    a[A_ALEFT] = ((a[A_PIXEL] + a[A_VEC] - 1) >> w) - first + 1


@unit
def mac_begin(a, plans, p, w):
    """First cycle of a step: readers of its activations and of the next step's weights."""
    a[A_BEGUN] = 1
    row = a[A_PB] * plans[p + C_ROWS_BLOCK]
    a[A_YS] = min(plans[p + C_ROWS_BLOCK], plans[p + C_H] - row)
    a[A_Y] = 0
    a[A_X] = 0
    if plans[p + C_DIAG]:
        a[A_VEC] = plans[p + C_COLS_LAST] if a[A_OB] == plans[p + C_OBS] - 1 else plans[p + C_COLS]
    else:
        a[A_VEC] = plans[p + C_VEC_LAST] if a[A_CB] == plans[p + C_CBS] - 1 else plans[p + C_VEC]
    a[A_LINE] = (
        plans[p + C_ACT] + a[A_OB] * plans[p + C_OB] + row * plans[p + C_OY]
        + a[A_KY] * plans[p + C_KY] + a[A_KX] * plans[p + C_KX] + a[A_CB] * plans[p + C_CB]
    )  # fmt: skip
    a[A_PIXEL] = a[A_LINE]
    _pixel(a, w)
    if a[A_NEXT]:
        _weights(a, plans, p, w)


@unit
def mac_reads(a, plans, p, w):
    """A word of activations was granted."""
    a[A_AWORD] += 1
    a[A_ALEFT] -= 1
    if a[A_ALEFT]:
        return
    a[A_X] += 1
    a[A_PIXEL] += plans[p + C_OX]
    if a[A_X] == plans[p + C_W]:
        a[A_X] = 0
        a[A_Y] += 1
        if a[A_Y] == a[A_YS]:
            return
        a[A_LINE] += plans[p + C_OY]
        a[A_PIXEL] = a[A_LINE]
    _pixel(a, w)


@unit
def mac_loads(a, plans, p, w):
    """A word of weights was granted."""
    a[A_WWORD] += 1
    a[A_WLEFT] -= 1
    if a[A_WLEFT] == 0:
        a[A_ROWS] -= 1
        if a[A_ROWS]:
            a[A_ROW] += plans[p + C_PITCH]
            _row(a, w)
