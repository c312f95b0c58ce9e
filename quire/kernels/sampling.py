"""The seam between the sampler and its kernels: what is computed over whole rows of logits, as one
protocol on tensors.

A back end (`reference.sampling`, `cpu.sampling`, later `triton`) implements `SamplingKernels`. The
contract is stricter than that of other kernels: *every back end gives the same bits*. It can be
kept because nothing here depends on the order of a floating-point sum:

* Elementwise arithmetic is single float32 additions, subtractions and multiplications, each rounded
  to nearest even, never contracted into a fused multiply-add; `exp` and `log` are the polynomials
  of `reference.sampling`, in that very order.
* Sums of probabilities are sums of 64-bit integers: a token weighs `int(exp(d) * 2**40)`, where
  `d <= 0` is its scaled distance from the row's best token. Integers add up to the same total in
  any order and on any number of threads.
* All else is comparison. The one order of tokens is *best first*: larger logit first, smaller id
  first among equals.

Random numbers: token t of a row that is sampled at absolute position p gets word `t & 3` of

    Philox4x32-10(counter = (t >> 2, p mod 2**32, p >> 32, stream), key = (seed mod 2**32, seed >>
    32))

(Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Stream 0
chooses tokens; other streams are free for other draws at the same position. The word r becomes
Gumbel noise `-log(E)` with E exponential:
`w = min(r, 2**32 - 1 - r)`, `x = (float32(w) + 0.5) * 2**-32`, `E = -log(x)` where r < 2**31, else
`-log1p(-x)`; so both tails are resolved to 2**-33. The sampled token is the best first by
`d + noise` among those kept, which draws from softmax over the kept tokens (Gumbel 1954; Maddison,
Tarlow and Minka, NIPS 2014). A token's noise depends on nothing but (seed, position, token).

Shapes: R rows of logits, V vocabulary, n the rows asked about in a call (any subset, in any order,
with repetitions).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

WEIGHT_ONE = float(1 << 40)
"""The integer weight of a row's best token."""
TOKEN_STREAM = 0
"""The fourth counter word of the draws that choose tokens."""


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """n rows as seen by a kernel: the scaled distance of token t is
    `d = (logits[row, t] - max_logit) * scale`."""

    row: Tensor
    """int64 [n]: which rows of the logits."""
    max_logit: Tensor
    """float32 [n]: the largest logit of the row, finite."""
    scale: Tensor
    """float32 [n]: 1 / temperature, rounded to float32."""


@dataclass(frozen=True, slots=True)
class Filters:
    """The filters of n rows; see `SamplingKernels.thresholds`."""

    top_k: Tensor
    """int64 [n]; the vocabulary size keeps all."""
    top_p: Tensor
    """float64 [n]; 1 keeps all."""
    floor: Tensor
    """float32 [n]: log(min_p), the least scaled distance that is kept; -inf keeps all."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The last token that each of n rows keeps: t is kept if its logit is above `value`, or equal
    and t <= `token_id`.

    A logit of -inf is never kept.
    """

    value: Tensor
    """float32 [n]"""
    token_id: Tensor
    """int64 [n]"""


@dataclass(frozen=True, slots=True)
class Keys:
    """What n draws depend on."""

    seed: Tensor
    """int64 [n]: the 64 bits of the seed, as a signed number."""
    position: Tensor
    """int64 [n]: absolute position of the token to be sampled, not negative."""


@dataclass(frozen=True, slots=True)
class Draws:
    """n tokens to be drawn from whole rows, any number from one."""

    row: Tensor
    """int64 [n]: from which row."""
    scale: Tensor
    """float32 [n]: as in `ScaledRows`."""
    keys: Keys


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of n different rows for the tokens of their prompts and outputs,
    which lie one after another."""

    row: Tensor
    """int64 [n]"""
    token_ids: Tensor
    """int32 [total]: the first row's prompt, its output, the next row's prompt, ...
    Ids that have no logit are passed over."""
    start: Tensor
    """int64 [n + 1]: where each row's ids begin, and the end."""
    output_start: Tensor
    """int64 [n]: where each row's output begins."""
    repetition: Tensor
    """float32 [n]"""
    frequency: Tensor
    """float32 [n]"""
    presence: Tensor
    """float32 [n]"""


class Scores(NamedTuple):
    """What a token's log-probability is made of:
    `(logit - max_logit) * scale - log(total / WEIGHT_ONE)`."""

    total: Tensor
    """int64 [n]: the weights of all kept tokens."""
    rank: Tensor
    """int64 [n]: 1 + the number of tokens whose logit is strictly larger, kept or not."""
    top_ids: Tensor
    """int64 [n, num_top], best first."""


class SamplingKernels(Protocol):
    """One back end. `logits` is float32 [R, V], contiguous, and only `penalise` writes it."""

    name: str

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's argmax, int64 [R], and max logit, float32 [R].

        The logit is NaN where the row holds a NaN (the token is then undefined), +inf where it
        holds one, and -inf where it holds nothing else.
        """
        ...

    def penalise(self, logits: Tensor, penalties: Penalties) -> None:
        """Penalise, in place, each different token t of a row once.

        First, for tokens of prompt and output, a positive logit is divided and any other multiplied
        by `repetition` (Keskar et al. 2019, arXiv:1909.05858). Then, for tokens of the output,
        `frequency * float32(count of t)` and then `presence` is subtracted.
        """
        ...

    def thresholds(self, logits: Tensor, rows: ScaledRows, filters: Filters) -> Thresholds:
        """Return the thresholds at which all of these hold; at least one token is kept.

        Tokens below `floor` are removed; then all but the `top_k` best; then, with `total` the
        weight of what remains, all but the shortest best-first prefix that weighs at least
        `ceil(top_p * float64(total))`.
        """
        ...

    def draw(
        self, logits: Tensor, rows: ScaledRows, thresholds: Thresholds | None, keys: Keys
    ) -> Tensor:
        """Sample one token from each row's kept tokens (all of them without `thresholds`): int64
        [n]."""
        ...

    def score(
        self,
        logits: Tensor,
        rows: ScaledRows,
        thresholds: Thresholds | None,
        token_ids: Tensor,
        *,
        num_top: int = 0,
    ) -> Scores:
        """Total weight of each row, the rank of one token of each (int64 [n]),
        and each row's `num_top <= V` best."""
        ...
