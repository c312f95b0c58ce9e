"""The pass that divides a program among the stages of a pipeline: neighbouring operations each, and
what crosses from one to the next is the residual stream alone.

A stage after the first computes rows from outside (`Take`): what the stage before it gave. No
operation is changed, so any number of stages gives the same bits. Weights keep their numbers, and
caches are numbered anew, from 0 in each stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.common.frozen_record import replace
from quire.program import operations as ops
from quire.program.operations import Program


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage's part of a program, and which of the weights it needs, by their numbers."""

    program: Program
    caches: range
    """Of the whole program's."""
    linears: frozenset[int] = field(default_factory=frozenset)
    vectors: frozenset[int] = field(default_factory=frozenset)
    ropes: frozenset[int] = field(default_factory=frozenset)
    biases: frozenset[int] = field(default_factory=frozenset)

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding, and the head."""
        return not isinstance(self.program.operations[0], ops.Take)


def most_stages(program: Program) -> int:
    """Return into how many stages a program can be cut."""
    return len(_places(program)) + 1


def cut_into_stages(program: Program, sizes: Sequence[int], num_stages: int) -> list[Stage]:
    """Return so many stages, at most `most_stages`, whose weights are as even as can be; `sizes` of
    all projections. The head counts with the first stage, which computes it."""
    costs = [sum(sizes[number] for number in linears_of(each)) for each in program.operations]
    if program.head.weight is not None:
        costs[0] += sizes[program.head.weight]
    places = [0, *_places(program), len(costs)]
    sums = [sum(costs[:place]) for place in places]
    ends = _even(sums, num_stages)
    bounds = [places[end] for end in (0, *ends)]
    return [_stage(program, first, last) for first, last in itertools.pairwise(bounds)]


def _even(sums: Sequence[int], num_parts: int) -> list[int]:
    """Return where to end each of so many parts of neighbours, by the costs of all before, so that
    the largest costs as little as can be."""
    last = len(sums) - 1
    best: list[list[tuple[int, tuple[int, ...]]]] = [
        [(sums[end], (end,)) for end in range(last + 1)]
    ]
    for count in range(2, num_parts + 1):
        row: list[tuple[int, tuple[int, ...]]] = []
        for end in range(last + 1):
            options = [
                (max(best[-1][start][0], sums[end] - sums[start]), start)
                for start in range(count - 1, end)
            ]
            cost, start = min(options, default=(sums[-1] + 1, 0))
            row.append((cost, (*best[-1][start][1], end)))
        best.append(row)
    return list(best[-1][last][1])


def _places(program: Program) -> list[int]:
    """Return before which operations a program can be cut: one value is alive, no cache is used on
    both sides, and between two places, and at both ends, there is attention. What a step brings
    from outside beside the stream is for the first stage."""
    operations = program.operations
    last_read = {program.result: len(operations)}
    for index, operation in enumerate(operations):
        last_read |= dict.fromkeys(operation.inputs, index)
    last_read[program.result] = len(operations)
    last_use = {
        cache: index for index, each in enumerate(operations) if (cache := _cache(each)) is not None
    }
    num_left = sum(isinstance(each, ops.Attend | ops.AttendAll) for each in operations)
    num_placed = sum(isinstance(each, ops.AddPlaced) for each in operations)
    found, alive, open_caches, has_attention = [], set[int](), set[int](), False
    for index, operation in enumerate(operations):
        is_possible = len(alive) == 1 and not open_caches and has_attention and num_left > 0
        if is_possible and not num_placed:
            found.append(index)
            has_attention = False
        alive |= set(operation.outputs)
        alive = {value for value in alive if last_read.get(value, -1) > index}
        cache = _cache(operation)
        open_caches |= set() if cache is None else {cache}
        open_caches = {each for each in open_caches if last_use[each] > index}
        if isinstance(operation, ops.Attend | ops.AttendAll):
            has_attention, num_left = True, num_left - 1
        num_placed -= isinstance(operation, ops.AddPlaced)
    return found


def _stage(program: Program, first: int, last: int) -> Stage:
    operations = program.operations[first:last]
    written = {value for each in operations for value in each.outputs}
    read = {value for each in operations for value in each.inputs}
    later = {value for each in program.operations[last:] for value in each.inputs}
    entry: tuple[ops.Operation, ...] = ()
    if first > 0:
        (stream,) = read - written
        entry = (ops.Take((), (stream,)),)
    result = program.result
    if last < len(program.operations):
        (result,) = written & later
    used = sorted({cache for each in operations if (cache := _cache(each)) is not None})
    caches = range(used[0], used[-1] + 1) if used else range(0)
    assert len(used) == len(caches), "a stage whose caches are no neighbours"
    return Stage(
        replace(
            program,
            operations=(*entry, *(_moved(each, caches.start) for each in operations)),
            result=result,
            head=program.head if first == 0 else ops.Head(None, None, None),
        ),
        caches,
        frozenset(number for each in operations for number in linears_of(each)),
        frozenset(number for each in operations for number in _vectors_of(each))
        | frozenset(norm_vectors(program.head.norm) if first == 0 else ()),
        frozenset(number for each in operations for number in _ropes_of(each)),
        frozenset(
            each.bias
            for each in operations
            if isinstance(each, ops.AttendAll) and each.bias is not None
        ),
    )


def _cache(operation: ops.Operation) -> int | None:
    match operation:
        case ops.WriteKV(cache=cache) | ops.WriteLatent(cache=cache) | ops.Attend(cache=cache):
            return cache
    return None


def _moved(operation: ops.Operation, by: int) -> ops.Operation:
    if isinstance(operation, ops.WriteKV | ops.WriteLatent | ops.Attend):
        return replace(operation, cache=operation.cache - by)
    return operation


def linears_of(operation: ops.Operation) -> tuple[int, ...]:
    """Return the numbers of the weights of an operation."""
    match operation:
        case ops.Linear(weight=weight) | ops.GatedLinear(weight=weight):
            return (weight,)
        case ops.HeadLinear(weight=weight):
            return (weight,)
        case ops.Experts(router=router, up=up, down=down):
            return router, up, down
    return ()


def norm_vectors(norm: ops.NormWeights | None) -> tuple[int, ...]:
    """Return the numbers of the vectors of a norm."""
    if norm is None:
        return ()
    return (norm.weight,) if norm.bias is None else (norm.weight, norm.bias)


def _vectors_of(operation: ops.Operation) -> tuple[int, ...]:
    match operation:
        case ops.Norm(norm=norm) | ops.NormHeads(norm=norm) | ops.WriteLatent(norm=norm):
            return norm_vectors(norm)
        case ops.Attend(sinks=int(sinks)):
            return (sinks,)
        case ops.Experts(bias=int(bias)):
            return (bias,)
    return ()


def _ropes_of(operation: ops.Operation) -> tuple[int, ...]:
    match operation:
        case ops.Rope(table=int(table)):
            return (table,)
        case ops.RotateTails(table=table) | ops.WriteLatent(table=table):
            return (table,)
    return ()
