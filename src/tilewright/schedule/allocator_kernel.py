# pyright: basic
"""The inner loops of the placement solver, compiled by numba; `allocator.py` explains them.

The search decides on one buffer at a time, one that no unplaced neighbour can lie below (a
neighbour is a buffer that excludes some offsets of the other: alive at once, or kept in another
bank). The buffer is put on the lowest offset its placed neighbours leave, or it is not, and then
some unplaced neighbour must come below it. So every solution whose buffers are all as low as they
go is met once, and no other.

State of an unplaced buffer: `act`, where the placed neighbours would let it lie, and `low`, the
lowest offset it can still get. Both only grow on the way down. `act < low`: it waits for a
neighbour to be placed below it. What is left of a part of the problem depends on these alone, which
makes failed states worth remembering, whichever way they were reached.

A section is a maximal set of buffers alive at once. It fails when the lowest `low` of its unplaced
buffers and their sizes exceed the capacity.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import carray


class Static(NamedTuple):
    """The problem; all arrays are int64, `*_at` index the array of the same name (CSR)."""

    size: np.ndarray
    room: np.ndarray  # size rounded up to what all offsets are multiples of
    align: np.ndarray
    range_at: np.ndarray
    range_low: np.ndarray  # legal offsets: aligned lowest, last, ascending
    range_high: np.ndarray
    near_at: np.ndarray
    near: np.ndarray  # neighbours
    grain: np.ndarray  # 1, or the bank size where the two must not share a bank
    linked: np.ndarray  # 1: has gaps or neighbours in other sections
    span_at: np.ndarray
    span: np.ndarray  # sections of a buffer
    member_at: np.ndarray
    member: np.ndarray  # buffers of a section
    fixed_at: np.ndarray
    fixed_low: np.ndarray  # what fixed buffers take of a section
    fixed_high: np.ndarray


class State(NamedTuple):
    """A search under way; it can be left and taken up again."""

    control: np.ndarray
    placed: np.ndarray
    act: np.ndarray
    low: np.ndarray
    part: np.ndarray
    total: np.ndarray  # of a section: sizes of unplaced buffers
    across: np.ndarray  # unplaced buffers in both a section and the one before
    floor: np.ndarray  # of a section: lowest `low` of unplaced buffers
    rank: np.ndarray  # which buffer to prefer, lowest first
    part_count: np.ndarray  # unplaced buffers
    part_last: np.ndarray  # the last decision made on it
    frame_buffer: np.ndarray
    frame_phase: np.ndarray
    frame_trail: np.ndarray
    frame_parts: np.ndarray
    frame_jump: np.ndarray
    frame_key: np.ndarray
    trail_kind: np.ndarray
    trail_index: np.ndarray
    trail_value: np.ndarray
    queue: np.ndarray
    queued: np.ndarray
    before: np.ndarray  # `low` when it was put into the queue
    mark: np.ndarray
    memo: np.ndarray  # pairs of keys of failed states


CONTROL = 16
(C_DEPTH, C_TRAIL, C_PARTS, C_STATUS, C_STEPS, C_CAPACITY, C_LEFT, C_HEAD, C_TAIL, C_MODE, C_STAMP,
 C_HITS, C_ROOM) = range(13)  # fmt: skip
RUNNING, SOLVED, INFEASIBLE, EXHAUSTED = range(4)
PLACED, ACT, LOW, PART, FLOOR, COUNT, LAST = range(7)
NONE = np.int64(1 << 62)
BY_OFFSET, BY_SECTION = range(2)


def compiled(function):
    """Compile a function, keeping the result for later runs where that is possible."""
    try:
        return njit(cache=True, error_model="numpy")(function)
    except RuntimeError:
        # Neither beside this file nor in the user's folder can anything be written.
        return njit(error_model="numpy")(function)


_unit = njit(error_model="numpy", forceinline=True)


@_unit
def _up(value, grain):
    return (value + grain - 1) // grain * grain


@_unit
def legal(p, b, lowest):
    """Return the first legal offset of `b` from `lowest` on, or NONE."""
    for i in range(p.range_at[b], p.range_at[b + 1]):
        if lowest <= p.range_high[i]:
            found = _up(max(lowest, p.range_low[i]), p.align[b])
            if found <= p.range_high[i]:
                return found
    return NONE


@compiled
def find_neighbours(span_at, span, member_at, member, near_at, near):
    """Count (`near` empty) or list the buffers that share a section with each."""
    count = len(span_at) - 1
    mark = np.full(count, -1, np.int64)
    found = 0
    for b in range(count):
        mark[b] = b
        for i in range(span_at[b], span_at[b + 1]):
            section = span[i]
            for j in range(member_at[section], member_at[section + 1]):
                c = member[j]
                if mark[c] != b:
                    mark[c] = b
                    if len(near):
                        near[found] = c
                    found += 1
        near_at[b + 1] = found
    return found


@compiled
def components(near_at, near):
    """Label the buffers by connected set; labels ascend with the lowest index in the set."""
    count = len(near_at) - 1
    label = np.full(count, -1, np.int64)
    stack = np.empty(count, np.int64)
    found = 0
    for first in range(count):
        if label[first] >= 0:
            continue
        label[first] = found
        stack[0] = first
        height = 1
        while height:
            height -= 1
            x = stack[height]
            for j in range(near_at[x], near_at[x + 1]):
                c = near[j]
                if label[c] < 0:
                    label[c] = found
                    stack[height] = c
                    height += 1
        found += 1
    return label


# --- arrays that own nothing --------------------------------------------------------------------


@intrinsic
def _pointer(_context, address):
    """Return the pointer to an address."""

    def generate(_context, builder, _signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@_unit
def _view(where, number):
    """Return an array that owns nothing: counting references would take most of the time."""
    # numba passes an intrinsic its first parameter.
    pointer = _pointer(where[2 * number])  # pyright: ignore[reportCallIssue]
    return carray(pointer, where[2 * number + 1], dtype=np.int64)


def addresses(arrays):
    """Return where the arrays of a `Static` or `State` lie; they must outlive the result's use."""
    found = np.zeros(2 * len(arrays), np.int64)
    for i, array in enumerate(arrays):
        assert array.dtype == np.int64, "the kernel knows only their addresses"
        assert array.flags.c_contiguous
        found[2 * i], found[2 * i + 1] = array.ctypes.data, array.size
    return found


@_unit
def static_of(where):
    """Return the `Static` at these addresses."""
    return Static(
        _view(where, 0), _view(where, 1), _view(where, 2), _view(where, 3),
        _view(where, 4), _view(where, 5), _view(where, 6), _view(where, 7),
        _view(where, 8), _view(where, 9), _view(where, 10), _view(where, 11),
        _view(where, 12), _view(where, 13), _view(where, 14), _view(where, 15),
        _view(where, 16),
    )  # fmt: skip


@_unit
def state_of(where):
    """Return the `State` at these addresses."""
    return State(
        _view(where, 0), _view(where, 1), _view(where, 2), _view(where, 3),
        _view(where, 4), _view(where, 5), _view(where, 6), _view(where, 7),
        _view(where, 8), _view(where, 9), _view(where, 10), _view(where, 11),
        _view(where, 12), _view(where, 13), _view(where, 14), _view(where, 15),
        _view(where, 16), _view(where, 17), _view(where, 18), _view(where, 19),
        _view(where, 20), _view(where, 21), _view(where, 22), _view(where, 23),
        _view(where, 24),
    )  # fmt: skip


# --- greedy -----------------------------------------------------------------------------------


@compiled
def greedy(p, order, best_fit, offsets, lows, highs):
    """Place in this order, lowest gap or best gap; return how many did not fit (offset -1)."""
    offsets[:] = -1
    missing = 0
    for b in order:
        count = 0
        for i in range(p.near_at[b], p.near_at[b + 1]):
            c = p.near[i]
            if offsets[c] >= 0:
                grain = p.grain[i]
                low = offsets[c] // grain * grain
                high = _up(offsets[c] + p.size[c], grain)
                j = count
                while j > 0 and lows[j - 1] > low:
                    lows[j], highs[j] = lows[j - 1], highs[j - 1]
                    j -= 1
                lows[j], highs[j] = low, high
                count += 1
        start = np.int64(0)
        waste = NONE
        for j in range(count + 1):
            end = lows[j] if j < count else NONE
            if end - start >= p.size[b]:
                found = legal(p, b, start)
                if found != NONE and found + p.size[b] <= end:
                    left = end - start - p.size[b]
                    if left < waste or offsets[b] < 0:
                        waste, offsets[b] = left, found
                    if not best_fit:
                        break
            if j < count:
                start = max(start, highs[j])
        if offsets[b] < 0:
            missing += 1
    return missing


@compiled
def repair(p, order, best_fit, rounds, offsets, lows, highs):
    """Place greedily up to `rounds` times, each time moving forward what did not fit.

    Returns how often all buffers were gone through; `offsets` are those of the last time.
    """
    for done in range(rounds):
        if greedy(p, order, best_fit, offsets, lows, highs) == 0:
            return done + 1
        # What did not fit moves before the later half of what was placed ahead of it.
        ahead = 0
        for i in range(len(order)):
            b = order[i]
            if offsets[b] < 0:
                target = max(ahead, i // 2)
                for j in range(i, target, -1):
                    order[j] = order[j - 1]
                order[target] = b
                ahead = target + 1
    return rounds


# --- search -----------------------------------------------------------------------------------


@_unit
def _save(s, kind, index, value):
    at = s.control[C_TRAIL]
    if at >= len(s.trail_kind):
        s.control[C_STATUS] = EXHAUSTED
        return
    s.trail_kind[at] = kind
    s.trail_index[at] = index
    s.trail_value[at] = value
    s.control[C_TRAIL] = at + 1


@_unit
def _weigh(p, s, b, sign):
    """Add a buffer to its sections or take it away."""
    last = -2
    for i in range(p.span_at[b], p.span_at[b + 1]):
        section = p.span[i]
        s.total[section] += sign * p.room[b]
        if last == section - 1:
            s.across[section] += sign
        last = section


@compiled
def undo(p, s, mark):
    """Take back what was done since the trail was `mark` long."""
    for at in range(s.control[C_TRAIL] - 1, mark - 1, -1):
        kind, index, value = s.trail_kind[at], s.trail_index[at], s.trail_value[at]
        if kind == LOW:
            s.low[index] = value
        elif kind == ACT:
            s.act[index] = value
        elif kind == FLOOR:
            s.floor[index] = value
        elif kind == PART:
            s.part[index] = value
        elif kind == PLACED:
            s.placed[index] = 0
            s.control[C_LEFT] += 1
            _weigh(p, s, index, 1)
        elif kind == COUNT:
            s.part_count[index] = value
        else:
            s.part_last[index] = value
    s.control[C_TRAIL] = mark


@_unit
def _raise(s, b, low):
    """Raise `low` of a buffer and remember to look at what follows from it."""
    if low <= s.low[b]:
        return
    _save(s, LOW, b, s.low[b])
    if not s.queued[b]:
        s.queued[b] = 1
        s.before[b] = s.low[b]
        s.queue[s.control[C_TAIL] % len(s.queue)] = b
        s.control[C_TAIL] += 1
    s.low[b] = low


@_unit
def _fits(p, s, section):
    """Renew the floor of a section; False when its unplaced buffers cannot fit."""
    total = s.total[section]
    if total == 0:
        return True
    floor = NONE
    for i in range(p.member_at[section], p.member_at[section + 1]):
        b = p.member[i]
        if not s.placed[b] and s.low[b] < floor:
            floor = s.low[b]
    if floor > s.floor[section]:
        _save(s, FLOOR, section, s.floor[section])
        s.floor[section] = floor
    for i in range(p.fixed_at[section], p.fixed_at[section + 1]):
        if p.fixed_high[i] > floor:
            total += p.fixed_high[i] - max(floor, p.fixed_low[i])
    return floor + total <= s.control[C_ROOM]


@_unit
def _support(p, s, b):
    """Raise `low` of a waiting buffer to what a neighbour below it leaves; False if none can be."""
    lowest = NONE
    reached = False
    top = s.act[b] + p.size[b]
    for i in range(p.near_at[b], p.near_at[b + 1]):
        c = p.near[i]
        if not s.placed[c]:
            grain = p.grain[i]
            lowest = min(lowest, _up(s.low[c] + p.size[c], grain))
            # Were all neighbours to come above it, the buffer could drop to `act`.
            reached = reached or s.low[c] < _up(top, grain)
    if not reached:
        return False
    lowest = legal(p, b, lowest)
    if lowest == NONE:
        return False
    _raise(s, b, lowest)
    return True


@compiled
def _propagate(p, s):
    """Draw the conclusions of all raised buffers; False when one is that nothing fits."""
    good = True
    control = s.control
    while control[C_HEAD] < control[C_TAIL]:
        b = s.queue[control[C_HEAD] % len(s.queue)]
        control[C_HEAD] += 1
        s.queued[b] = 0
        if not good or s.placed[b]:
            continue
        before = s.before[b]
        for i in range(p.span_at[b], p.span_at[b + 1]):
            if s.floor[p.span[i]] >= before and not _fits(p, s, p.span[i]):
                good = False
                break
        if not good:
            continue
        for i in range(p.near_at[b], p.near_at[b + 1]):
            c = p.near[i]
            if s.placed[c] or s.act[c] >= s.low[c]:
                continue
            # Nothing changes for `c` unless `b` was what lets it lie so low, or came under its top.
            grain = p.grain[i]
            top = _up(s.act[c] + p.size[c], grain)
            held = _up(before + p.size[b], grain) <= s.low[c]
            if (held or before < top <= s.low[b]) and not _support(p, s, c):
                good = False
                break
    return good


@compiled
def place(p, s, b):
    """Place `b` on its lowest offset; False when the rest cannot fit then."""
    control = s.control
    _save(s, PLACED, b, 0)
    s.placed[b] = 1
    control[C_LEFT] -= 1
    part = s.part[b]
    _save(s, COUNT, part, s.part_count[part])
    s.part_count[part] -= 1
    top = s.low[b] + p.size[b]
    _weigh(p, s, b, -1)
    for i in range(p.near_at[b], p.near_at[b + 1]):
        c = p.near[i]
        if s.placed[c]:
            continue
        at = legal(p, c, _up(top, p.grain[i]))
        if at == NONE:
            return False
        if at > s.act[c]:
            _save(s, ACT, c, s.act[c])
            s.act[c] = at
            _raise(s, c, at)
    for i in range(p.near_at[b], p.near_at[b + 1]):
        c = p.near[i]
        if not s.placed[c] and s.act[c] < s.low[c] and not _support(p, s, c):
            return False
    for i in range(p.span_at[b], p.span_at[b + 1]):
        if not _fits(p, s, p.span[i]):
            return False
    return _propagate(p, s)


@compiled
def skip(p, s, b):
    """Demand that a neighbour comes below `b`; False when that cannot be."""
    if not _support(p, s, b):
        return False
    return _propagate(p, s)


@compiled
def clear_queue(s):
    """Drop what a failure left to be looked at."""
    control = s.control
    while control[C_HEAD] < control[C_TAIL]:
        s.queued[s.queue[control[C_HEAD] % len(s.queue)]] = 0
        control[C_HEAD] += 1


@compiled
def _split(p, s, b, depth):
    """Find the parts into which placing `b` cuts its part; each has a label of its own."""
    control = s.control
    part = s.part[b]
    left = s.part_count[part]
    if left == 0:
        return
    control[C_STAMP] += 1
    stamp = control[C_STAMP]
    whole = p.linked[b] == 0
    for i in range(p.span_at[b] + 1, p.span_at[b + 1]):
        whole = whole and s.across[p.span[i]] > 0
    if whole:
        return
    started = False
    stack = s.queue  # empty between decisions
    for i in range(p.near_at[b], p.near_at[b + 1]):
        start = p.near[i]
        if s.placed[start] or s.mark[start] == stamp:
            continue
        s.mark[start] = stamp
        stack[0] = start
        height = 1
        reached = 1
        while height:
            height -= 1
            x = stack[height]
            for j in range(p.near_at[x], p.near_at[x + 1]):
                c = p.near[j]
                if not s.placed[c] and s.mark[c] != stamp:
                    s.mark[c] = stamp
                    stack[height] = c
                    height += 1
                    reached += 1
        if reached == left and not started:
            return
        started = True
        # Every part but the last found gets a new label.
        left -= reached
        if left == 0:
            return
        label = control[C_PARTS]
        control[C_PARTS] += 1
        s.part_count[label] = reached
        s.part_last[label] = depth
        _relabel(p, s, start, label)
        _save(s, COUNT, part, s.part_count[part])
        s.part_count[part] = left


@compiled
def _relabel(p, s, start, label):
    old = s.part[start]
    stack = s.queue
    _save(s, PART, start, old)
    s.part[start] = label
    stack[0] = start
    height = 1
    while height:
        height -= 1
        x = stack[height]
        for j in range(p.near_at[x], p.near_at[x + 1]):
            c = p.near[j]
            if not s.placed[c] and s.part[c] != label:
                _save(s, PART, c, old)
                s.part[c] = label
                stack[height] = c
                height += 1


@_unit
def _mix(value):
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@compiled
def keys(s, part):
    """Return two hashes of the state of a part."""
    one = np.uint64(0)
    two = np.uint64(0)
    for b in range(len(s.placed)):
        if not s.placed[b] and s.part[b] == part:
            key = _mix(np.uint64(b + 1) * np.uint64(0x9E3779B97F4A7C15))
            key = _mix(key ^ np.uint64(s.act[b]))
            key = _mix(key + np.uint64(s.low[b]) * np.uint64(0xD1342543DE82EF95))
            one += key
            two += _mix(key ^ np.uint64(0xA0761D6478BD642F))
    return np.int64(one | np.uint64(1)), np.int64(two)


PROBES = 4


@compiled
def _known(s, one, two):
    size = len(s.memo) // 2
    for i in range(PROBES):
        at = (one + i) % size * 2
        if s.memo[at] == one and s.memo[at + 1] == two:
            return True
    return False


@compiled
def _remember(s, one, two):
    size = len(s.memo) // 2
    place = (one + two % PROBES) % size * 2
    for i in range(PROBES):
        at = (one + i) % size * 2
        if s.memo[at] == 0:
            place = at
            break
    s.memo[place] = one
    s.memo[place + 1] = two


@_unit
def _before(s, b, c):
    """Is `b` lower than `c`, or as low and preferred?"""
    return s.low[b] < s.low[c] or (s.low[b] == s.low[c] and s.rank[b] < s.rank[c])


@compiled
def choose(p, s, part):
    """Return the buffer of a part to decide on: no unplaced neighbour has a lower `low`."""
    best = -1
    if s.control[C_MODE] == BY_SECTION:
        tight = -1
        slack = NONE
        for section in range(len(s.total)):
            if s.total[section]:
                room = s.control[C_ROOM] - s.floor[section] - s.total[section]
                if room < slack:
                    for i in range(p.member_at[section], p.member_at[section + 1]):
                        b = p.member[i]
                        if not s.placed[b]:
                            if s.part[b] == part:
                                slack = room
                                tight = section
                            break
        if tight >= 0:
            for i in range(p.member_at[tight], p.member_at[tight + 1]):
                b = p.member[i]
                if not s.placed[b] and (best < 0 or _before(s, b, best)):
                    best = b
    if best < 0:
        for b in range(len(s.placed)):
            if not s.placed[b] and s.part[b] == part and (best < 0 or _before(s, b, best)):
                best = b
    moved = True
    while moved:
        moved = False
        lowest = best
        for i in range(p.near_at[best], p.near_at[best + 1]):
            c = p.near[i]
            if not s.placed[c] and _before(s, c, lowest):
                lowest = c
        if lowest != best:
            best = lowest
            moved = True
    return best


@compiled
def start(problem, search):
    """Set up the root, or find that it already fails; arguments as for `search`."""
    p, s = static_of(problem), state_of(search)
    control = s.control
    s.placed[:] = 0
    s.part[:] = 0
    s.queued[:] = 0
    control[C_DEPTH] = control[C_TRAIL] = control[C_HEAD] = control[C_TAIL] = 0
    control[C_LEFT] = s.part_count[0] = len(s.placed)
    s.part_last[0] = -1
    control[C_PARTS] = 1
    control[C_STATUS] = RUNNING
    s.total[:] = 0
    s.across[:] = 0
    s.floor[:] = -1
    for b in range(len(s.placed)):
        s.act[b] = s.low[b] = legal(p, b, 0)
        if s.act[b] == NONE:
            control[C_STATUS] = INFEASIBLE
            return
        _weigh(p, s, b, 1)
    for section in range(len(s.total)):
        if not _fits(p, s, section):
            control[C_STATUS] = INFEASIBLE
            return
    control[C_TRAIL] = 0


@compiled
def _back(p, s, depth):
    """Take the other branch of the decision `depth`, or of the last one that has another."""
    control = s.control
    while depth >= 0:
        control[C_DEPTH] = depth + 1
        undo(p, s, s.frame_trail[depth])
        control[C_PARTS] = s.frame_parts[depth]
        if s.frame_phase[depth] == 0:
            s.frame_phase[depth] = 1
            b = s.frame_buffer[depth]
            _save(s, LAST, s.part[b], s.part_last[s.part[b]])
            s.part_last[s.part[b]] = depth
            good = skip(p, s, b)
            clear_queue(s)
            if good:
                return
            undo(p, s, s.frame_trail[depth])
        _remember(s, s.frame_key[2 * depth], s.frame_key[2 * depth + 1])
        # Decisions between have nothing to do with the part that failed.
        depth = s.frame_jump[depth]
    if control[C_STATUS] == RUNNING:
        control[C_STATUS] = INFEASIBLE


@compiled
def search(problem, search, steps):
    """Search until C_STEPS reaches `steps`; return the status.

    Args:
        problem: `addresses` of a `Static`.
        search: `addresses` of a `State`.
        steps: when to stop.
    """
    p, s = static_of(problem), state_of(search)
    control = s.control
    while control[C_STATUS] == RUNNING and control[C_STEPS] < steps:
        # Of the parts left, the smallest: it is refuted the fastest.
        part = -1
        for label in range(control[C_PARTS]):
            if s.part_count[label] and (part < 0 or s.part_count[label] < s.part_count[part]):
                part = label
        control[C_STEPS] += 1
        one, two = keys(s, part)
        if _known(s, one, two):
            control[C_HITS] += 1
            _back(p, s, s.part_last[part])
            continue
        depth = control[C_DEPTH]
        if depth >= len(s.frame_buffer):
            control[C_STATUS] = EXHAUSTED
            break
        b = choose(p, s, part)
        s.frame_buffer[depth] = b
        s.frame_phase[depth] = 0
        s.frame_trail[depth] = control[C_TRAIL]
        s.frame_parts[depth] = control[C_PARTS]
        s.frame_jump[depth] = s.part_last[part]
        s.frame_key[2 * depth] = one
        s.frame_key[2 * depth + 1] = two
        control[C_DEPTH] = depth + 1
        _save(s, LAST, part, s.part_last[part])
        s.part_last[part] = depth
        good = place(p, s, b)
        clear_queue(s)
        if good and control[C_LEFT] == 0:
            control[C_STATUS] = SOLVED
        elif good:
            _split(p, s, b, depth)
        else:
            _back(p, s, depth)
    return control[C_STATUS]
