"""Where a draft model's keys and values are: in the blocks of its rows' tables, as more layers of
them, and beyond what is known in blocks of each row's own.

A block of the pool is *filled* when the draft model has computed all of its positions, which it
does no sooner than the target has. So what shares blocks (forks, prefix hits, merged blocks) shares
these, and what was never drafted costs nothing: positions that lack are computed when they are
needed. The position of the last known token, and drafted ones, are in scratch blocks until their
block is whole and all of it known; wrong drafts are never in a block of the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.common.numbers import ceil_div
from quire.core.plan import BlockCopy, RowSampling, StepPlan
from quire.core.tiers import TIERS, TierOrder
from quire.core.transfers import TRANSFERS, TransferOrder

Copy = Callable[[Sequence[BlockCopy]], None]
"""Copies blocks of the draft model's caches; all reads happen before any write."""


class KnownRows(Protocol):
    """What is to be known of the worker's rows."""

    @property
    def block_size(self) -> int: ...
    @property
    def num_groups(self) -> int: ...
    @property
    def sampling(self) -> list[RowSampling]: ...
    @property
    def num_tokens(self) -> NDArray[np.int64]: ...
    @property
    def num_prompt_tokens(self) -> NDArray[np.int64]: ...
    @property
    def block_tables(self) -> NDArray[np.int32]: ...
    def tokens(self, row: int) -> NDArray[np.integer[Any]]:
        """The row's known tokens."""
        ...


class _Scratch(NamedTuple):
    """What a row's scratch blocks hold."""

    start: int
    """The first position in them: where a block begins."""
    num_known: int
    """Tokens that were known; the position of the last one is computed."""
    drafted: tuple[int, ...]
    """Tokens behind those, whose positions are computed."""


class Span(NamedTuple):
    """What is to be computed for a row before its next tokens can be drafted."""

    row: int
    first: int
    """The first position that lacks."""
    num_known: int
    blocks: NDArray[np.int32]
    """By place: the pool's, and from that of the last known token on the row's own."""
    num_whole: int
    """Of these, the pool's."""


def _placings(plan: StepPlan) -> Iterator[TierOrder | TransferOrder]:
    """What is written into blocks that was computed by another step, or another engine."""
    for order in map(TierOrder._make, plan.orders.get(TIERS, ())):
        if order.verb == "place":
            yield order
    for moved in map(TransferOrder._make, plan.orders.get(TRANSFERS, ())):
        if moved.verb == "place":
            yield moved


class DraftPlaces:
    """Follows which positions of which rows and blocks are computed. The pool's first group of
    layers keeps everything; its blocks are those whose numbers count."""

    def __init__(self, rows: KnownRows, num_blocks: int, num_own: int, copy: Copy) -> None:
        """The caches have the pool's blocks, and behind them so many of each row's own."""
        self._rows, self._copy = rows, copy
        self._is_filled = np.zeros(num_blocks, np.bool_)
        self._num_blocks, self._num_own = num_blocks, num_own
        self._scratch: dict[int, _Scratch] = {}

    def begin(self, plan: StepPlan) -> None:
        """Note what a plan changes, before it is applied: which blocks are written anew."""
        for row in plan.removed_rows:
            self._scratch.pop(row, None)
        if plan.replaced_blocks:
            self._follow(plan)
        if plan.new_rows:
            starts = {work.row: work.start for work in plan.work}
            for new in plan.new_rows:
                self._scratch.pop(new.row, None)
                first = starts.get(new.row, 0) // self._rows.block_size * self._rows.num_groups
                self._empty(new.block_table[first:])
        for _, blocks in plan.appended_blocks:
            self._empty(blocks)
        for copy in plan.copies:
            self._is_filled[copy.destination] = False
        for order in _placings(plan):  # what comes from elsewhere is the target's alone
            for blocks in order.blocks:
                self._empty(blocks)

    def span(self, row: int) -> Span:
        """What lacks of a row whose known tokens but the last one are computed by the target; moves
        what is known by now to where it belongs."""
        rows, size = self._rows, self._rows.block_size
        num_known = int(rows.num_tokens[row])
        num_whole = (num_known - 1) // size
        table = rows.block_tables[row, : num_whole * rows.num_groups : rows.num_groups]
        own = self.own_blocks(row)
        blocks = np.concatenate([table, own])
        is_filled = self._is_filled[table]
        num_filled = num_whole if is_filled.all() else int(is_filled.argmin())
        first = num_filled * size
        held = self._scratch.pop(row, None)
        if held is not None and held.start <= first:
            end = self._num_right(held, row)
            first_place = held.start // size
            moves = [
                BlockCopy(int(source), int(blocks[place]))
                for place, source in zip(range(first_place, ceil_div(end, size)), own, strict=False)
                if num_filled <= place and source != blocks[place]
            ]
            if moves:
                self._copy(moves)
            first = max(first, min(end, num_known - 1))  # states of the last token are wanted
        return Span(row, first, num_known, blocks, num_whole)

    def own_blocks(self, row: int) -> NDArray[np.int32]:
        """The blocks that a row has for itself."""
        return self._num_blocks + row * self._num_own + np.arange(self._num_own, dtype=np.int32)

    def computed(self, span: Span, end: int, drafted: Sequence[int] = ()) -> None:
        """The row is computed up to a position; at its end, also for tokens that were drafted."""
        num_filled = min(end // self._rows.block_size, span.num_whole)
        self._is_filled[span.blocks[:num_filled]] = True
        if end >= span.num_known:
            start = span.num_whole * self._rows.block_size
            self._scratch[span.row] = _Scratch(start, span.num_known, tuple(drafted))

    def _num_right(self, held: _Scratch, row: int) -> int:
        """The positions that are computed for the row's own tokens."""
        came = self._rows.tokens(row)[held.num_known :].tolist()
        end = min(held.num_known, int(self._rows.num_tokens[row]))
        for drafted, token_id in zip(held.drafted, came, strict=False):
            if drafted != token_id:
                break
            end += 1
        return end

    def _empty(self, blocks: Sequence[int]) -> None:
        self._is_filled[[block for block in blocks if block >= 0]] = False

    def _follow(self, plan: StepPlan) -> None:
        """Take along what is in blocks that are replaced by others with the same tokens."""
        moves, entering = [], {new.row for new in plan.new_rows}
        for row, entry, block in plan.replaced_blocks:
            if block < 0 or entry % self._rows.num_groups or row in entering:
                continue
            old = int(self._rows.block_tables[row, entry])
            if self._is_filled[old] and not self._is_filled[block]:
                moves.append(BlockCopy(old, block))
                self._is_filled[block] = True
        if moves:
            self._copy(moves)
