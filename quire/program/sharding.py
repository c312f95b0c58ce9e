"""The pass that divides a program among ranks: each holds some of the outputs of every matrix, and
gathers what the others computed.

A matrix is divided by outputs alone, so every sum is added up by one rank, in the order in which
one process would have added it, and any number of ranks gives the same bits. Attention is divided
by whole heads, with their part of the cache. What cannot be divided (a norm over all heads, latent
attention) every rank computes for itself, from gathered values.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.common.frozen_record import replace
from quire.program import operations as ops
from quire.program.operations import Program

UNIT = 16
"""Outputs that stay together where there are enough: a panel of the CPU's kernels."""
Ranges = tuple[range, ...]


@dataclass(frozen=True, slots=True)
class Shares:
    """What one rank holds of the weights; numbers that are absent, all of it."""

    linears: dict[int, Ranges] = field(default_factory=dict)
    """Outputs of each projection."""
    vectors: dict[int, range] = field(default_factory=dict)
    tokens: range | None = None
    """Rows of the tokens' table, and of the head; None: all."""


def split(count: int, num_ranks: int) -> list[range] | None:
    """Return each rank's part, as even as can be; None where there is not one for each."""
    unit = UNIT if count >= UNIT * num_ranks else 1
    if count < num_ranks:
        return None
    num_units = -(-count // unit)
    ends = [min(count, unit * (rank * num_units // num_ranks)) for rank in range(num_ranks + 1)]
    ends[-1] = count
    return [range(start, end) for start, end in itertools.pairwise(ends)]


def split_heads(heads: ops.Heads, num_ranks: int) -> list[tuple[range, range]] | None:
    """Return each rank's queries and keys: whole groups, or, of fewer groups than ranks, parts of
    one, whose keys several ranks hold. None where a rank would have no query."""
    group = heads.num_queries // heads.num_keys
    if num_ranks <= heads.num_keys:
        parts = split_evenly(heads.num_keys, num_ranks)
        return [(range(part.start * group, part.stop * group), part) for part in parts]
    found: list[tuple[range, range]] = []
    for key, ranks in enumerate(split_evenly(num_ranks, heads.num_keys)):
        if len(ranks) > group:
            return None
        for part in split_evenly(group, len(ranks)):
            queries = range(key * group + part.start, key * group + part.stop)
            found.append((queries, range(key, key + 1)))
    return found


def split_evenly(count: int, num_parts: int) -> list[range]:
    """Return neighbouring ranges whose sizes differ by one at most."""
    ends = [part * count // num_parts for part in range(num_parts + 1)]
    return [range(start, end) for start, end in itertools.pairwise(ends)]


def shard(
    program: Program,
    rank: int,
    num_ranks: int,
    num_tokens: int | None,
    *,
    is_by_expert: bool = False,
) -> tuple[Program, Shares]:
    """Return a rank's program, and what it holds of the weights. `num_tokens` is the vocabulary's
    size; None keeps the tokens' table whole. With `is_by_expert`, ranks have different experts, as
    many each, in place of some outputs of each. Every rank's program gathers in the same places."""
    return _Sharding(program, rank, num_ranks, is_by_expert=is_by_expert).run(num_tokens)


def cache_heads(program: Program) -> list[int]:
    """Return how many KV heads each cache has."""
    found: dict[int, int] = {}
    for each in program.operations:
        if isinstance(each, ops.WriteKV):
            found[each.cache] = each.heads.num_keys
        elif isinstance(each, ops.WriteLatent):
            found[each.cache] = 1
    return [found[cache] for cache in sorted(found)]


class _Sharding:
    def __init__(self, program: Program, rank: int, num_ranks: int, *, is_by_expert: bool) -> None:
        self._program, self._rank, self._num_ranks = program, rank, num_ranks
        self._is_by_expert = is_by_expert
        self._widths = list(program.widths)
        self._parts: dict[int, Ranges] = {}
        """Of values that this rank has a part of, its columns of the whole."""
        self._whole: dict[int, int] = {}
        """Of those that were gathered, the whole value."""
        self._headed: set[int] = set()
        """Parts that are rows of whole heads."""
        self._operations: list[ops.Operation] = []
        self._shares = Shares()

    def run(self, num_tokens: int | None) -> tuple[Program, Shares]:
        tokens = None if num_tokens is None else split(num_tokens, self._num_ranks)
        if tokens is not None:
            self._shares = replace(self._shares, tokens=tokens[self._rank])
        for operation in self._program.operations:
            self._operations.append(self._divided(operation, num_tokens))
        result = self._gathered(self._program.result)
        program = replace(
            self._program,
            operations=tuple(self._operations),
            widths=tuple(self._widths),
            result=result,
        )
        return program, self._shares

    def _divided(self, operation: ops.Operation, num_tokens: int | None) -> ops.Operation:
        """Return what this rank computes of an operation; appends what must be gathered first."""
        match operation:
            case ops.Embed(of="token_ids") if self._shares.tokens is not None and num_tokens:
                return ops.EmbedGathered(
                    (), operation.outputs, operation.table, self._shares.tokens, num_tokens
                )
            case ops.Linear(weight=weight):
                self._divide_outputs(operation, weight)
            case ops.GatedLinear(weight=weight):
                width = self._widths[operation.outputs[0]]
                parts = split(width, self._num_ranks)
                if parts is not None:
                    part = parts[self._rank]
                    up = range(width + part.start, width + part.stop)
                    self._shares.linears[weight] = (part, up)
                    self._keep_part(operation.outputs[0], (part,))
            case ops.Experts():
                return self._experts(operation)
            case ops.Activate() if operation.inputs[0] in self._parts:
                self._keep_part(operation.outputs[0], self._parts[operation.inputs[0]])
                return operation
            case ops.HeadOperation(heads=heads) if operation.inputs[0] in self._headed:
                self._keep_part(operation.outputs[0], self._parts[operation.inputs[0]])
                self._headed.add(operation.outputs[0])
                return replace(operation, heads=self._own(heads))
            case ops.Attend() | ops.AttendAll() if operation.inputs[0] in self._headed:
                return self._attend(operation)
        return replace(operation, inputs=tuple(map(self._gathered, operation.inputs)))

    def _divide_outputs(self, operation: ops.Linear, weight: int) -> None:
        value = operation.outputs[0]
        heads, is_by_head = self._heads_of(value)
        if heads is None:
            parts = split(self._widths[value], self._num_ranks)
            ranges: Ranges | None = None if parts is None else (parts[self._rank],)
        elif is_by_head:
            ranges = self._head_ranges(heads)
            self._headed.add(value)
        else:
            ranges = self._even_ranges(heads)
        if ranges is not None:
            self._shares.linears[weight] = ranges
            self._keep_part(value, ranges)

    def _even_ranges(self, heads: ops.Heads) -> Ranges | None:
        """Return some of the outputs of queries, of keys and of values, wherever heads begin."""
        found, start = [], 0
        for width in (heads.query_width, heads.key_width, heads.key_width):
            parts = split(width, self._num_ranks)
            if parts is None:
                return None
            part = parts[self._rank]
            found.append(range(start + part.start, start + part.stop))
            start += width
        return tuple(found)

    def _head_ranges(self, heads: ops.Heads) -> Ranges:
        queries, keys = self._heads(heads)
        size, first_key = heads.head_dim, heads.num_queries
        starts = (queries, _moved(keys, first_key), _moved(keys, first_key + heads.num_keys))
        return tuple(range(part.start * size, part.stop * size) for part in starts)

    def _experts(self, operation: ops.Experts) -> ops.Operation:
        inputs = tuple(map(self._gathered, operation.inputs))
        value, count = operation.outputs[0], operation.routing.num_experts
        hidden, inner = self._widths[value], operation.inner
        if self._is_by_expert:
            held = split_evenly(count, self._num_ranks)[self._rank]
            for weight, width in ((operation.up, 2 * inner), (operation.down, hidden)):
                self._shares.linears[weight] = (range(held.start * width, held.stop * width),)
            return replace(operation, inputs=inputs, held=held, columns=range(inner))
        if min(hidden, inner) < UNIT * self._num_ranks:
            return replace(operation, inputs=inputs)  # no panel for each
        parts, columns = split(hidden, self._num_ranks), split(inner, self._num_ranks)
        assert parts is not None and columns is not None
        part, own = parts[self._rank], columns[self._rank]
        starts = range(0, count * 2 * inner, inner)  # each expert's gate, and what it gates
        self._shares.linears[operation.up] = tuple(_moved(own, start) for start in starts)
        self._shares.linears[operation.down] = tuple(
            _moved(part, expert * hidden) for expert in range(count)
        )
        self._keep_part(value, (part,))
        return replace(operation, inputs=inputs, held=range(count), columns=own)

    def _attend(self, operation: ops.Attend | ops.AttendAll) -> ops.Operation:
        heads, value = operation.heads, operation.outputs[0]
        queries, _ = self._heads(heads)
        size = heads.head_dim
        self._keep_part(value, (range(queries.start * size, queries.stop * size),))
        if isinstance(operation, ops.Attend) and operation.sinks is not None:
            self._shares.vectors[operation.sinks] = queries
        return replace(operation, heads=self._own(heads))

    def _heads_of(self, value: int) -> tuple[ops.Heads | None, bool]:
        """Return the heads that a value is a row of, if it is one, and whether ranks can go on with
        heads of their own as far as attention."""
        heads, is_by_head = None, True
        for operation in self._program.operations:
            if value not in operation.inputs:
                continue
            match operation:
                case ops.NormHeads(norm=norm):
                    is_by_head = is_by_head and norm.size == operation.heads.head_dim
                case ops.HeadOperation():
                    pass
                case ops.Attend():
                    is_by_head = is_by_head and operation.value_size is None
                case ops.AttendAll():
                    is_by_head = is_by_head and operation.bias is None
                case _:
                    return None, False
            heads, value = operation.heads, operation.outputs[0]
            if isinstance(operation, ops.Attend | ops.AttendAll):
                return heads, is_by_head and split_heads(heads, self._num_ranks) is not None
        return None, False

    def _heads(self, heads: ops.Heads) -> tuple[range, range]:
        found = split_heads(heads, self._num_ranks)
        assert found is not None, "heads that cannot be divided"
        return found[self._rank]

    def _own(self, heads: ops.Heads) -> ops.Heads:
        queries, keys = self._heads(heads)
        return ops.Heads(len(queries), len(keys), heads.head_dim)

    def _keep_part(self, value: int, ranges: Ranges) -> None:
        self._parts[value] = ranges
        self._widths[value] = sum(map(len, ranges))

    def _gathered(self, value: int) -> int:
        """Return the whole of a value, gathered where this rank has a part of it."""
        if value not in self._parts:
            return value
        if value not in self._whole:
            self._whole[value] = len(self._widths)
            width = self._program.widths[value]
            self._widths.append(width)
            outputs = (self._whole[value],)
            self._operations.append(ops.Gather((value,), outputs, self._parts[value], width))
        return self._whole[value]


def _moved(part: range, by: int) -> range:
    return range(part.start + by, part.stop + by)


def within(parts: Sequence[int], ranges: Ranges) -> list[tuple[int, range]]:
    """Return where ranges over parts of so many outputs, one after the other, lie in each: the
    part's place, and its own outputs."""
    found = []
    for chosen in ranges:
        start = 0
        for place, size in enumerate(parts):
            first, end = max(chosen.start, start), min(chosen.stop, start + size)
            if first < end:
                found.append((place, range(first - start, end - start)))
            start += size
    return found
