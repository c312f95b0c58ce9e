"""A model of which each rank holds a part: what rank 0 has in place of the forward pass and the
head, and what the others do when it asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial

import torch
from torch import Tensor

from quire.kernels.interface import AttentionBatch, ForwardPass
from quire.kernels.lora import StepAdapters
from quire.kernels.placed import StepContent
from quire.kernels.sampling import Draws
from quire.nn.head import DividedHead
from quire.parallel.group import RankGroup
from quire.parallel.shared_memory import RankCommand


class Kind(IntEnum):
    """Of a command."""

    FORWARD = 0
    LOGITS = 1
    ARGMAX = 2
    COPY_BLOCKS = 3
    STAGE = 4
    READ_BLOCKS = 5
    WRITE_BLOCKS = 6


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
        assert adapters is None and content is None, "neither is divided among ranks"
        return self.group.call(
            asked(token_ids, positions, batch, num_wanted),
            lambda: self.own(token_ids, positions, batch, kv_caches, num_wanted),
        )


def asked(
    token_ids: Tensor,
    positions: Tensor,
    batch: AttentionBatch,
    num_wanted: Tensor | None,
) -> RankCommand:
    """Return a pass as a command."""
    groups = (batch, *batch.others)
    tables = [tensor for each in groups for tensor in (each.slots, each.block_tables)]
    return RankCommand(
        Kind.FORWARD,
        (batch.max_query_len, batch.max_context_len, *batch.group_of),
        (
            token_ids, positions, batch.query_start, batch.context_len, num_wanted,
            *tables,
        ),
    )  # fmt: skip


def forward(
    run: ForwardPass, command: RankCommand, kv_caches: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Run a pass that rank 0 asks for."""
    token_ids, batch, num_wanted = batch_of(command)
    return run(token_ids, batch.positions, batch, kv_caches, num_wanted)


def batch_of(command: RankCommand) -> tuple[Tensor, AttentionBatch, Tensor | None]:
    """Return the tokens of a pass that is a command, and which of them are wanted."""
    max_query_len, max_context_len, *group_of = command.numbers
    token_ids, positions, query_start, context_len, wanted, *tables = command.tensors
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
    return token_ids, batch, wanted
