"""How programs are divided among stages: neighbouring operations, and one value in between."""

from __future__ import annotations

import itertools

import pytest
from program_cases import SPECS

from quire.models.lowering import lower, projection_sizes
from quire.program.operations import Attend, AttendAll, Take
from quire.program.sharding import cache_heads, shard
from quire.program.stages import cut_into_stages, most_stages


@pytest.mark.parametrize("name", SPECS)
def test_stages_have_all_operations_in_order_and_every_weight_once(name: str) -> None:
    program, parameters = lower(SPECS[name])
    sizes = projection_sizes(parameters)
    for num_stages in range(2, most_stages(program) + 1):
        stages = cut_into_stages(program, sizes, num_stages)
        assert len(stages) == num_stages
        kinds = [
            type(each)
            for stage in stages
            for each in stage.program.operations
            if not isinstance(each, Take)
        ]
        assert kinds == [type(each) for each in program.operations]
        held = [number for stage in stages for number in stage.linears]
        head = set() if program.head.weight is None else {program.head.weight}
        assert sorted(held) == sorted(set(range(len(sizes))) - head)
        caches = [cache for stage in stages for cache in stage.caches]
        assert caches == list(range(len(cache_heads(program))))
        for before, after in itertools.pairwise(stages):
            (entry,) = after.program.operations[0].outputs
            assert before.program.result == entry and not after.is_first
        for stage in stages:
            assert any(isinstance(each, Attend | AttendAll) for each in stage.program.operations)
            assert cache_heads(stage.program) == cache_heads(program)[: len(stage.caches)]


def test_stages_are_as_even_as_can_be() -> None:
    program, parameters = lower(SPECS["llama"])
    assert most_stages(program) == 3
    sizes = [1 for _ in projection_sizes(parameters)]
    sizes[-1] = 4  # the head: a layer's weight
    first, second = cut_into_stages(program, sizes, 2)
    assert (len(first.caches), len(second.caches)) == (1, 2)


def test_a_stage_is_divided_among_ranks_like_a_program() -> None:
    program, parameters = lower(SPECS["llama"])
    for stage in cut_into_stages(program, projection_sizes(parameters), 2):
        divided, shares = shard(stage.program, 1, 2, 101)
        assert set(shares.linears) == stage.linears
        assert divided.widths[divided.result] == program.widths[program.result]
