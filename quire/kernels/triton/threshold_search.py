"""Search for the filter thresholds of rows of logits (top-k, top-p, min-p), spread over rows and
chunks. It has not run on a GPU yet.

Owns the order of tokens as integers, the sums by which a row's threshold is found, and the
launches, whose number is fixed: rounds of `tally_kernel`, which narrow down the logit of the last
token kept; `gather_kernel`, which brings the few tokens together that may be the last one; and
`settle_kernel`, which finds it among them. A row whose search is done, or that has none, is passed
over. Sums are of integers, so nothing depends on the order of additions, nor on how a row is split
into chunks. It never reads anything back, never draws, and never writes logits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.sampling import Filters, ScaledRows, Thresholds
from quire.kernels.triton.checks import launch_options
from quire.kernels.triton.noise import weigh

BLOCK = 1024
"""Tokens that a program looks at together."""
NUM_PROGRAMS = 2048
"""Of a launch, at most, but for one for each row: enough to keep a GPU busy, and no more,
as each has to look up its row."""
CAPACITY = 2048
"""Tokens of a row that can be gathered. Where more would have to be (thousands are equal, or a
top-p comes after a top-k as large), one program bisects over the whole row: an estimated
millisecond or two.
"""
_NUM_WARPS = 8
_NUM_ROUNDS = 3
_ROUNDS = tl.constexpr(_NUM_ROUNDS)
_WAYS = tl.constexpr(16)
"""Parts into which a round divides the logits that are left."""
# What a search knows of a row, all of it zero at first: the sums of each round, the worst place,
# the number gathered.
_WORST = tl.constexpr(_NUM_ROUNDS * 16)
_NUM_GATHERED = tl.constexpr(_NUM_ROUNDS * 16 + 1)
_STATE_LEN = tl.constexpr(_NUM_ROUNDS * 16 + 2)
_LEAST_KEY = tl.constexpr(-2139095040)
"""Of the least finite float32."""
_NO_KEY, _MAX_KEY = tl.constexpr(-2147483648), tl.constexpr(2147483647)
ID_BITS = tl.constexpr(2147483647)
"""Of a place: the largest id that there could be."""
NO_PLACE = tl.constexpr(9223372036854775807)
"""Worse than any token's."""


@triton.jit
def key_of(x):
    """int32 that are ordered as float32 x are; both zeros are the same."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def value_of(key):
    """What `key_of` was made of."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def place_of(key, ids):
    """int64, not negative, in which best-first order is ascending, and no two tokens are equal."""
    return ((0x7FFFFFFF - key.to(tl.int64)) << 31) | ids


@triton.jit
def key_at(place):
    """The key that `place_of` was given."""
    return (0x7FFFFFFF - (place >> 31)).to(tl.int32)


@triton.jit
def id_at(place):
    """The id that `place_of` was given."""
    return place & ID_BITS


@triton.jit
def append(places, is_in, there, counter, capacity):
    """Store the places that are in wherever there is room, in any order;
    the counter also counts those without room."""
    count = tl.sum(is_in.to(tl.int32), axis=0)
    if count > 0:
        first = tl.atomic_add(counter, count.to(tl.int64), sem="relaxed")
        slots = first + tl.cumsum(is_in.to(tl.int32), axis=0) - 1
        tl.store(there + slots, places, mask=is_in & (slots < capacity))


@triton.jit
def tokens_of(line, first, size, top, scale, floor, BLOCK: tl.constexpr):
    """Ids, keys and scaled distances of a block of a row,
    and which of its tokens are numbers and reach the floor."""
    ids = first + tl.arange(0, BLOCK)
    x = tl.load(line + ids, mask=ids < size, other=float("-inf"))
    distance = (x - top) * scale
    return ids, key_of(x), distance, (x > float("-inf")) & (distance >= floor)


@triton.jit
def share_of(share, total):
    """What a top-p needs of a total weight: something, as one token is kept in any case."""
    return tl.maximum(tl.ceil(share * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def goal_of(state, wanted, share, size):
    """The number (with a top-k) or weight that the best have to reach,
    and whether a search can tell where they do."""
    everything = tl.load(state)
    goal = share_of(share, everything)
    is_open = (share < 1.0) & (goal <= everything)
    if wanted < size:
        goal = tl.minimum(wanted, everything)
        is_open = wanted < size
    return goal, is_open & (everything > 0)


@triton.jit
def pivot_of(part, low, high, top, ROUND: tl.constexpr):
    """Keys from `low` on and below `high`. Results do not depend on them,
    only how few tokens a round leaves does."""
    # two to an octave of the distance from the best, from 64 to 1/2: where the tail is, is
    # not known yet
    if ROUND == 0:
        distance = ((267 - part) << 22).to(tl.float32, bitcast=True)
        key = tl.where(part == 0, low, key_of(top - distance))
    else:
        share = part.to(tl.float32) * (1.0 / _WAYS)
        key = key_of(value_of(low) * (1.0 - share) + value_of(high - 1) * share)
    return tl.minimum(tl.maximum(key, low), high - 1)


@triton.jit
def bracket_of(state, top, goal, ROUNDS: tl.constexpr):
    """After some rounds: the last token's key is `low` or above and below `high`; those from `high`
    on sum up to `above`, and those from `low` on to `held`.
    """
    low, high = tl.full([], _LEAST_KEY, tl.int32), key_of(top) + 1
    above, held = tl.zeros([], tl.int64), tl.full([], NO_PLACE, tl.int64)
    for i in tl.static_range(ROUNDS):
        pivots = pivot_of(tl.arange(0, _WAYS), low, high, top, i)
        sums = tl.load(state + i * _WAYS + tl.arange(0, _WAYS)) + above
        is_enough = sums >= goal
        # the row has been left out of this round
        is_known = tl.max(is_enough.to(tl.int32), axis=0) == 0
        low = tl.maximum(low, tl.max(tl.where(is_enough, pivots, _LEAST_KEY), axis=0))
        high = tl.minimum(high, tl.min(tl.where(is_enough | is_known, high, pivots), axis=0))
        above = tl.max(tl.where(is_enough, above, sums), axis=0)
        held = tl.min(tl.where(is_enough, sums, held), axis=0)
        # the first round began with the least float32
        low = tl.maximum(low, key_at(tl.load(state + _WORST)))
    return low, high, above, held


@triton.jit
def add_sums(sums, keys, best_key, amounts, low, high, top, ROUND: tl.constexpr):
    """Adds what the tokens at each threshold or above sum up to;
    all pivots at once would take too many registers."""
    for first in range(0, _WAYS, 4):
        part = first + tl.arange(0, 4)
        pivots = pivot_of(part, low, high, top, ROUND)
        if tl.min(pivots, axis=0) <= best_key:
            reaches = keys[:, None] >= pivots[None, :]
            held = tl.sum(tl.where(reaches, amounts[:, None], 0), axis=0)
            tl.atomic_add(sums + part, held.to(tl.int64), sem="relaxed")


@triton.jit
def line_of(query, logits, row, max_logits, scales, floors, size):
    """Return a query's logits, the largest of them, the scale of distances and the floor."""
    line = logits + tl.load(row + query) * size
    return line, tl.load(max_logits + query), tl.load(scales + query), tl.load(floors + query)


@triton.jit(do_not_specialize=["num_blocks"])
def tally_kernel(
    logits, row, max_logits, scales, top_k, top_p, floors, states, size, num_blocks,
    ROUND: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds a chunk's share to the sums of a round, of query program_id(0);
    the first round finds the worst place, too."""
    query, begin = tl.program_id(0), tl.program_id(1) * num_blocks * BLOCK
    line, top, scale, floor = line_of(query, logits, row, max_logits, scales, floors, size)
    wanted, share = tl.load(top_k + query), tl.load(top_p + query)
    state = states + query * _STATE_LEN
    goal, is_open = tl.zeros([], tl.int64), (wanted < size) | (share < 1.0)
    if ROUND > 0:
        goal, is_open = goal_of(state, wanted, share, size)
    low, high, _above, held = bracket_of(state, top, goal, ROUND)
    is_open = is_open & ((wanted >= size) | (held > CAPACITY))
    worst = tl.zeros([], tl.int64)
    if is_open | (ROUND == 0):
        for first in range(begin, tl.minimum(begin + num_blocks * BLOCK, size), BLOCK):
            ids, keys, distance, is_in = tokens_of(line, first, size, top, scale, floor, BLOCK)
            if ROUND == 0:
                worst_key = tl.min(tl.where(is_in, keys, _MAX_KEY), axis=0)
                worst_id = tl.max(tl.where(is_in & (keys == worst_key), ids, 0), axis=0)
                worst = tl.maximum(worst, place_of(worst_key, worst_id))
            is_in = is_in & (keys >= low) & (keys < high)
            best_key = tl.max(tl.where(is_in, keys, _NO_KEY), axis=0)
            if is_open & (best_key >= low):
                sums = state + ROUND * _WAYS
                if wanted < size:
                    add_sums(sums, keys, best_key, is_in.to(tl.int32), low, high, top, ROUND)
                else:
                    add_sums(
                        sums,
                        keys,
                        best_key,
                        tl.where(is_in, weigh(distance), 0),
                        low,
                        high,
                        top,
                        ROUND,
                    )
    if ROUND == 0:
        tl.atomic_max(state + _WORST, worst, sem="relaxed")


@triton.jit(do_not_specialize=["num_blocks"])
def gather_kernel(
    logits, row, max_logits, scales, top_k, top_p, floors, states, size, num_blocks, gathered,
    CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Appends the places of a chunk's tokens that may be the last, of query program_id(0).

    Where a top-p comes after a top-k, those of all better tokens, too: what they weigh has not been
    looked at.
    """
    query, begin = tl.program_id(0), tl.program_id(1) * num_blocks * BLOCK
    line, top, scale, floor = line_of(query, logits, row, max_logits, scales, floors, size)
    wanted, share = tl.load(top_k + query), tl.load(top_p + query)
    state = states + query * _STATE_LEN
    goal, is_open = goal_of(state, wanted, share, size)
    if is_open:
        low, high, _above, _held = bracket_of(state, top, goal, _ROUNDS)
        high = tl.where((wanted < size) & (share < 1.0), _MAX_KEY, high)
        there = gathered + query.to(tl.int64) * CAPACITY
        for first in range(begin, tl.minimum(begin + num_blocks * BLOCK, size), BLOCK):
            ids, keys, _distance, is_in = tokens_of(line, first, size, top, scale, floor, BLOCK)
            is_in = is_in & (keys >= low) & (keys < high)
            append(place_of(keys, ids), is_in, there, state + _NUM_GATHERED, CAPACITY)


@triton.jit
def nearest(places, amounts, best, worst, goal):
    """Of places from `best` to `worst`, the first up to which amounts sum up to the goal,
    as they do up to the worst."""
    while best < worst:
        middle = best + ((worst - best) >> 1)
        is_before = places <= middle
        is_enough = tl.sum(tl.where(is_before, amounts, 0), axis=0) >= goal
        worst = tl.where(is_enough, tl.max(tl.where(is_before, places, 0), axis=0), worst)
        best = tl.where(is_enough, best, tl.min(tl.where(is_before, NO_PLACE, places), axis=0))
    return best


@triton.jit
def last_gathered(
    gathered, num_gathered, above, goal, share, top, scale, is_by_count, CAPACITY: tl.constexpr
):
    """The place of the last token, if it is among those gathered."""
    number = tl.arange(0, CAPACITY)
    places = tl.load(gathered + number, mask=number < num_gathered, other=NO_PLACE)
    best, last = tl.min(places, axis=0), tl.max(tl.where(number < num_gathered, places, 0), axis=0)
    if is_by_count:
        above = tl.where(share < 1.0, 0, above)  # as they all have been gathered
        last = nearest(places, (number < num_gathered).to(tl.int32), best, last, goal - above)
    if share < 1.0:
        weights = tl.where(places <= last, weigh((value_of(key_at(places)) - top) * scale), 0)
        total = tl.sum(weights, axis=0)
        if is_by_count:
            goal = share_of(share, total)
        if goal - above <= total:
            last = nearest(places, weights, best, last, goal - above)
    return last


@triton.jit
def parted(line, size, top, scale, floor, place, is_by_count, BLOCK: tl.constexpr):
    """Number, or weight, of a row's tokens up to a place, the last place among these,
    and the first one beyond."""
    sums = tl.zeros([BLOCK], tl.int64)
    before, beyond = tl.zeros([BLOCK], tl.int64), tl.full([BLOCK], NO_PLACE, tl.int64)
    for first in range(0, size, BLOCK):
        ids, keys, distance, is_in = tokens_of(line, first, size, top, scale, floor, BLOCK)
        places = tl.where(is_in, place_of(keys, ids), NO_PLACE)
        is_before = places <= place
        sums += tl.where(is_before, tl.where(is_by_count, 1, weigh(distance)), 0)
        before = tl.maximum(before, tl.where(is_before, places, 0))
        beyond = tl.minimum(beyond, tl.where(is_before, NO_PLACE, places))
    return tl.sum(sums, axis=0), tl.max(before, axis=0), tl.min(beyond, axis=0)


@triton.jit
def nearest_in_row(
    line, size, top, scale, floor, best, worst, goal, is_by_count, BLOCK: tl.constexpr
):
    """As `nearest`, of all tokens of a row."""
    while best < worst:
        middle = best + ((worst - best) >> 1)
        held, before, beyond = parted(line, size, top, scale, floor, middle, is_by_count, BLOCK)
        worst = tl.where(held >= goal, before, worst)
        best = tl.where(held >= goal, best, beyond)
    return best


@triton.jit
def last_in_row(
    line, size, top, scale, floor, low, high, worst, goal, share, is_by_count, BLOCK: tl.constexpr
):
    """As `last_gathered`, by passes over the whole row:
    for rows of which too many tokens may be the last."""
    lowest = tl.minimum(worst, place_of(low, ID_BITS))
    last = nearest_in_row(
        line, size, top, scale, floor, place_of(high - 1, 0), lowest, goal, is_by_count, BLOCK
    )
    if is_by_count & (share < 1.0):
        total, _before, _beyond = parted(line, size, top, scale, floor, last, False, BLOCK)
        goal = share_of(share, total)
        if goal <= total:
            last = nearest_in_row(
                line, size, top, scale, floor, place_of(key_of(top), 0), last, goal, False, BLOCK
            )
    return last


@triton.jit
def settle_kernel(
    logits, row, max_logits, scales, top_k, top_p, floors, states, size, gathered, threshold_value,
    threshold_id, CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find `SamplingKernels.thresholds` of query program_id(0), once its candidates are
    gathered."""
    query = tl.program_id(0)
    line, top, scale, floor = line_of(query, logits, row, max_logits, scales, floors, size)
    wanted, share = tl.load(top_k + query), tl.load(top_p + query)
    state = states + query * _STATE_LEN
    worst, num_gathered = tl.load(state + _WORST), tl.load(state + _NUM_GATHERED)
    last = worst
    goal, is_open = goal_of(state, wanted, share, size)
    if is_open:
        low, high, above, _held = bracket_of(state, top, goal, _ROUNDS)
        if num_gathered <= CAPACITY:
            there = gathered + query.to(tl.int64) * CAPACITY
            last = last_gathered(
                there, num_gathered, above, goal, share, top, scale, wanted < size, CAPACITY
            )
        else:
            last = last_in_row(
                line, size, top, scale, floor, low, high, worst, goal, share, wanted < size, BLOCK
            )
    tl.store(threshold_value + query, value_of(key_at(last)))
    tl.store(threshold_id + query, tl.where(last == worst, size - 1, id_at(last)))


def spread(num_rows: int, size: int, block: int) -> tuple[int, tuple[int, int]]:
    """Return blocks in a chunk, and a grid of rows times chunks."""
    num_blocks = triton.cdiv(triton.cdiv(size, block), max(1, NUM_PROGRAMS // num_rows))
    return num_blocks, (num_rows, triton.cdiv(size, num_blocks * block))


def find_thresholds(logits: Tensor, rows: ScaledRows, filters: Filters) -> Thresholds:
    """`SamplingKernels.thresholds` of float32 logits [R, V], contiguous."""
    found = Thresholds(torch.empty_like(rows.max_logit), torch.empty_like(rows.row))
    num_rows, size = rows.row.numel(), logits.shape[1]
    if not num_rows:
        return found
    states = torch.zeros((num_rows, _STATE_LEN.value), dtype=torch.int64, device=logits.device)
    gathered = torch.empty((num_rows, CAPACITY), dtype=torch.int64, device=logits.device)
    query = (
        logits, rows.row, rows.max_logit, rows.scale, filters.top_k, filters.top_p, filters.floor,
        states, size,
    )  # fmt: skip
    block = min(BLOCK, triton.next_power_of_2(size))
    num_blocks, grid = spread(num_rows, size, block)
    options: dict[str, Any] = {"CAPACITY": CAPACITY, "BLOCK": block, **launch_options(_NUM_WARPS)}
    for number in range(_NUM_ROUNDS):
        tally_kernel[grid](*query, num_blocks, ROUND=number, **options)
    gather_kernel[grid](*query, num_blocks, gathered, **options)
    settle_kernel[(num_rows,)](*query, gathered, found.value, found.token_id, **options)
    return found
