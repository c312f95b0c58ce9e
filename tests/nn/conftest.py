"""A small driver for models in tests: one sequence, KV blocks laid out out of order, chunks of any size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from quire.common.numbers import ceil_div
from quire.kernels.interface import AttentionBatch
from quire.nn.context import StepContext
from quire.nn.decoder import DecoderModel

BLOCK_SIZE = 16


@dataclass
class Driver:
    """Feeds one sequence to a model through a paged cache of its own."""

    model: DecoderModel
    max_len: int
    length: int = 0
    block_size: int = BLOCK_SIZE
    caches: list[tuple[Tensor, Tensor]] = field(init=False)
    table: Tensor = field(init=False)

    def __post_init__(self) -> None:
        num_blocks = ceil_div(self.max_len, self.block_size)
        # Backwards, so that nothing passes that forgets the table; NaN, so that no slot is read before it is written.
        self.table = torch.arange(num_blocks - 1, -1, -1, dtype=torch.int32)
        self.caches = [
            tuple(
                torch.full(
                    (num_blocks, layer.num_kv_heads, self.block_size, layer.head_dim), torch.nan, dtype=self.model.dtype
                )
                for _ in range(2)
            )  # type: ignore[misc]
            for layer in self.model.spec.kv_layers
        ]

    def feed(self, token_ids: Sequence[int]) -> Tensor:
        """Compute a chunk; float32 logits [chunk, V]."""
        positions = torch.arange(self.length, self.length + len(token_ids))
        blocks = self.table[positions // self.block_size].long()
        self.length += len(token_ids)
        batch = AttentionBatch(
            query_start=torch.tensor([0, len(token_ids)], dtype=torch.int32),
            context_len=torch.tensor([self.length], dtype=torch.int32),
            block_tables=self.table[None],
            slots=blocks * self.block_size + positions % self.block_size,
            positions=positions,
            max_query_len=len(token_ids),
            max_context_len=self.length,
        )
        with torch.inference_mode():
            hidden = self.model.forward(torch.tensor(token_ids), positions, StepContext(batch, self.caches))
            return self.model.logits(hidden)

    def feed_chunks(self, token_ids: Sequence[int], sizes: Iterable[int]) -> Tensor:
        """Compute consecutive chunks of the given sizes; the rest token by token."""
        rows, start = [], 0
        for size in (*sizes, *[1] * len(token_ids)):
            if chunk := token_ids[start : start + size]:
                rows.append(self.feed(chunk))
            start += size
        return torch.cat(rows)

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Greedy continuation of a prompt."""
        out = [int(self.feed(prompt)[-1].argmax())]
        while len(out) < num_tokens:
            out.append(int(self.feed(out[-1:])[-1].argmax()))
        return out


@pytest.fixture
def drive() -> Callable[..., Driver]:
    """`drive(model, max_len)` gives a fresh driver."""
    return Driver
