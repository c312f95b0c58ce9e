"""Where the values of a program are in one piece of memory: a walk over their lifetimes, once, when
a model is loaded.

Places are columns: the value at column c of a step of T tokens begins at element c * T. So one
placement serves every step, and a step's activations take exactly `Arena.width` elements a token.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.common.numbers import align_up
from quire.program import operations as ops
from quire.program.operations import Program

ELEMENTWISE = (
    ops.Scale,
    ops.Add,
    ops.Norm,
    ops.AddNorm,
    ops.Activate,
    ops.InPlaceOperation,
    ops.Select,
    ops.GateRows,
    ops.Place,
    ops.AdaptEmbedding,
)
"""Operations whose outputs may take the place of the inputs of the same index,
if these are not read afterwards."""
ALIGNMENT = 32
"""Columns are multiples of it: every value begins at a multiple of 64 bytes,
in two bytes an element or four."""
RESULT_PLACE = -1
"""The column of the result, which has memory of its own."""


class Arena(NamedTuple):
    """The columns of a program's values."""

    columns: tuple[int, ...]
    """Of each value, by its number; of one that no operation writes, 0."""
    width: int


def place_values(program: Program) -> Arena:
    """Each value gets the lowest columns that are free while it is read;
    elementwise operations write where they read."""
    columns, end = [0] * len(program.widths), 0
    live: dict[int, int] = {}
    """Values that are in the arena, and their columns."""

    def lowest(width: int) -> int:
        column = 0
        for other in sorted(live, key=live.__getitem__):
            if column + width <= live[other]:
                break
            column = max(column, live[other] + align_up(program.widths[other], ALIGNMENT))
        return column

    for operation, dying in zip(program.operations, program.last_reads(), strict=True):
        for index, value in enumerate(operation.outputs):
            taken = _input_replaced(program, operation, index)
            if value == program.result:
                columns[value] = RESULT_PLACE
                continue
            if taken in dying and taken in live:
                columns[value] = live.pop(taken)
            else:
                assert not isinstance(operation, ops.InPlaceOperation), (
                    "a row that is changed in place is read later"
                )
                columns[value] = lowest(align_up(program.widths[value], ALIGNMENT))
            live[value] = columns[value]
            end = max(end, columns[value] + align_up(program.widths[value], ALIGNMENT))
        for value in dying:
            live.pop(value, None)
    return Arena(tuple(columns), end)


def _input_replaced(program: Program, operation: ops.Operation, index: int) -> int | None:
    """Return the input whose place an output may take; None where there is none as wide."""
    if not isinstance(operation, ELEMENTWISE):
        return None
    value = operation.inputs[index]
    return value if program.widths[value] == program.widths[operation.outputs[index]] else None
