# pyright: basic
"""The machine of docs/concepts/microarchitecture.md, a cycle at a time, compiled by numba.

All state lies in small int64 arrays, so that a run can stop after any cycle and go on. A cycle
reads the state of its beginning: requests first, then the arbiters, then fetch and dispatch, then
each engine's step with what it was granted; what the others may only see in the next cycle
(semaphores, queues, halves) is written last. Cycles in which only counters run are skipped.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from tilewright.sim.cycle_dma import dma_request, dma_start, dma_step
from tilewright.sim.cycle_mac import mac_begin, mac_following, mac_loads, mac_reads, mac_start
from tilewright.sim.cycle_state import (
    A_ALEFT,
    A_AWORD,
    A_BEGUN,
    A_CB,
    A_FIRST,
    A_HALF,
    A_KX,
    A_KY,
    A_NEXT,
    A_ROWS,
    A_WWORD,
    ACCUMULATOR,
    BANK,
    C_PUSH,
    D_BURST,
    D_LATENCY,
    DDR,
    DEADLOCK,
    ENGINE_COLUMNS,
    FINISHED,
    H_BANK_SHIFT,
    H_BANK_WORDS,
    H_BURST,
    H_BUS,
    H_CHANNELS,
    H_CODE,
    H_CORE,
    H_DDR,
    H_DEPTH,
    H_DMA,
    H_FETCH,
    H_G,
    H_MAC,
    H_VECTOR,
    H_WORD_SHIFT,
    HALT,
    NEVER,
    O_ACCUMULATOR,
    O_BANK,
    O_DDR,
    O_END,
    O_ISSUE,
    O_START,
    O_UNITS,
    OVERFLOW,
    PLAIN,
    PLAN_COLUMNS,
    Q_BUSY,
    Q_ENGINES,
    Q_FETCH,
    Q_QUEUE,
    READY,
    RUNNING,
    S_AVAILABLE,
    S_BUSY,
    S_CHANGED,
    S_DDR_ACC,
    S_DIGEST,
    S_DMA_ACC,
    S_ERROR,
    S_F,
    S_F_ARRIVING,
    S_F_BASE,
    S_F_BYTES,
    S_F_END,
    S_F_LEFT,
    S_F_N,
    S_F_START,
    S_F_UNITS,
    S_F_VALID,
    S_F_WAKE,
    S_H0,
    S_H0_AT,
    S_LAST,
    S_LOCK,
    S_NEXT,
    S_QUEUED,
    S_SEMAPHORE,
    S_SHIFT,
    S_T,
    SEMAPHORE_MAX,
    U_ALEFT,
    U_AWORD,
    U_BWORD,
    U_DRAINS,
    U_FROM,
    U_HALF,
    U_HOLD,
    U_ON,
    U_READ,
    U_WRITTEN,
    U_WWORD,
    WINDOWS,
    X_BUDGET,
    X_DDR,
    X_SRAM,
    X_UNITS,
    K,
    unit,
)
from tilewright.sim.cycle_vec import vec_holds, vec_request, vec_start, vec_step


@unit
def _arbitrate_banks(ports, words, last, shift, bank_words, banks):
    """Return the ports granted; `banks` is scratch."""
    seen = 0
    conflict = False
    for port in range(9):
        if ports >> port & 1:
            bank = words[port] >> shift if shift >= 0 else words[port] // bank_words
            banks[port] = bank
            bit = 1 << bank
            if seen & bit:
                conflict = True
            seen |= bit
    if not conflict:
        for port in range(9):
            if ports >> port & 1:
                last[banks[port]] = port
        return ports
    granted = 0
    for port in range(9):
        if not ports >> port & 1:
            continue
        bank = banks[port]
        before = last[bank]
        mine = port - before if port > before else port - before + 9
        wins = True
        for other in range(9):
            if other != port and ports >> other & 1 and banks[other] == bank:
                theirs = other - before if other > before else other - before + 9
                if theirs < mine:
                    wins = False
        if wins:
            granted |= 1 << port
    for port in range(9):
        if granted >> port & 1:
            last[banks[port]] = port
    return granted


@unit
def _arbitrate_ddr(requests, units, bursts, beats, s, g, burst):
    """Return the requesters granted in this cycle."""
    granted = 0
    for _ in range(min(beats, 5)):
        left = requests & ~granted
        if left == 0:
            break
        chosen = s[S_LOCK]
        if chosen < 0 or not left >> chosen & 1:
            chosen = s[S_LAST]
            for _ in range(5):
                chosen = chosen + 1 if chosen < 4 else 0
                if left >> chosen & 1:
                    break
        granted |= 1 << chosen
        s[S_LAST] = chosen
        s[S_LOCK] = -1
        if chosen < 4 and bursts[chosen] and (units[chosen] + g) % burst:
            s[S_LOCK] = chosen
    return granted


# The whole.


@unit
def _give(mask, semaphores, s, position):
    """Signal; return whether a semaphore overflows."""
    s[S_AVAILABLE] |= mask
    bit = 0
    while mask:
        if mask & 1:
            semaphores[bit] += 1
            if semaphores[bit] > SEMAPHORE_MAX:
                s[S_ERROR] = position
                s[S_SEMAPHORE] = bit
                return True
        mask >>= 1
        bit += 1
    return False


@unit
def _take(mask, semaphores, s):
    bit = 0
    while mask:
        if mask & 1:
            semaphores[bit] -= 1
            if semaphores[bit] <= 0:
                s[S_AVAILABLE] &= ~(1 << bit)
        mask >>= 1
        bit += 1


@unit
def _profile(profile, s, t, amount):
    """Add bytes to the window of cycle `t`."""
    while t >> s[S_SHIFT] >= WINDOWS:
        for window in range(WINDOWS // 2):
            profile[window] = profile[2 * window] + profile[2 * window + 1]
        profile[WINDOWS // 2 :] = 0
        s[S_SHIFT] += 1
    profile[t >> s[S_SHIFT]] += amount


@unit
def _ticks_until(acc, step, modulus, count):
    """Return in which cycle from the next on (1: the next) the enable has come `count` times."""
    return -((acc - count * modulus) // step)


@unit
def _lose(lost, waits, cycles):
    """Count `cycles` of every engine that waits."""
    for e in range(6):
        reason = waits >> 2 * e & 3
        if reason:
            lost[3 * e + reason - 1] += cycles


@unit
def _next_event(s, hw, state, wake, dma, plans, pid, current, vec, ready, requests):
    """Return the next cycle in which something can happen after one in which nothing did."""
    t = s[S_T]
    event = NEVER
    if s[S_F] == 1:
        event = min(event, s[S_F_WAKE])
    for channel in range(hw[H_CHANNELS]):
        if state[channel] == 1:
            event = min(event, wake[channel])
        elif state[channel] == 2:
            budget = dma[channel * ENGINE_COLUMNS + X_BUDGET]
            if budget <= 0:
                count = -budget // hw[H_BUS] + 1
                after = _ticks_until(s[S_DMA_ACC], hw[H_DMA], hw[H_CORE], count)
                event = min(event, t + 1 + after)
    if requests:
        event = min(event, t + _ticks_until(s[S_DDR_ACC], hw[H_DDR], hw[H_CORE], 1))
    if state[4] == 3:
        event = min(event, wake[4])
    for half in range(2):
        if s[S_H0 + half] and s[S_H0_AT + half] > t:
            event = min(event, s[S_H0_AT + half])
    if state[5]:
        if vec[U_WRITTEN] < vec[U_READ]:
            at = ready[vec[U_WRITTEN] & (READY - 1)]
            if at > t:
                event = min(event, at)
        if vec[U_ON] and vec[U_ALEFT] and t < vec[U_FROM] < NEVER:
            event = min(event, vec[U_FROM])
        if vec_holds(vec, plans, pid[current[5]] * PLAN_COLUMNS) and t < vec[U_HOLD]:
            event = min(event, vec[U_HOLD])
    return event


@intrinsic
def _pointer(_context, address):
    """Return the pointer to an address."""

    def generate(_context, builder, _signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@unit
def _view(addresses, lengths, number):
    """Return an array that owns nothing: counting references would take most of the time."""
    # numba passes an intrinsic its first parameter.
    pointer = _pointer(addresses[number])  # pyright: ignore[reportCallIssue]
    return carray(pointer, lengths[number], dtype=np.int64)


SOURCES = ("state", "dma", "mac", "vec", "kernel")
"""Files `cycle_*.py` the compiled code is made from."""


def _digest() -> int:
    """Return a number that changes with any file the kernel is compiled from."""
    folder = Path(__file__).parent
    text = b"".join((folder / f"cycle_{name}.py").read_bytes() for name in SOURCES)
    return int.from_bytes(hashlib.sha256(text).digest()[:7], "little")


def _compiled(digest: int):
    """Return the kernel; numba caches it by the values it closes over, and so by `digest`."""

    def simulate(addresses, lengths, until, skip):
        """Run to the end or to cycle `until`; return RUNNING, FINISHED, DEADLOCK or OVERFLOW."""
        s = _view(addresses, lengths, 0)
        hw = _view(addresses, lengths, 1)
        plans = _view(addresses, lengths, 2)
        pid = _view(addresses, lengths, 3)
        engine = _view(addresses, lengths, 4)
        wait = _view(addresses, lengths, 5)
        signal = _view(addresses, lengths, 6)
        index = _view(addresses, lengths, 7)
        table_at = _view(addresses, lengths, 8)
        tables = _view(addresses, lengths, 9)
        state = _view(addresses, lengths, 10)
        wake = _view(addresses, lengths, 11)
        current = _view(addresses, lengths, 12)
        dma = _view(addresses, lengths, 13)
        mac = _view(addresses, lengths, 14)
        vec = _view(addresses, lengths, 15)
        ready = _view(addresses, lengths, 16)
        ring = _view(addresses, lengths, 17)
        queue = _view(addresses, lengths, 18)
        semaphores = _view(addresses, lengths, 19)
        last_bank = _view(addresses, lengths, 20)
        lost = _view(addresses, lengths, 21)
        profile = _view(addresses, lengths, 22)
        sequencer = _view(addresses, lengths, 23)
        result = _view(addresses, lengths, 24)
        scratch = _view(addresses, lengths, 25)
        words = _view(addresses, lengths, 26)
        units = _view(addresses, lengths, 27)
        bursts = _view(addresses, lengths, 28)
        s[S_DIGEST] = digest
        w, g = hw[H_WORD_SHIFT], hw[H_G]
        core, ddr_clock, dma_clock, bus = hw[H_CORE], hw[H_DDR], hw[H_DMA], hw[H_BUS]
        channels, depth, code = hw[H_CHANNELS], hw[H_DEPTH], hw[H_CODE]
        shift, bank_words, burst = hw[H_BANK_SHIFT], hw[H_BANK_WORDS], hw[H_BURST]
        mac_latency, vector_latency = hw[H_MAC], hw[H_VECTOR]
        window = vector_latency + 3
        total = lengths[4]
        t = s[S_T]
        ddr_acc = s[S_DDR_ACC]
        dma_acc = s[S_DMA_ACC]
        while True:
            if t >= until:
                s[S_T] = t
                s[S_DDR_ACC] = ddr_acc
                s[S_DMA_ACC] = dma_acc
                return RUNNING
            ddr_acc += ddr_clock
            beats = 0
            while ddr_acc >= core:
                ddr_acc -= core
                beats += 1
            dma_acc += dma_clock
            ticks = 0
            while dma_acc >= core:
                dma_acc -= core
                ticks += 1
            moves = False

            # Requests.
            ports = 0
            requests = 0
            for channel in range(channels):
                if state[channel] == 1 and t >= wake[channel]:
                    state[channel] = 2
                if state[channel] == 2:
                    x = channel * ENGINE_COLUMNS
                    dma_request(dma, x, plans, pid[current[channel]] * PLAN_COLUMNS)
                    if dma[x + X_SRAM] >= 0:
                        ports |= 32 << channel
                        words[5 + channel] = dma[x + X_SRAM] >> w
                    if dma[x + X_DDR] >= 0:
                        requests |= 1 << channel
                        units[channel] = dma[x + X_DDR]
            if s[S_F] == 1 and t >= s[S_F_WAKE]:
                s[S_F] = 2
            if s[S_F] == 2:
                requests |= 16
            mac_stalls = False
            if state[4] == 1:
                ports |= 2
                words[1] = mac[A_WWORD]
            elif state[4] == 2:
                p = pid[current[4]] * PLAN_COLUMNS
                if mac[A_BEGUN] == 0:
                    first = mac[A_CB] == 0 and mac[A_KX] == 0 and mac[A_KY] == 0
                    if first and s[S_H0 + mac[A_HALF]]:
                        mac_stalls = True
                    else:
                        mac_begin(mac, plans, p, w)
                if not mac_stalls:
                    if mac[A_ALEFT]:
                        ports |= 1
                        words[0] = mac[A_AWORD]
                    if mac[A_NEXT] and mac[A_ROWS]:
                        ports |= 2
                        words[1] = mac[A_WWORD]
            vec_stalls = False
            if state[5]:
                i = current[5]
                half = vec[U_HALF]
                full = s[S_H0 + half] != 0 and t >= s[S_H0_AT + half]
                asked, vec_stalls = vec_request(
                    vec, plans, pid[i] * PLAN_COLUMNS, ready, tables, t, w, window, full
                )
                ports |= asked
                words[2] = vec[U_AWORD]
                words[3] = vec[U_BWORD]
                words[4] = vec[U_WWORD]

            # Grants.
            granted = 0
            if ports:
                granted = _arbitrate_banks(ports, words, last_bank, shift, bank_words, scratch)
                moves = True
            given = 0
            if requests and beats:
                given = _arbitrate_ddr(requests, units, bursts, beats, s, g, burst)
                moves = True
                amount = given
                while amount:
                    if amount & 1:
                        _profile(profile, s, t, g)
                    amount >>= 1

            # Fetch; what it decides and what arrives is seen from the next cycle on.
            valid_end = s[S_F_VALID]
            if s[S_F_ARRIVING] >= 0:
                s[S_F_VALID] = s[S_F_ARRIVING]
                s[S_F_ARRIVING] = -1
                moves = True
            decides = s[S_F] == 0
            if given & 16:
                s[S_F_BYTES] += g
                s[S_F_UNITS] += 1
                s[S_F_LEFT] -= 1
                s[S_F_ARRIVING] = s[S_F_START] + min(s[S_F_N], s[S_F_BYTES] // 64)
                if s[S_F_LEFT] == 0:
                    s[S_F] = 0

            # Dispatch.
            i = s[S_NEXT]
            at = index[i]
            pushed = -1
            given_back = 0
            taken = 0
            finished = False
            slot = Q_BUSY
            if at >= valid_end:
                slot = Q_FETCH
            elif engine[i] < 6:
                if queue[2 * engine[i] + 1] < depth:
                    pushed = engine[i]
                else:
                    slot = Q_QUEUE
            else:
                kind = plans[pid[i] * PLAN_COLUMNS + K]
                if wait[i] & ~s[S_AVAILABLE] or (kind != PLAIN and (s[S_BUSY] or s[S_QUEUED])):
                    slot = Q_ENGINES
                else:
                    taken = wait[i]
                    given_back = signal[i]
                    result[O_START * total + i] = t
                    result[O_END * total + i] = t + 1
                    finished = kind == HALT
                    if i + 1 < total and index[i + 1] != at + 1:
                        target = index[i + 1]
                        decides = False
                        if target < max(s[S_F_BASE], s[S_F_END] - 64):
                            s[S_F_BASE] = target
                            s[S_F_END] = target
                            s[S_F_VALID] = target
                            s[S_F_ARRIVING] = -1
                            s[S_F] = 0
            sequencer[slot] += 1
            if slot == Q_BUSY:
                result[O_ISSUE * total + i] = t
                s[S_NEXT] = i + 1
                moves = True

            # Not in the cycle of a jump back: the body jumped to could be overwritten.
            n = min(16, code - s[S_F_END])
            if decides and n > 0 and s[S_F_END] - at + n <= 64:
                s[S_F_START] = s[S_F_END]
                s[S_F_N] = n
                s[S_F_LEFT] = (64 * n + g - 1) // g
                s[S_F_BYTES] = 0
                s[S_F_END] += n
                s[S_F] = 1
                s[S_F_WAKE] = t + 1 + hw[H_FETCH]
                moves = True

            # Idle engines take their next instruction; the others work.
            busy = s[S_BUSY]
            overflow = False
            taken_by = 0
            if s[S_CHANGED]:
                s[S_CHANGED] = 0
                for e in range(6):
                    if state[e] == 0 and queue[2 * e + 1]:
                        head = queue[2 * e]
                        i = ring[e * depth + head]
                        if wait[i] & ~s[S_AVAILABLE] == 0:
                            queue[2 * e] = head + 1 if head + 1 < depth else 0
                            queue[2 * e + 1] -= 1
                            s[S_QUEUED] -= 1
                            current[e] = i
                            result[O_START * total + i] = t
                            taken_by |= 1 << e
                            moves = True
                for e in range(6):
                    if taken_by >> e & 1:
                        _take(wait[current[e]], semaphores, s)
            if taken:
                _take(taken, semaphores, s)
            ended = 0
            # Two bits an engine: one more than the reason its cycle is lost for.
            waits = 0
            if busy:
                for channel in range(channels):
                    if state[channel] == 2:
                        x = channel * ENGINE_COLUMNS
                        sram = granted >> (5 + channel) & 1
                        ddr = given >> channel & 1
                        if dma[x + X_SRAM] >= 0 and not sram:
                            waits |= BANK + 1 << 2 * channel
                        elif dma[x + X_DDR] >= 0 and not ddr:
                            waits |= DDR + 1 << 2 * channel
                        p = pid[current[channel]] * PLAN_COLUMNS
                        moved, done = dma_step(dma, x, plans, p, sram != 0, ddr != 0, ticks, bus)
                        if moved:
                            moves = True
                        if done:
                            ended |= 1 << channel
                if state[4]:
                    if ports & ~granted & 3:
                        waits |= BANK + 1 << 8
                    elif mac_stalls:
                        waits |= ACCUMULATOR + 1 << 8
                    p = pid[current[4]] * PLAN_COLUMNS
                    if granted & 1:
                        mac_reads(mac, plans, p, w)
                    if granted & 2:
                        mac_loads(mac, plans, p, w)
                    if state[4] == 1:
                        if mac[A_ROWS] == 0:
                            state[4] = 2
                            mac_following(mac, plans, p)
                    elif state[4] == 2:
                        if not mac_stalls and mac[A_ALEFT] == 0 and mac[A_ROWS] == 0:
                            if mac[A_FIRST]:
                                half = mac[A_HALF]
                                if plans[p + C_PUSH]:
                                    s[S_H0 + half] = 1
                                    s[S_H0_AT + half] = t + 1 + mac_latency
                                mac[A_HALF] = half ^ 1
                            if mac[A_NEXT]:
                                mac_following(mac, plans, p)
                            else:
                                state[4] = 3
                                wake[4] = t + mac_latency
                    elif t >= wake[4]:
                        ended |= 16
                if state[5]:
                    i = current[5]
                    moved, freed, done = vec_step(
                        vec,
                        plans,
                        pid[i] * PLAN_COLUMNS,
                        ready,
                        tables,
                        t,
                        w,
                        vector_latency,
                        granted,
                    )
                    if ports & ~granted & 28:
                        waits |= BANK + 1 << 10
                    elif vec_stalls and not moved:
                        waits |= ACCUMULATOR + 1 << 10
                    if moved or vec[U_DRAINS]:
                        moves = True
                    if freed:
                        s[S_H0 + vec[U_HALF]] = 0
                        vec[U_HALF] ^= 1
                    if done:
                        ended |= 32
                if waits:
                    _lose(lost, waits, 1)
                if ended:
                    moves = True
                    s[S_CHANGED] = 1
                    for e in range(6):
                        if ended >> e & 1:
                            i = current[e]
                            state[e] = 0
                            s[S_BUSY] -= 1
                            result[O_END * total + i] = t + 1
                            result[O_BANK * total + i] = lost[3 * e + BANK]
                            result[O_DDR * total + i] = lost[3 * e + DDR]
                            result[O_ACCUMULATOR * total + i] = lost[3 * e + ACCUMULATOR]
                            if e < 4:
                                result[O_UNITS * total + i] = dma[e * ENGINE_COLUMNS + X_UNITS]
                            if _give(signal[i], semaphores, s, i):
                                overflow = True
            if taken_by:
                for e in range(6):
                    if taken_by >> e & 1:
                        i = current[e]
                        p = pid[i] * PLAN_COLUMNS
                        lost[3 * e] = lost[3 * e + 1] = lost[3 * e + 2] = 0
                        s[S_BUSY] += 1
                        if e < 4:
                            state[e] = 1
                            wake[e] = t + 1 + plans[p + D_LATENCY]
                            bursts[e] = plans[p + D_BURST]
                            dma_start(dma, e * ENGINE_COLUMNS, plans, p, bus)
                        elif e == 4:
                            state[e] = 1
                            mac_start(mac, plans, p, w)
                        else:
                            state[e] = 2
                            vec_start(vec, plans, p, table_at[i])
            if pushed >= 0:
                i = s[S_NEXT] - 1
                tail = queue[2 * pushed] + queue[2 * pushed + 1]
                ring[pushed * depth + (tail if tail < depth else tail - depth)] = i
                queue[2 * pushed + 1] += 1
                s[S_QUEUED] += 1
                s[S_CHANGED] = 1
            if given_back:
                s[S_CHANGED] = 1
                if _give(given_back, semaphores, s, s[S_NEXT] - 1):
                    overflow = True
            if overflow:
                return OVERFLOW
            if finished:
                s[S_T] = t + 1
                return FINISHED
            if moves:
                t += 1
                continue
            s[S_T] = t
            s[S_DDR_ACC] = ddr_acc
            s[S_DMA_ACC] = dma_acc
            event = _next_event(s, hw, state, wake, dma, plans, pid, current, vec, ready, requests)
            if event == NEVER:
                return DEADLOCK
            if not skip:
                t += 1
                continue
            # The cycles from t + 1 to before the event are like this one.
            event = min(event, until)
            more = event - t - 1
            t = event
            if more <= 0:
                continue
            sequencer[slot] += more
            _lose(lost, waits, more)
            ddr_acc = (ddr_acc + more * ddr_clock) % core
            dma_acc += more * dma_clock
            come = dma_acc // core * bus
            dma_acc %= core
            for channel in range(channels):
                if state[channel] == 2:
                    budget = dma[channel * ENGINE_COLUMNS + X_BUDGET]
                    dma[channel * ENGINE_COLUMNS + X_BUDGET] = min(budget + come, bus)

    try:
        return njit(cache=True, error_model="numpy")(simulate)
    except RuntimeError:
        # Neither beside this file nor in the user's folder can anything be written.
        return njit(error_model="numpy")(simulate)


simulate = _compiled(_digest())
