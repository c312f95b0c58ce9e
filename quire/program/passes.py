"""Rewrites of a program that change no bit of a wanted token's hidden states, nor of a cache.

`select_wanted` leaves out work of the last layer that no wanted token needs; `fuse_add_norm` and
`fuse_heads` save passes over memory. A back end picks those that it has kernels for.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.common.frozen_record import replace
from quire.program import operations as ops
from quire.program.operations import Program

Operations = tuple[ops.Operation, ...]


def make_adaptable(program: Program, embedding: int | None = None) -> Program:
    """Projections, experts and the embedding of tokens, where that has a number, take what adapters
    add to them. The head is no operation: it is left to its owner."""
    operations: list[ops.Operation] = []
    widths, renamed = list(program.widths), dict[int, int]()
    for each in program.operations:
        inputs = tuple(renamed.get(value, value) for value in each.inputs)
        operation = replace(each, inputs=inputs)
        if isinstance(operation, ops.Linear | ops.GatedLinear | ops.Experts):
            operation = replace(operation, is_adaptable=True)
        operations.append(operation)
        if isinstance(operation, ops.Embed) and operation.of == "token_ids":
            if embedding is None:
                continue
            (value,) = operation.outputs
            renamed[value] = len(widths)
            widths.append(widths[value])
            operations.append(ops.AdaptEmbedding((value,), (renamed[value],), embedding))
    return replace(program, operations=tuple(operations), widths=tuple(widths))


def fuse_add_norm(program: Program) -> Program:
    """Fuse each sum that is normalised at once into one operation."""
    fused: list[ops.Operation] = []
    for operation in program.operations:
        last = fused[-1] if fused else None
        if (
            isinstance(operation, ops.Norm)
            and isinstance(last, ops.Add)
            and operation.inputs == last.outputs
        ):
            outputs = (*operation.outputs, *last.outputs)
            fused[-1] = ops.AddNorm(last.inputs[::-1], outputs, operation.norm)
        else:
            fused.append(operation)
    return replace(program, operations=tuple(fused))


def fuse_heads(
    program: Program, is_supported: Callable[[ops.PrepareHeads], bool] = lambda _: True
) -> Program:
    """Operations on one row of heads that follow one another become one,
    where `is_supported` takes it."""
    fused: list[ops.Operation] = []
    run: list[ops.NormHeads | ops.Rope | ops.WriteKV] = []

    def end_run() -> None:
        if run:
            whole = ops.PrepareHeads(run[0].inputs, run[-1].outputs, run[0].heads, tuple(run))
            fused.extend([whole] if is_supported(whole) else run)
            run.clear()

    for operation in program.operations:
        if not isinstance(operation, ops.NormHeads | ops.Rope | ops.WriteKV):
            end_run()
            fused.append(operation)
            continue
        if run and operation.inputs != run[-1].outputs:
            end_run()
        run.append(operation)
    end_run()
    return replace(program, operations=tuple(fused))


def select_wanted(program: Program, alignment: int | None = None) -> Program:
    """Prune the tokens whose hidden states are not wanted behind the last write to a cache; the
    others' are those before it.

    With an `alignment`, queries are projected for these tokens alone, if keys begin at a multiple
    of so many columns.
    """
    start = 1 + max(
        (
            index
            for index, each in enumerate(program.operations)
            if isinstance(each, ops.WriteKV | ops.WriteLatent)
        ),
        default=-1,
    )
    if start == 0 or any(isinstance(each, ops.Join) for each in program.operations[start:]):
        return program  # or what is kept of all tokens is part of the result
    widths = list(program.widths)
    before, after = program.operations[:start], program.operations[start:]
    if alignment is not None and isinstance(before[-1], ops.HeadOperation):
        before, after = _project_apart(before, after, widths, alignment)
    written = {value for operation in before for value in operation.outputs}
    crossing = sorted(written & {value for operation in after for value in operation.inputs})
    names = dict(zip(crossing, range(len(widths), len(widths) + len(crossing)), strict=True))
    widths += [widths[value] for value in crossing]
    selects = (ops.Select((value,), (name,)) for value, name in names.items())
    narrow = (
        replace(each, inputs=tuple(names.get(value, value) for value in each.inputs))
        for each in after
    )
    scatter = ops.Scatter((_stream_before(program, start), program.result), (len(widths),))
    widths.append(widths[program.result])
    operations = (*before, *selects, *narrow, scatter)
    return replace(program, operations=operations, widths=tuple(widths), result=scatter.outputs[0])


def _stream_before(program: Program, start: int) -> int:
    """Return the residual stream's last value of the operations before `start`."""
    sums = {
        each.outputs[0]: each.inputs[0]
        for each in program.operations[start:]
        if isinstance(each, ops.Add)
    }
    value = program.result
    while value in sums:
        value = sums[value]
    return value


def _project_apart(
    before: Operations, after: Operations, widths: list[int], alignment: int
) -> tuple[Operations, Operations]:
    """Move the queries of the heads that `before` ends with behind it; keys and values stay
    there."""
    first = max(
        index for index, each in enumerate(before) if not isinstance(each, ops.HeadOperation)
    )
    projection, chain = (
        before[first],
        [each for each in before[first:] if isinstance(each, ops.HeadOperation)],
    )
    heads, result = chain[-1].heads, chain[-1].outputs
    if not isinstance(projection, ops.Linear) or heads.query_width % alignment:
        return before, after

    def value(part: ops.Heads) -> tuple[int]:
        widths.append(part.width)
        return (len(widths) - 1,)

    def project(part: ops.Heads, start: int) -> list[ops.Operation]:
        """Return the projection and what follows, of a part of the heads,
        whose columns begin at `start`."""
        columns = range(start, start + part.width)
        found: list[ops.Operation] = [replace(projection, outputs=value(part), columns=columns)]
        for each in chain:
            if _concerns(each, part):
                found.append(
                    replace(each, inputs=found[-1].outputs, outputs=value(part), heads=part)
                )
        return found

    keys = project(ops.Heads(0, heads.num_keys, heads.head_dim), heads.query_width)
    queries = project(ops.Heads(heads.num_queries, 0, heads.head_dim), 0)
    queries[-1], widths[result[0]] = replace(queries[-1], outputs=result), heads.query_width
    return (*before[:first], *keys), (*queries, *after)


def _concerns(operation: ops.HeadOperation, heads: ops.Heads) -> bool:
    """Return whether an operation has anything to do with a part of the heads."""
    if isinstance(operation, ops.NormHeads):
        return bool(heads.num_queries if operation.of == "queries" else heads.num_keys)
    return heads.num_keys > 0 or not isinstance(operation, ops.WriteKV)
