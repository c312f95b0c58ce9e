"""One order of bytes for the keys and values of some tokens, whatever blocks they come from or go
to.

Producer and consumer may differ in block size, and in how many ranks hold the heads. So what
travels is laid out by layers: of each layer, one behind the other, its tensors (keys, then values;
one where a row is both), each [tokens, heads * row bytes]. A layer with a sliding window may have
fewer tokens than others, the last ones. No byte of a row is changed: int8 and fp8 travel with their
scales.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.common.numbers import align_up, ceil_div

Payload = NDArray[np.uint8]

MIN_CHUNK_BYTES = 512 << 10
"""Of a transfer: larger ones gain little, smaller ones cost several times as much a byte."""
_ALIGNMENT = 16
"""Tokens of a chunk are a multiple of this."""


class TensorShape(NamedTuple):
    """One tensor of the pool, [blocks, heads, block size, row]."""

    num_heads: int
    row_bytes: int


class Chunk(NamedTuple):
    """Tokens [first, end), of each layer those that there are."""

    first: int
    end: int
    data: Payload


class BlockLayout:
    """Blocks as `BlockMemory` reads and writes them, and which layers are in them."""

    def __init__(
        self,
        block_size: int,
        tensors: Sequence[TensorShape],
        layer_tensors: Sequence[Sequence[int]],
        group_of: Sequence[int],
    ) -> None:
        """A block has the tensors' parts one behind the other. `layer_tensors` has the numbers of
        each layer's tensors, `group_of` its group: layers of several groups use the same ones, in
        blocks of their own."""
        self.block_size = block_size
        self.group_of = tuple(group_of)
        self.num_groups = max(group_of, default=-1) + 1
        self._tensors, self._layer_tensors = tuple(tensors), tuple(map(tuple, layer_tensors))
        sizes = [each.num_heads * each.row_bytes * block_size for each in tensors]
        self._starts = [sum(sizes[:number]) for number in range(len(sizes))]
        self.block_bytes = sum(sizes)

    @property
    def widths(self) -> list[tuple[int, ...]]:
        """Of each layer, bytes of a token in each of its tensors."""
        return [
            tuple(
                self._tensors[number].num_heads * self._tensors[number].row_bytes for number in own
            )
            for own in self._layer_tensors
        ]

    @property
    def bytes_per_token(self) -> int:
        """Of all layers together."""
        return sum(map(sum, self.widths))

    def parts(self, group: int) -> Iterator[tuple[int, int]]:
        """Yield (layer, number among its tensors) of all that a group's blocks have."""
        for layer, own in enumerate(self._layer_tensors):
            if self.group_of[layer] == group:
                yield from ((layer, number) for number in range(len(own)))

    def rows(self, blocks: Payload, layer: int, number: int) -> Payload:
        """Return a copy of a layer's rows in some blocks [P, block bytes]: [P * size, width]."""
        part, shape = self._part(blocks, layer, number)
        swapped = part.reshape(len(blocks), shape.num_heads, self.block_size, shape.row_bytes)
        width = shape.num_heads * shape.row_bytes
        return swapped.transpose(0, 2, 1, 3).reshape(len(blocks) * self.block_size, width)

    def put_rows(self, blocks: Payload, layer: int, number: int, rows: Payload) -> None:
        """Write what `rows` returned into as many blocks."""
        part, shape = self._part(blocks, layer, number)
        swapped = rows.reshape(len(blocks), self.block_size, shape.num_heads, shape.row_bytes)
        part[...] = swapped.transpose(0, 2, 1, 3).reshape(len(blocks), -1)

    def _part(self, blocks: Payload, layer: int, number: int) -> tuple[Payload, TensorShape]:
        tensor = self._layer_tensors[layer][number]
        shape, start = self._tensors[tensor], self._starts[tensor]
        end = start + shape.num_heads * shape.row_bytes * self.block_size
        return blocks[:, start:end], shape


def chunk_bounds(num_tokens: int, bytes_per_token: int) -> list[tuple[int, int]]:
    """Divide tokens into as many chunks of at least `MIN_CHUNK_BYTES` as there can be; one, where
    all of them are less."""
    size = align_up(max(1, ceil_div(MIN_CHUNK_BYTES, max(1, bytes_per_token))), _ALIGNMENT)
    count = max(1, num_tokens // size)
    bounds = [*(number * size for number in range(count)), num_tokens]
    return [] if num_tokens == 0 else list(pairwise(bounds))


def encode(
    layout: BlockLayout, groups: Sequence[Payload], starts: Sequence[int], num_tokens: int
) -> list[Chunk]:
    """Lay out the first `num_tokens` tokens of blocks. `groups` has each group's blocks from the
    token in `starts` on, [P, block bytes]."""
    rows = {
        (layer, number): layout.rows(blocks, layer, number)
        for group, blocks in enumerate(groups)
        for layer, number in layout.parts(group)
    }
    chunks: list[Chunk] = []
    for first, end in chunk_bounds(num_tokens, layout.bytes_per_token):
        parts = []
        for (layer, _), each in sorted(rows.items(), key=lambda item: item[0]):
            start = starts[layout.group_of[layer]]
            parts.append(each[max(0, first - start) : max(0, end - start)].reshape(-1))
        chunks.append(Chunk(first, end, np.concatenate(parts)))
    return chunks


def decode(
    layout: BlockLayout, chunks: Sequence[Chunk], starts: Sequence[int], bounds: tuple[int, int]
) -> tuple[list[Payload], list[int]]:
    """Return each group's blocks of the tokens in `bounds`, multiples of the block size, as far as
    chunks have them, and for each group the token of the first of its blocks. `starts` has the
    first token that there is of each layer. Raises ValueError for chunks of other sizes."""
    first, end = bounds
    widths, size = layout.widths, layout.block_size
    rows: dict[tuple[int, int], list[Payload]] = {}
    for chunk in chunks:
        place = 0
        for layer, of_tensors in enumerate(widths):
            at = min(max(chunk.first, starts[layer]), chunk.end)
            for number, width in enumerate(of_tensors):
                num_bytes = (chunk.end - at) * width
                own = chunk.data[place : place + num_bytes].reshape(chunk.end - at, width)
                rows.setdefault((layer, number), []).append(
                    own[max(0, first - at) : max(0, end - at)]
                )
                place += num_bytes
        if place != len(chunk.data):
            raise ValueError(f"{len(chunk.data)} bytes where there should be {place}")
    groups, group_starts = [], []
    for group in range(layout.num_groups):
        parts = list(layout.parts(group))
        begun = max([first, *(starts[layer] for layer, _ in parts)])
        begun = min(align_up(begun, size), end)
        blocks = np.empty(((end - begun) // size, layout.block_bytes), np.uint8)
        for layer, number in parts:
            found = np.concatenate(rows[layer, number])
            layout.put_rows(blocks, layer, number, found[len(found) - (end - begun) :])
        groups.append(blocks)
        group_starts.append(begun)
    return groups, group_starts
