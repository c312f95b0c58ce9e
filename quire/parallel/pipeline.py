"""A forward pass of several stages, each in processes of its own: a step is cut into pieces of
tokens, and each stage computes a piece while the one before it computes the next.

The tokens of a sequence are computed in their order, and bits depend on no other row, so pieces
give what the whole would have given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.interface import AttentionBatch, ForwardPass
from quire.kernels.lora import StepAdapters
from quire.kernels.placed import PlacedRows, Rotations, StepContent
from quire.parallel.adapters import FollowedAdapters, LedAdapters
from quire.parallel.divided import asked, pass_of
from quire.parallel.group import RankGroup
from quire.parallel.shared_memory import Kind, RankCommand

LEAST_TOKENS = 32
"""Of a piece. With fewer rows, most of a stage's time goes into reading its weights, which each
piece does anew."""
PIECES_PER_STAGE = 4
"""Of a step, at most: with so many, stages wait for a fifth of the time at the step's ends."""


class StepPiece(NamedTuple):
    """Some neighbouring tokens of a step."""

    tokens: range
    batch: AttentionBatch
    num_wanted: Tensor | None


def split_step(
    num_stages: int, batch: AttentionBatch, num_wanted: Tensor | None, *, sees_ahead: bool = False
) -> Iterator[StepPiece]:
    """Yield the pieces of a step, in order: one where tokens see others behind them."""
    num_tokens = batch.positions.numel()
    count = max(1, min(PIECES_PER_STAGE * num_stages, num_tokens // LEAST_TOKENS))
    if count == 1 or sees_ahead:
        yield StepPiece(range(num_tokens), batch, num_wanted)
        return
    for place in range(count):
        tokens = range(place * num_tokens // count, (place + 1) * num_tokens // count)
        yield _piece(tokens, batch, num_wanted)


def _piece(tokens: range, batch: AttentionBatch, num_wanted: Tensor | None) -> StepPiece:
    starts, ends = batch.query_start[:-1], batch.query_start[1:]
    chosen = torch.nonzero((ends > tokens.start) & (starts < tokens.stop)).squeeze(1)
    firsts = starts[chosen].clamp(min=tokens.start)
    lasts = ends[chosen].clamp(max=tokens.stop)
    num_later = ends[chosen] - lasts  # of the sequence, in pieces behind this one
    context_len = batch.context_len[chosen] - num_later
    lengths = lasts - firsts
    query_start = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    part = slice(tokens.start, tokens.stop)
    groups = [
        AttentionBatch(
            query_start, context_len, each.block_tables[chosen].contiguous(), each.slots[part],
            each.positions[part], int(lengths.max()), int(context_len.max()),
        )
        for each in (batch, *batch.others)
    ]  # fmt: skip
    first, *others = groups
    whole = AttentionBatch(
        query_start, context_len, first.block_tables, first.slots, first.positions,
        first.max_query_len, first.max_context_len, others=tuple(others), group_of=batch.group_of,
    )  # fmt: skip
    wanted = None
    if num_wanted is not None:
        wanted = (num_wanted[chosen] - num_later).clamp(min=0).minimum(lengths).to(torch.int32)
    return StepPiece(tokens, whole, wanted)


@dataclass(frozen=True, slots=True)
class StagedPass:
    """The forward pass of the first process. Implements `ForwardPass`."""

    own: ForwardPass
    """The first stage."""
    group: RankGroup
    caches: range
    """Of the first stage."""
    adapters: LedAdapters | None = None

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        kv_caches: Sequence[tuple[Tensor, Tensor]],
        num_wanted: Tensor | None = None,
        adapters: StepAdapters | None = None,
        content: StepContent | None = None,
    ) -> Tensor:
        next_stage, results = self.group.next_stage, self.group.results
        assert next_stage is not None and results is not None
        num_pieces, states = 0, None
        with self.group.uninterrupted():
            sees_ahead = content is not None and content.key_ends is not None
            num_stages = self.group.shape.num_stages
            for piece in split_step(num_stages, batch, num_wanted, sees_ahead=sees_ahead):
                part = slice(piece.tokens.start, piece.tokens.stop)
                ids, own = token_ids[part], of_stage(piece.batch, self.caches)
                used = adapters
                if used is not None:
                    used = used._replace(of_token=used.of_token[part])
                brought = None if content is None else _content_of(content, piece.tokens)
                command = asked(
                    ids, positions[part], piece.batch, piece.num_wanted, self.adapters, used,
                    None if brought is None else brought._replace(placed=None),
                )  # fmt: skip
                states = self.own(ids, positions[part], own, kv_caches, None, used, brought)
                next_stage.send(with_states(command, piece.tokens.start, states))
                num_pieces += 1
            assert states is not None
            out = torch.empty((len(token_ids), states.shape[1]), dtype=states.dtype)
            results.receive(num_pieces, out)
        return out


def _content_of(content: StepContent, tokens: range) -> StepContent:
    """Return what some of a step's tokens have of what it brings from outside."""
    part, (placed, rotations, key_ends) = slice(tokens.start, tokens.stop), content
    if placed is not None:
        is_here = (placed.tokens >= tokens.start) & (placed.tokens < tokens.stop)
        placed = PlacedRows(placed.tokens[is_here] - tokens.start, placed.rows[is_here])
    return StepContent(
        placed,
        None if rotations is None else Rotations(rotations.rows[part], rotations.table),
        None if key_ends is None else key_ends[part],
    )


def of_stage(batch: AttentionBatch, caches: range) -> AttentionBatch:
    """Return a batch with the groups of a stage's own caches."""
    if not batch.group_of:
        return batch
    own = batch.group_of[caches.start : caches.stop]
    return AttentionBatch(
        batch.query_start, batch.context_len, batch.block_tables, batch.slots, batch.positions,
        batch.max_query_len, batch.max_context_len, others=batch.others, group_of=own,
    )  # fmt: skip


def with_states(command: RankCommand, first_row: int, states: Tensor) -> RankCommand:
    """Return what the next stage is to do: `command`, with the states of its tokens, which are the
    step's from `first_row` on."""
    return RankCommand(Kind.STAGE, (first_row, *command.numbers), (states, *command.tensors))


def run_stage(
    run: ForwardPass,
    command: RankCommand,
    kv_caches: Sequence[tuple[Tensor, Tensor]],
    caches: range,
    adapters: FollowedAdapters,
    *,
    is_last: bool,
) -> tuple[RankCommand, int, Tensor]:
    """Compute a later stage's part of a piece. Returns what was asked of the stage without the
    states, the piece's first row, and the stage's states."""
    (first_row, *numbers), (states, *tensors) = command.numbers, command.tensors
    assert states is not None
    plain = RankCommand(Kind.FORWARD, tuple(numbers), tuple(tensors))
    token_ids, batch, num_wanted, used, brought = pass_of(plain, adapters)
    placed = PlacedRows(torch.arange(len(states)), states)
    content = StepContent(placed) if brought is None else brought._replace(placed=placed)
    found = run(
        token_ids, batch.positions, of_stage(batch, caches), kv_caches,
        num_wanted if is_last else None, used, content,
    )  # fmt: skip
    return plain, first_row, found
