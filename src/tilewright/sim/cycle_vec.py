# pyright: basic
"""The vector unit: reader and writer; part of the cycle simulator's kernel.

`u` is the unit's state, `p` where its instruction's plan begins in `plans`.
"""

from __future__ import annotations

from tilewright.sim.cycle_state import (
    DRAIN,
    NEVER,
    READY,
    RESIZE,
    ROWS,
    U_1,
    U_2,
    U_3,
    U_ALEFT,
    U_AWORD,
    U_BASE,
    U_BLEFT,
    U_BWORD,
    U_BYTES,
    U_CHUNK,
    U_DRAINS,
    U_EX,
    U_EY,
    U_FROM,
    U_HALF,
    U_HOLD,
    U_J,
    U_ON,
    U_READ,
    U_RETIRES,
    U_SECOND,
    U_TABLE,
    U_W1,
    U_W2,
    U_W3,
    U_WCHUNK,
    U_WLEFT,
    U_WRITTEN,
    U_WWORD,
    V_A,
    V_A1,
    V_A2,
    V_A3,
    V_ABYTES,
    V_ABYTES_LAST,
    V_AC,
    V_B,
    V_B1,
    V_B2,
    V_B3,
    V_BBYTES,
    V_BBYTES_LAST,
    V_BC,
    V_BLOCK_ROWS,
    V_CHUNKS,
    V_D,
    V_D1,
    V_D2,
    V_D3,
    V_DBYTES,
    V_DBYTES_LAST,
    V_DC,
    V_HALF,
    V_HAS_B,
    V_HAS_D,
    V_KH,
    V_KW,
    V_KX,
    V_KY,
    V_N1,
    V_N2,
    V_N3,
    V_SX,
    V_SY,
    V_TABLE_X,
    V_TABLE_Y,
    V_TOTAL,
    V_WAIT,
    K,
    unit,
)


@unit
def vec_start(u, plans, p, table):
    """Set up the instruction of plan `p`; its indices, if any, begin at `table`."""
    u[:] = 0
    u[U_TABLE] = table
    u[U_HALF] = plans[p + V_HALF]


@unit
def _vec_a(u, address, size, w):
    first = address >> w
    u[U_AWORD] = first
    u[U_ALEFT] = ((address + size - 1) >> w) - first + 1


@unit
def _vec_b(u, address, size, w):
    first = address >> w
    u[U_BWORD] = first
    u[U_BLEFT] = ((address + size - 1) >> w) - first + 1


@unit
def _vec_neighbour(u, plans, p, tables, w):
    row = tables[u[U_TABLE] + 2 * u[U_2] + u[U_EY]]
    column = tables[u[U_TABLE] + 2 * plans[p + V_N2] + 2 * u[U_1] + u[U_EX]]
    _vec_a(u, u[U_BASE] + row * plans[p + V_SY] + column * plans[p + V_SX], u[U_BYTES], w)


@unit
def _vec_uses(plans, p, number):
    """Return whether vectors of pass `number` have a second operand and a result, if any have."""
    return plans[p + K] != ROWS or number == plans[p + V_N1] - 1


@unit
def vec_holds(u, plans, p):
    """Return whether the reader stands before a pass over a row that needs what those before it
    gave: it begins when all vectors read were written, and not before `U_HOLD`.
    """  # noqa: D205
    return plans[p + K] == ROWS and u[U_ON] == 0 and u[U_CHUNK] == 0 and u[U_1] > 0


@unit
def _vec_begin(u, plans, p, tables, w):
    """First cycle of a vector of the reader."""
    chunk = u[U_CHUNK]
    last = chunk == plans[p + V_CHUNKS] - 1
    u[U_ON] = 1
    u[U_EY] = 0
    u[U_EX] = 0
    u[U_FROM] = 0
    u[U_BASE] = (
        plans[p + V_A]
        + u[U_3] * plans[p + V_A3]
        + u[U_2] * plans[p + V_A2]
        + u[U_1] * plans[p + V_A1]
        + chunk * plans[p + V_AC]
    )
    u[U_BYTES] = plans[p + V_ABYTES_LAST] if last else plans[p + V_ABYTES]
    if plans[p + K] == RESIZE:
        _vec_neighbour(u, plans, p, tables, w)
        if chunk == 0:
            u[U_FROM] = NEVER
            u[U_SECOND] = 1 if u[U_1] == 0 else 0
            if u[U_1] == 0:
                _vec_b(u, plans[p + V_TABLE_Y] + 8 * u[U_2], 8, w)
            else:
                _vec_b(u, plans[p + V_TABLE_X] + 8 * u[U_1], 8, w)
        return
    _vec_a(u, u[U_BASE], u[U_BYTES], w)
    if plans[p + V_HAS_B] and _vec_uses(plans, p, u[U_1]):
        base = (
            plans[p + V_B]
            + u[U_3] * plans[p + V_B3]
            + u[U_2] * plans[p + V_B2]
            + u[U_1] * plans[p + V_B1]
            + chunk * plans[p + V_BC]
        )
        _vec_b(u, base, plans[p + V_BBYTES_LAST] if last else plans[p + V_BBYTES], w)


@unit
def _vec_result(u, plans, p, w):
    """Point the writer to the oldest vector's result."""
    chunk = u[U_WCHUNK]
    if plans[p + K] == DRAIN:
        last = u[U_W3] == plans[p + V_N3] - 1
    else:
        last = chunk == plans[p + V_CHUNKS] - 1
    address = (
        plans[p + V_D]
        + u[U_W3] * plans[p + V_D3]
        + u[U_W2] * plans[p + V_D2]
        + u[U_W1] * plans[p + V_D1]
        + chunk * plans[p + V_DC]
    )
    size = plans[p + V_DBYTES_LAST] if last else plans[p + V_DBYTES]
    first = address >> w
    u[U_WWORD] = first
    u[U_WLEFT] = ((address + size - 1) >> w) - first + 1


@unit
def vec_request(u, plans, p, ready, tables, t, w, window, full):
    """Begin what may begin; return the ports that request (bits 2 to 4), and whether a drain's
    reader stands before a half that is not full.
    """  # noqa: D205
    ports = 0
    stalls = False
    u[U_DRAINS] = 0
    u[U_RETIRES] = 0
    if u[U_ON] == 0 and u[U_J] < plans[p + V_TOTAL] and u[U_J] - u[U_WRITTEN] < window:
        if plans[p + K] == DRAIN:
            if full:
                u[U_DRAINS] = 1
            else:
                stalls = True
        elif not vec_holds(u, plans, p) or (u[U_WRITTEN] == u[U_J] and t >= u[U_HOLD]):
            _vec_begin(u, plans, p, tables, w)
    if u[U_ON]:
        if u[U_ALEFT] and t >= u[U_FROM]:
            ports |= 4
        if u[U_BLEFT]:
            ports |= 8
    if u[U_WRITTEN] < u[U_READ] and t >= ready[u[U_WRITTEN] & (READY - 1)]:
        if plans[p + V_HAS_D] and _vec_uses(plans, p, u[U_W1]):
            if u[U_WLEFT] == 0:
                _vec_result(u, plans, p, w)
            ports |= 16
        else:
            u[U_RETIRES] = 1
    return ports, stalls


@unit
def _vec_read(u, plans, p, ready, t, latency):
    """The reader's vector is complete; return whether it was a drain's last one of a block."""
    ready[u[U_READ] & (READY - 1)] = t + 1 + latency
    u[U_READ] += 1
    u[U_J] += 1
    u[U_ON] = 0
    u[U_CHUNK] += 1
    if u[U_CHUNK] < plans[p + V_CHUNKS]:
        return False
    u[U_CHUNK] = 0
    u[U_1] += 1
    if u[U_1] < plans[p + V_N1]:
        return False
    u[U_1] = 0
    u[U_2] += 1
    if u[U_2] < plans[p + V_N2]:
        return plans[p + K] == DRAIN and u[U_2] % plans[p + V_BLOCK_ROWS] == 0
    u[U_2] = 0
    u[U_3] += 1
    return plans[p + K] == DRAIN


@unit
def _vec_retire(u, plans, p):
    u[U_WRITTEN] += 1
    u[U_WCHUNK] += 1
    if u[U_WCHUNK] < plans[p + V_CHUNKS]:
        return
    u[U_WCHUNK] = 0
    u[U_W1] += 1
    if u[U_W1] < plans[p + V_N1]:
        return
    u[U_W1] = 0
    u[U_W2] += 1
    if u[U_W2] < plans[p + V_N2]:
        return
    u[U_W2] = 0
    u[U_W3] += 1


@unit
def vec_step(u, plans, p, ready, tables, t, w, latency, granted):
    """Do a cycle with these grants (bits as the ports').

    Returns whether the writer moved, whether a half is empty now, and whether it is the last.
    """
    read = u[U_DRAINS] != 0
    freed = False
    if u[U_ON]:
        if granted & 4:
            u[U_AWORD] += 1
            u[U_ALEFT] -= 1
            if u[U_ALEFT] == 0:
                u[U_EX] += 1
                if u[U_EX] == plans[p + V_KW]:
                    u[U_EX] = 0
                    u[U_EY] += 1
                if u[U_EY] < plans[p + V_KH]:
                    if plans[p + K] == RESIZE:
                        _vec_neighbour(u, plans, p, tables, w)
                    else:
                        base = u[U_BASE] + u[U_EY] * plans[p + V_KY] + u[U_EX] * plans[p + V_KX]
                        _vec_a(u, base, u[U_BYTES], w)
        if granted & 8:
            u[U_BWORD] += 1
            u[U_BLEFT] -= 1
            if u[U_BLEFT] == 0 and plans[p + K] == RESIZE:
                if u[U_SECOND]:
                    u[U_SECOND] = 0
                    _vec_b(u, plans[p + V_TABLE_X] + 8 * u[U_1], 8, w)
                else:
                    u[U_FROM] = t + 2
        read = u[U_ALEFT] == 0 and u[U_BLEFT] == 0
    wrote = u[U_RETIRES] != 0
    moved = wrote
    if granted & 16:
        moved = True
        u[U_WWORD] += 1
        u[U_WLEFT] -= 1
        wrote = u[U_WLEFT] == 0
    if read:
        freed = _vec_read(u, plans, p, ready, t, latency)
    if wrote:
        # Counts only where the reader waits for this vector: then its next pass is known.
        last = u[U_1] == plans[p + V_N1] - 1
        u[U_HOLD] = t + 1 + (plans[p + V_WAIT] if last else 0)
        _vec_retire(u, plans, p)
    return moved, freed, u[U_WRITTEN] == plans[p + V_TOTAL]
