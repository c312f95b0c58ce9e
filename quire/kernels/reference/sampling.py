"""The reference sampling kernels: plain torch, and the definition to the bit of every other back
end's results.

Owns Philox, the noise made of it, the polynomials for `exp` and `log`, and the order of operations
that `quire.kernels.sampling` describes. Torch rounds each of the operations below by itself, so
they mean the same on any device. It knows logits, never a request.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.kernels.sampling import (
    TOKEN_STREAM,
    WEIGHT_ONE,
    Filters,
    Keys,
    Penalties,
    ScaledRows,
    Scores,
    Thresholds,
)

_MASK32 = 0xFFFFFFFF
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_PHILOX_ROUNDS = 10

# log(1 + f) = f - f**2 / 2 + f**3 * P(f) on [sqrt(1/2) - 1, sqrt(2) - 1]: minimax fit, relative
# error 6e-9.
_LOG_POLYNOMIAL = tuple(
    float.fromhex(c)
    for c in (
        *("-0x1.392f30p-4", "0x1.05b75cp-3", "-0x1.0d9a40p-3", "0x1.22cf4ep-3"),
        *("-0x1.546f2ap-3", "0x1.99a060p-3", "-0x1.000232p-2", "0x1.555554p-2"),
    )
)
# exp(r) = 1 + r + r**2 * Q(r) on [-log(2) / 2, log(2) / 2]: minimax fit, relative error 3e-9.
_EXP_POLYNOMIAL = tuple(
    float.fromhex(c)
    for c in ("0x1.6a2352p-10", "0x1.123a6cp-7", "0x1.5558f4p-5", "0x1.555490p-3", "0x1.fffffcp-2")
)
_LN2_HIGH = float.fromhex("0x1.62e400p-1")  # 15 bits, so that its product with an exponent is exact
_LN2_LOW = float.fromhex("0x1.7f7d1cp-20")
_LOG2_E = float.fromhex("0x1.715476p+0")
_SQRT_HALF_BITS = 0x3F3504F3
_EXP_UNDERFLOW = -80.0
"""Far below the distance (28) at which a weight becomes zero."""
_CHUNK_ELEMENTS = 1 << 17
"""Logits for which noise is made at a time: the temporaries then stay in cache."""


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, ...]:
    """Philox4x32-10: four 32-bit words, held in int64,
    of counters and keys held likewise (all broadcastable)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_PHILOX_ROUNDS):
        product0 = c0 * _PHILOX_MULTIPLIERS[0]  # wraps modulo 2**64, which keeps the bits
        product1 = c2 * _PHILOX_MULTIPLIERS[1]
        c0, c2 = ((product1 >> 32) & _MASK32) ^ c1 ^ k0, ((product0 >> 32) & _MASK32) ^ c3 ^ k1
        c1, c3 = product1 & _MASK32, product0 & _MASK32
        k0 = (k0 + _PHILOX_INCREMENTS[0]) & _MASK32
        k1 = (k1 + _PHILOX_INCREMENTS[1]) & _MASK32
    return c0, c1, c2, c3


def random_words(keys: Keys, vocab_size: int) -> Tensor:
    """Return the 32-bit words of each key's tokens, int64 [n, V]."""
    seed, position = keys.seed[:, None], keys.position[:, None]
    blocks = torch.arange((vocab_size + 3) // 4, dtype=torch.int64, device=seed.device)
    counter = (
        blocks,
        position & _MASK32,
        (position >> 32) & _MASK32,
        torch.full_like(position, TOKEN_STREAM),
    )
    words = philox(counter, (seed & _MASK32, (seed >> 32) & _MASK32))
    return torch.stack(words, dim=-1).flatten(start_dim=1)[:, :vocab_size]


def _log_reduced(f: Tensor, exponent: Tensor) -> Tensor:
    """log((1 + f) * 2**exponent) in float32; `exponent` is float32."""
    power = torch.full_like(f, _LOG_POLYNOMIAL[0])
    for coefficient in _LOG_POLYNOMIAL[1:]:
        power = power * f + coefficient
    square = f * f
    tail = (power * f) * square + exponent * _LN2_LOW
    return (f + (tail - square * 0.5)) + exponent * _LN2_HIGH


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """f and exponent (float32) of positive normal `x = (1 + f) * 2**exponent`,
    1 + f from sqrt(1/2) up to sqrt(2)."""
    shifted = x.view(torch.int32) - _SQRT_HALF_BITS
    mantissa = (shifted & 0x7FFFFF) + _SQRT_HALF_BITS
    return mantissa.view(torch.float32) - 1.0, (shifted >> 23).to(torch.float32)


def gumbel(words: Tensor) -> Tensor:
    """Gumbel noise, float32, of 32-bit words held in int64: `-log(E)`, E exponential;
    see `quire.kernels.sampling`."""
    is_high = words >= 1 << 31
    x = (torch.where(is_high, _MASK32 - words, words).to(torch.float32) + 0.5) * 2.0**-32
    low_f, low_exponent = _split(x)
    # 1 - x is never formed, as it would lose bits: near 1 it is 1 + f with f = -x, below sqrt(1/2)
    # half of 2 - 2 x.
    is_halved = x > 1 - math.sqrt(0.5)
    high_f = torch.where(is_halved, 1.0 - (x + x), -x)
    f = torch.where(is_high, high_f, low_f)
    exponent = torch.where(is_high, -is_halved.to(torch.float32), low_exponent)
    return -_log_reduced(*_split(-_log_reduced(f, exponent)))


def weights(distance: Tensor) -> Tensor:
    """Integer weights, int64, of scaled distances (float32, at most 0, -inf allowed):
    `int(exp(d) * 2**40)`."""
    d = distance.clamp(min=_EXP_UNDERFLOW)
    n = torch.round(d * _LOG2_E)
    r = (d - n * _LN2_HIGH) - n * _LN2_LOW
    power = torch.full_like(r, _EXP_POLYNOMIAL[0])
    for coefficient in _EXP_POLYNOMIAL[1:]:
        power = power * r + coefficient
    mantissa = ((power * (r * r)) + r) + 1.0
    two_to_n = ((n.to(torch.int32) + 127) << 23).view(torch.float32)
    return ((mantissa * two_to_n) * WEIGHT_ONE).to(torch.int64)


def best_first(values: Tensor, count: int) -> Tensor:
    """Return the ids of the `count` largest of `values` [V],
    larger first and smaller id first among equals."""
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=values.device)
    least = torch.topk(values, count).values[-1]
    # ascending, so that a stable sort settles equals by id
    ids = torch.nonzero(values >= least).flatten()
    return ids[torch.sort(values[ids], descending=True, stable=True).indices[:count]]


def _prefix_len(order_weights: Tensor, target: int) -> int:
    """Length of the shortest prefix that weighs at least `target`;
    one more than there is where none does."""
    return int(torch.searchsorted(order_weights.cumsum(0), target)) + 1


class ReferenceSampling:
    """`SamplingKernels` in plain torch, on any device."""

    name = "reference"

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        values, token_ids = logits.max(dim=-1)
        return token_ids, values

    def penalise(self, logits: Tensor, penalties: Penalties) -> None:
        starts, output_starts = penalties.start.tolist(), penalties.output_start.tolist()
        for i, row in enumerate(penalties.row.tolist()):
            seen = _known_ids(
                penalties.token_ids[starts[i] : starts[i + 1]], logits.shape[1]
            ).unique()  # type: ignore[no-untyped-call]
            values = logits[row, seen]
            penalty = penalties.repetition[i]
            logits[row, seen] = torch.where(values > 0, values / penalty, values * penalty)
            output = _known_ids(
                penalties.token_ids[output_starts[i] : starts[i + 1]], logits.shape[1]
            )
            ids, counts = output.unique(return_counts=True)  # type: ignore[no-untyped-call]
            values = logits[row, ids] - penalties.frequency[i] * counts.to(torch.float32)
            logits[row, ids] = values - penalties.presence[i]

    def thresholds(self, logits: Tensor, rows: ScaledRows, filters: Filters) -> Thresholds:
        found = [
            self._threshold(logits[int(rows.row[i])], rows, filters, i)
            for i in range(rows.row.numel())
        ]
        return Thresholds(
            torch.tensor([value for value, _ in found], dtype=torch.float32, device=logits.device),
            torch.tensor(
                [token_id for _, token_id in found], dtype=torch.int64, device=logits.device
            ),
        )

    def _threshold(
        self, row: Tensor, rows: ScaledRows, filters: Filters, i: int
    ) -> tuple[float, int]:
        distance = (row - rows.max_logit[i]) * rows.scale[i]
        is_kept = (distance >= filters.floor[i]) & (row > -torch.inf)
        num_kept = int(is_kept.sum())
        limit = min(int(filters.top_k[i]), num_kept)
        top_p = float(filters.top_p[i])
        if top_p < 1.0:
            total = weights(distance)[
                is_kept if limit == num_kept else best_first(row, limit)
            ].sum()
            limit = self._nucleus(row, distance, limit, math.ceil(top_p * float(total)))
        if limit == num_kept:
            return float(row[is_kept].min()), row.numel() - 1
        last = int(best_first(row, limit)[-1])
        return float(row[last]), last

    def _nucleus(self, row: Tensor, distance: Tensor, limit: int, target: int) -> int:
        """Return how many of the `limit` best tokens it takes to weigh `target`; looks at few
        first, as few are the rule."""
        count = min(limit, 64)
        while True:
            length = _prefix_len(weights(distance[best_first(row, count)]), target)
            if length <= count or count == limit:
                return min(length, limit)
            count = min(limit, 8 * count)

    def draw(
        self, logits: Tensor, rows: ScaledRows, thresholds: Thresholds | None, keys: Keys
    ) -> Tensor:
        chunk_len = max(1, _CHUNK_ELEMENTS // logits.shape[1])
        chunks = [
            slice(start, start + chunk_len) for start in range(0, rows.row.numel(), chunk_len)
        ]
        return torch.cat(
            [self._draw_chunk(logits, rows, thresholds, keys, chunk) for chunk in chunks]
        )

    def _draw_chunk(
        self,
        logits: Tensor,
        rows: ScaledRows,
        thresholds: Thresholds | None,
        keys: Keys,
        chunk: slice,
    ) -> Tensor:
        chosen = logits[rows.row[chunk]]
        noise = gumbel(random_words(Keys(keys.seed[chunk], keys.position[chunk]), logits.shape[1]))
        score = (chosen - rows.max_logit[chunk, None]) * rows.scale[chunk, None] + noise
        if thresholds is not None:
            is_kept = _is_kept(
                chosen, Thresholds(thresholds.value[chunk, None], thresholds.token_id[chunk, None])
            )
            score = score.masked_fill(~is_kept, -torch.inf)
        return score.argmax(dim=-1)

    def score(
        self,
        logits: Tensor,
        rows: ScaledRows,
        thresholds: Thresholds | None,
        token_ids: Tensor,
        *,
        num_top: int = 0,
    ) -> Scores:
        num_rows = rows.row.numel()
        total, rank = torch.empty_like(rows.row), torch.empty_like(rows.row)
        top_ids = torch.empty((num_rows, num_top), dtype=torch.int64, device=logits.device)
        for i in range(num_rows):
            row = logits[int(rows.row[i])]
            row_weights = weights((row - rows.max_logit[i]) * rows.scale[i])
            total[i] = (
                row_weights.sum()
                if thresholds is None
                else row_weights[
                    _is_kept(row, Thresholds(thresholds.value[i], thresholds.token_id[i]))
                ].sum()
            )
            rank[i] = (row > row[token_ids[i]]).sum() + 1
            top_ids[i] = best_first(row, num_top)
        return Scores(total, rank, top_ids)


def _known_ids(token_ids: Tensor, vocab_size: int) -> Tensor:
    return token_ids[(token_ids >= 0) & (token_ids < vocab_size)].long()


def _is_kept(logits: Tensor, thresholds: Thresholds) -> Tensor:
    """Return which tokens of logits [..., V] are kept, with thresholds that broadcast against
    them."""
    ids = torch.arange(logits.shape[-1], device=logits.device)
    above = (logits > thresholds.value) | (
        (logits == thresholds.value) & (ids <= thresholds.token_id)
    )
    return above & (logits > -torch.inf)
