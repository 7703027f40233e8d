# pyright: basic
"""The DMA channels: source, mover and sink side by side; part of the cycle simulator's kernel.

`x` is where a channel's state begins in `dma`, `p` where its instruction's plan does in `plans`.
"""

from __future__ import annotations

from tilewright.sim.cycle_state import (
    D_ALL1,
    D_ALL2,
    D_DST,
    D_DST1,
    D_DST2,
    D_DST3,
    D_N0,
    D_N1,
    D_N2,
    D_N3,
    D_PAD1,
    D_PAD2,
    D_SINK_UNIT,
    D_SOURCE_UNIT,
    D_SRC,
    D_SRC1,
    D_SRC2,
    D_SRC3,
    ENGINE_COLUMNS,
    FILL,
    STORE,
    X_ARRIVING,
    X_BUDGET,
    X_BYTES,
    X_COLLECTS,
    X_DDR,
    X_END,
    X_FIFO,
    X_FILL,
    X_FULL,
    X_HELD,
    X_I1,
    X_I2,
    X_I3,
    X_J1,
    X_J2,
    X_J3,
    X_KUNIT,
    X_MORE,
    X_MOVED,
    X_OFFSET,
    X_OUT,
    X_OUT_UNIT,
    X_PREV,
    X_SINK,
    X_SKIP,
    X_SOURCE,
    X_SRAM,
    X_SUNIT,
    X_UNIT,
    X_UNITS,
    K,
    unit,
)


@unit
def _source_run(dma, x, plans, p):
    base = (
        plans[p + D_SRC]
        + dma[x + X_I1] * plans[p + D_SRC1]
        + dma[x + X_I2] * plans[p + D_SRC2]
        + dma[x + X_I3] * plans[p + D_SRC3]
    )
    unit = plans[p + D_SOURCE_UNIT]
    dma[x + X_UNIT] = base & -unit
    dma[x + X_END] = base + plans[p + D_N0]


@unit
def _source_next(dma, x, plans, p):
    dma[x + X_PREV] = dma[x + X_UNIT]
    dma[x + X_UNIT] += plans[p + D_SOURCE_UNIT]
    if dma[x + X_UNIT] < dma[x + X_END]:
        return
    dma[x + X_I1] += 1
    if dma[x + X_I1] == plans[p + D_N1]:
        dma[x + X_I1] = 0
        dma[x + X_I2] += 1
        if dma[x + X_I2] == plans[p + D_N2]:
            dma[x + X_I2] = 0
            dma[x + X_I3] += 1
            if dma[x + X_I3] == plans[p + D_N3]:
                dma[x + X_MORE] = 0
                return
    _source_run(dma, x, plans, p)


@unit
def _chunk(dma, x, plans, p):
    offset = dma[x + X_OFFSET]
    size = plans[p + D_N0] - offset
    unit = plans[p + D_SINK_UNIT]
    at = dma[x + X_SINK] + offset
    size = min(size, unit - (at & (unit - 1)))
    dma[x + X_KUNIT] = at & -unit
    if dma[x + X_FILL] == 0:
        unit = plans[p + D_SOURCE_UNIT]
        at = dma[x + X_SOURCE] + offset
        size = min(size, unit - (at & (unit - 1)))
        dma[x + X_SUNIT] = at & -unit
    dma[x + X_BYTES] = size


@unit
def _mover_run(dma, x, plans, p):
    i1 = dma[x + X_J1] - plans[p + D_PAD1]
    i2 = dma[x + X_J2] - plans[p + D_PAD2]
    dma[x + X_SINK] = (
        plans[p + D_DST]
        + dma[x + X_J1] * plans[p + D_DST1]
        + dma[x + X_J2] * plans[p + D_DST2]
        + dma[x + X_J3] * plans[p + D_DST3]
    )
    data = i1 >= 0 and i1 < plans[p + D_N1] and i2 >= 0 and i2 < plans[p + D_N2]
    dma[x + X_FILL] = 0 if data else 1
    if data:
        dma[x + X_SOURCE] = (
            plans[p + D_SRC]
            + i1 * plans[p + D_SRC1]
            + i2 * plans[p + D_SRC2]
            + dma[x + X_J3] * plans[p + D_SRC3]
        )
    _chunk(dma, x, plans, p)


@unit
def _mover_next(dma, x, plans, p):
    dma[x + X_OFFSET] += dma[x + X_BYTES]
    if dma[x + X_OFFSET] < plans[p + D_N0]:
        _chunk(dma, x, plans, p)
        return
    dma[x + X_OFFSET] = 0
    dma[x + X_J1] += 1
    if dma[x + X_J1] == plans[p + D_ALL1]:
        dma[x + X_J1] = 0
        dma[x + X_J2] += 1
        if dma[x + X_J2] == plans[p + D_ALL2]:
            dma[x + X_J2] = 0
            dma[x + X_J3] += 1
            if dma[x + X_J3] == plans[p + D_N3]:
                dma[x + X_MOVED] = 1
                return
    _mover_run(dma, x, plans, p)


@unit
def dma_start(dma, x, plans, p, bus):
    """Set up the instruction of plan `p`."""
    for column in range(ENGINE_COLUMNS):
        dma[x + column] = 0
    dma[x + X_PREV] = -1
    dma[x + X_HELD] = -1
    dma[x + X_BUDGET] = bus
    if plans[p + K] != FILL:
        dma[x + X_MORE] = 1
        _source_run(dma, x, plans, p)
    _mover_run(dma, x, plans, p)


@unit
def dma_request(dma, x, plans, p):
    """Set X_DDR and X_SRAM: the unit requested, or -1."""
    source = -1
    dma[x + X_SKIP] = 0
    if dma[x + X_MORE]:
        if dma[x + X_UNIT] == dma[x + X_PREV]:
            dma[x + X_SKIP] = 1
        elif dma[x + X_FIFO] + dma[x + X_ARRIVING] < 4:
            source = dma[x + X_UNIT]
    sink = dma[x + X_OUT_UNIT] if dma[x + X_OUT] else -1
    if plans[p + K] == STORE:
        dma[x + X_SRAM] = source
        dma[x + X_DDR] = sink
    else:
        dma[x + X_DDR] = source
        dma[x + X_SRAM] = sink


@unit
def dma_step(dma, x, plans, p, sram, ddr, ticks, bus):
    """Do a cycle with these grants; return whether anything moved, and whether it is the last."""
    if plans[p + K] == STORE:
        read, written = sram, ddr
    else:
        read, written = ddr, sram
    moves = read or written or dma[x + X_SKIP] or dma[x + X_ARRIVING]
    done = written and dma[x + X_MOVED] and not dma[x + X_FULL]
    free = written or not dma[x + X_OUT]
    if written:
        dma[x + X_OUT] = 0
    budget = dma[x + X_BUDGET]
    if dma[x + X_MOVED]:
        if dma[x + X_FULL] and free:
            dma[x + X_OUT] = 1
            dma[x + X_OUT_UNIT] = dma[x + X_COLLECTS]
            dma[x + X_FULL] = 0
            moves = True
    elif budget > 0 and (
        dma[x + X_FILL] or dma[x + X_HELD] == dma[x + X_SUNIT] or dma[x + X_FIFO] > 0
    ):
        other = dma[x + X_FULL] and dma[x + X_COLLECTS] != dma[x + X_KUNIT]
        if free or not other:
            if not dma[x + X_FILL] and dma[x + X_HELD] != dma[x + X_SUNIT]:
                dma[x + X_FIFO] -= 1
                dma[x + X_HELD] = dma[x + X_SUNIT]
            if other:
                dma[x + X_OUT] = 1
                dma[x + X_OUT_UNIT] = dma[x + X_COLLECTS]
            dma[x + X_FULL] = 1
            dma[x + X_COLLECTS] = dma[x + X_KUNIT]
            budget -= dma[x + X_BYTES]
            moves = True
            _mover_next(dma, x, plans, p)
    after = min(budget + ticks * bus, bus)
    if budget <= 0 and after > 0:
        moves = True  # what waited for it may move in the next cycle
    dma[x + X_BUDGET] = after
    dma[x + X_FIFO] += dma[x + X_ARRIVING]
    dma[x + X_ARRIVING] = 1 if read else 0
    if read or dma[x + X_SKIP]:
        _source_next(dma, x, plans, p)
    if ddr:
        dma[x + X_UNITS] += 1
    return moves, done
