"""The words in which back ends are given adapters: what they add to projections, and to whose."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


class LoraPart(NamedTuple):
    """What an adapter adds to some neighbouring outputs of a weight: `up @ products`."""

    first_output: int
    first_rank: int
    """Of the products, of which it takes as many as `up` has columns."""
    up: Tensor
    """[outputs, rank]"""
    bias: Tensor | None = None
    """float32 [outputs]: added, too."""
    replaced: Tensor | None = None
    """float32 [outputs], subtracted: the bias in the model's memory that `bias` takes the place of.
    """


class LoraWeight(NamedTuple):
    """What an adapter adds to one projection [N, K] of a row x, in float32: each part's `up` times
    its share of the products `scales * (down @ x)`. Of an embedding [K, N], `down @ x` is the
    column of `down` that the token names."""

    down: Tensor
    """[R, K], the ranks of all parts"""
    scales: Tensor
    """float32 [R]"""
    parts: tuple[LoraPart, ...]
    num_outputs: int
    is_embedding: bool = False


class PackedAdapter(Protocol):
    """An adapter in the layout that a back end wants. Opaque to everyone else."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def numbers(self) -> Collection[int]:
        """Of the weights that it changes."""
        ...


class StepAdapters(NamedTuple):
    """The adapters of one step, and which of its tokens use which."""

    adapters: tuple[PackedAdapter, ...]
    of_token: Tensor
    """int32 [T] on the host: an index of `adapters`, or -1."""


class ExpertAdapters(NamedTuple):
    """The adapters of a step where experts are applied."""

    step: StepAdapters
    up: int
    """The number of the weight that stacks gates and ups."""
    down: int


class StatePlaces(NamedTuple):
    """Where hidden states come from: of each, the row of the worker, and the token's position."""

    rows: Sequence[int]
    positions: Sequence[int]


class AdapterRows(Protocol):
    """Knows which adapter each row of the worker uses."""

    def of_step(
        self, rows: Sequence[int], query_start: Tensor, context_len: Tensor
    ) -> StepAdapters | None:
        """Look up the sequences in these rows, whose tokens begin at `query_start`, int32 [S + 1];
        None where none of them uses an adapter."""
        ...

    def of_states(self, places: StatePlaces, number: int) -> StepAdapters | None:
        """Look up the rows of some hidden states, as tokens of a step; None where none of their
        adapters changes the weight of this number."""
        ...
