# pyright: basic
"""Where the kernel of the cycle simulator keeps what: columns of its integer arrays."""

from __future__ import annotations

from numba import njit

unit = njit(error_model="numpy", forceinline=True)
"""Compiles a part of the kernel; only the whole is cached (`cycle_kernel.py`)."""

# Kinds of instructions (column K of a plan).
PLAIN, FENCE, HALT, LOAD, STORE, FILL, CONV, DRAIN, VECTOR, RESIZE, ROWS = range(11)
K = 0

# Plan of a DMA instruction: source and sink are the DDR and SRAM side in the order of transfer.
(
    _, D_LATENCY, D_BURST, D_N0, D_N1, D_N2, D_N3, D_SRC, D_SRC1, D_SRC2, D_SRC3, D_DST, D_DST1,
    D_DST2, D_DST3, D_PAD1, D_ALL1, D_PAD2, D_ALL2, D_SOURCE_UNIT, D_SINK_UNIT,
) = range(21)  # fmt: skip

# Plan of a mac_conv.
(
    _, C_ACT, C_WGT, C_H, C_W, C_ROWS_BLOCK, C_OY, C_OX, C_KH, C_KW, C_KY, C_KX, C_CBS, C_CB, C_OBS,
    C_OB, C_PITCH, C_WOB, C_DIAG, C_PUSH, C_HALF, C_ROWS, C_ROWS_LAST, C_VEC, C_VEC_LAST, C_ROW,
    C_ROW_LAST, C_COLS, C_COLS_LAST,
) = range(29)  # fmt: skip

# Plan of a vector instruction: loops 3, 2, 1, chunk; a window; operands a, b and the result.
# Of rows: loop 1 goes over the passes; the last one alone has b and a result.
(
    _, V_N3, V_N2, V_N1, V_CHUNKS, V_KH, V_KW, V_KY, V_KX, V_TOTAL,
    V_A, V_A3, V_A2, V_A1, V_AC, V_ABYTES, V_ABYTES_LAST,
    V_HAS_B, V_B, V_B3, V_B2, V_B1, V_BC, V_BBYTES, V_BBYTES_LAST,
    V_HAS_D, V_D, V_D3, V_D2, V_D1, V_DC, V_DBYTES, V_DBYTES_LAST,
    V_BLOCK_ROWS, V_HALF, V_TABLE_Y, V_TABLE_X, V_SY, V_SX, V_WAIT,
) = range(40)  # fmt: skip
PLAN_COLUMNS = 40

# Sizes of the target.
(
    H_WORD_SHIFT, H_G, H_CORE, H_DDR, H_DMA, H_BUS, H_BURST, H_BANK_SHIFT, H_BANK_WORDS, H_MAC,
    H_VECTOR, H_DEPTH, H_CHANNELS, H_FETCH, H_CODE,
) = range(15)  # fmt: skip

# Scalars of the state.
(
    S_T, S_DDR_ACC, S_DMA_ACC, S_NEXT, S_LAST, S_LOCK, S_BUSY, S_QUEUED, S_F, S_F_WAKE, S_F_END,
    S_F_BASE, S_F_VALID, S_F_START, S_F_N, S_F_LEFT, S_F_BYTES, S_F_ARRIVING, S_F_UNITS, S_SHIFT,
    S_ERROR, S_SEMAPHORE, S_H0, S_H1, S_H0_AT, S_H1_AT, S_DIGEST, S_AVAILABLE,
    S_CHANGED,
) = range(29)  # fmt: skip
SCALARS = 29
SEMAPHORE_MAX = 65535
RUNNING, FINISHED, DEADLOCK, OVERFLOW = range(4)
NEVER = 1 << 62

# State of a DMA channel.
(
    X_MORE, X_UNIT, X_END, X_PREV, X_I1, X_I2, X_I3, X_FIFO, X_ARRIVING, X_HELD, X_OFFSET, X_J1,
    X_J2, X_J3, X_SOURCE, X_SINK, X_FILL, X_BYTES, X_SUNIT, X_KUNIT, X_MOVED, X_FULL, X_COLLECTS,
    X_OUT, X_OUT_UNIT, X_BUDGET, X_SKIP, X_UNITS, X_DDR, X_SRAM,
) = range(30)  # fmt: skip

# State of the MAC array: the step running, the step whose weights are loaded, both readers.
(
    A_OB, A_PB, A_KY, A_KX, A_CB, A_NOB, A_NPB, A_NKY, A_NKX, A_NCB, A_NEXT, A_HALF, A_BEGUN,
    A_WCURSOR, A_ROW, A_ROWS, A_ROW_BYTES, A_WWORD, A_WLEFT, A_PIXEL, A_LINE, A_X, A_Y, A_YS,
    A_VEC, A_AWORD, A_ALEFT, A_FIRST,
) = range(28)  # fmt: skip

# State of the vector unit: reader and writer.
(
    U_J, U_ON, U_1, U_2, U_3, U_CHUNK, U_AWORD, U_ALEFT, U_EY, U_EX, U_BASE, U_BYTES, U_BWORD,
    U_BLEFT, U_SECOND, U_FROM, U_WRITTEN, U_READ, U_W1, U_W2, U_W3, U_WCHUNK, U_WWORD, U_WLEFT,
    U_HALF, U_DRAINS, U_RETIRES, U_TABLE, U_HOLD,
) = range(29)  # fmt: skip
ENGINE_COLUMNS = 32
READY = 1024
"""Entries of the ring of vectors read and not written: above the largest latency plus 3."""
WINDOWS = 8192
"""Windows of the DDR profile; their length doubles when the run outgrows them."""

# Rows of the result, one column an instruction.
O_ISSUE, O_START, O_END, O_BANK, O_DDR, O_ACCUMULATOR, O_UNITS = range(7)
RESULT_ROWS = 7
# Why an engine's cycle was lost; also columns of `lost`.
BANK, DDR, ACCUMULATOR = range(3)
# Cycles of the sequencer.
Q_BUSY, Q_QUEUE, Q_FETCH, Q_ENGINES = range(4)
