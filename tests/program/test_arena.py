"""Where values lie: nothing is written over that is still read,
and nothing lies beyond the width."""

from __future__ import annotations

import pytest
from program_cases import SPECS

from quire.models.lowering import lower
from quire.program.arena import ALIGNMENT, RESULT_PLACE, place_values
from quire.program.operations import Program
from quire.program.passes import fuse_add_norm, fuse_heads, select_wanted


def _variants(program: Program) -> list[Program]:
    apart = select_wanted(program, 16)
    return [program, fuse_add_norm(fuse_heads(program)), apart, fuse_add_norm(fuse_heads(apart))]


@pytest.mark.parametrize("name", SPECS)
def test_no_value_is_overwritten_while_it_is_read(name: str) -> None:
    """Simulate: each column says which value was written there last."""
    for program in _variants(lower(SPECS[name])[0]):
        arena = place_values(program)
        owners = [-1] * arena.width
        for operation, dying in zip(program.operations, program.last_reads(), strict=True):
            for value in operation.inputs:
                assert set(owners[arena.columns[value] :][: program.widths[value]]) == {value}
            places = [
                range(arena.columns[v], arena.columns[v] + program.widths[v])
                for v in operation.outputs
            ]
            kept = [v for v in operation.inputs if v not in dying]
            assert all(
                owners[column] not in kept
                for place in places
                if place.start != RESULT_PLACE
                for column in place
            )
            for value in operation.outputs:
                if value != program.result:
                    column = arena.columns[value]
                    assert column % ALIGNMENT == 0 and column + program.widths[value] <= arena.width
                    owners[column : column + program.widths[value]] = [value] * program.widths[
                        value
                    ]
        assert arena.columns[program.result] == RESULT_PLACE


def test_a_layer_takes_the_memory_of_the_one_before() -> None:
    program = fuse_add_norm(fuse_heads(lower(SPECS["llama"])[0]))
    stream, attended, row_or_ffn, projected = 64, 64, 128, 64
    assert place_values(program).width <= stream + attended + row_or_ffn + projected
