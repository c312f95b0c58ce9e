"""A model of which each rank holds a part: what rank 0 has in place of the forward pass and the
head, and what the others do when it asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.interface import AttentionBatch, ForwardPass
from quire.kernels.lora import StepAdapters
from quire.kernels.placed import PlacedRows, Rotations, StepContent
from quire.kernels.sampling import Draws
from quire.nn.head import DividedHead
from quire.parallel.adapters import FollowedAdapters, LedAdapters
from quire.parallel.group import RankGroup
from quire.parallel.shared_memory import Kind, RankCommand


@dataclass(frozen=True, slots=True)
class LedHead:
    """`DividedHead` on rank 0. Implements `OutputHead`."""

    own: DividedHead
    group: RankGroup

    @property
    def num_outputs(self) -> int:
        return self.own.num_outputs

    def logits(self, states: Tensor) -> Tensor:
        parts = [
            self.group.call(RankCommand(Kind.LOGITS, (), (part,)), partial(self.own.logits, part))
            for part in self._fitting(states)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def argmax(self, states: Tensor) -> tuple[Tensor, Tensor]:
        parts = [
            self.group.call(RankCommand(Kind.ARGMAX, (), (part,)), partial(self.own.argmax, part))
            for part in self._fitting(states)
        ]
        ids, values = zip(*parts, strict=True)
        return torch.cat(ids), torch.cat(values)

    def draws(self, states: Tensor, draws: Draws) -> tuple[Tensor, Tensor, Tensor] | None:
        return None

    def _fitting(self, states: Tensor) -> Sequence[Tensor]:
        """Rows as many at a time as a command holds."""
        row_bytes = max(1, states.shape[1] * states.element_size())
        at_once = max(1, self.group.memory.command_bytes // 2 // row_bytes)
        return [states[first : first + at_once] for first in range(0, len(states), at_once)]


@dataclass(frozen=True, slots=True)
class LedPass:
    """The forward pass on rank 0. Implements `ForwardPass`."""

    own: ForwardPass
    group: RankGroup
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
        command = asked(token_ids, positions, batch, num_wanted, self.adapters, adapters, content)
        return self.group.call(
            command,
            lambda: self.own(token_ids, positions, batch, kv_caches, num_wanted, adapters, content),
        )


def asked(
    token_ids: Tensor,
    positions: Tensor,
    batch: AttentionBatch,
    num_wanted: Tensor | None,
    led: LedAdapters | None = None,
    adapters: StepAdapters | None = None,
    content: StepContent | None = None,
) -> RankCommand:
    """Return a pass as a command. Adapters that the others lack are loaded first."""
    used: tuple[Tensor, Tensor] | tuple[None, None] = None, None
    if adapters is not None:
        assert led is not None, "adapters that the other processes do not know"
        slots = led.slots(adapters.adapters)
        used = torch.tensor(slots, dtype=torch.int32), adapters.of_token
    groups = (batch, *batch.others)
    tables = [tensor for each in groups for tensor in (each.slots, each.block_tables)]
    return RankCommand(
        Kind.FORWARD,
        (batch.max_query_len, batch.max_context_len, *batch.group_of),
        (
            token_ids, positions, batch.query_start, batch.context_len, num_wanted, *used,
            *_parts_of(content), *tables,
        ),
    )  # fmt: skip


def forward(
    run: ForwardPass,
    command: RankCommand,
    kv_caches: Sequence[tuple[Tensor, Tensor]],
    adapters: FollowedAdapters,
) -> Tensor:
    """Run a pass that rank 0 asks for."""
    asked_for = pass_of(command, adapters)
    batch = asked_for.batch
    return run(
        asked_for.token_ids, batch.positions, batch, kv_caches, asked_for.num_wanted,
        asked_for.adapters, asked_for.content,
    )  # fmt: skip


class AskedPass(NamedTuple):
    """A forward pass that is a command."""

    token_ids: Tensor
    batch: AttentionBatch
    num_wanted: Tensor | None
    adapters: StepAdapters | None
    content: StepContent | None


def pass_of(command: RankCommand, adapters: FollowedAdapters) -> AskedPass:
    """Return what a command asks for."""
    max_query_len, max_context_len, *group_of = command.numbers
    token_ids, positions, query_start, context_len, wanted, used, of_token, *rest = command.tensors
    content, tables = _content_of(rest[:NUM_PARTS]), rest[NUM_PARTS:]
    assert token_ids is not None and positions is not None
    assert query_start is not None and context_len is not None
    batches = []
    for slots, block_tables in zip(tables[::2], tables[1::2], strict=True):
        assert slots is not None and block_tables is not None
        batches.append(
            AttentionBatch(
                query_start, context_len, block_tables, slots, positions, max_query_len,
                max_context_len,
            )
        )  # fmt: skip
    first, *others = batches
    batch = AttentionBatch(
        query_start, context_len, first.block_tables, first.slots, positions, max_query_len,
        max_context_len, others=tuple(others), group_of=tuple(group_of),
    )  # fmt: skip
    return AskedPass(token_ids, batch, wanted, adapters.of_step(used, of_token), content)


NUM_PARTS = 4
"""Tensors of what a step brings from outside."""


def _parts_of(content: StepContent | None) -> tuple[Tensor | None, ...]:
    """Return what a step brings from outside as tensors; of the table that turns heads, the rows of
    its tokens alone."""
    if content is None:
        return (None,) * NUM_PARTS
    placed, rotations = content.placed, content.rotations
    return (
        None if placed is None else placed.tokens,
        None if placed is None else placed.rows,
        None if rotations is None else rotations.table.index_select(0, rotations.rows),
        content.key_ends,
    )


def _content_of(parts: Sequence[Tensor | None]) -> StepContent | None:
    tokens, rows, table, key_ends = parts
    if all(each is None for each in parts):
        return None
    return StepContent(
        None if tokens is None or rows is None else PlacedRows(tokens, rows),
        None if table is None else Rotations(torch.arange(len(table)), table),
        key_ends,
    )
