"""How programs are divided: parts cover the whole once, and all ranks gather in the same places."""

from __future__ import annotations

import pytest
from program_cases import SPECS

from quire.models.cutting import cut, cut_outputs, rows_within
from quire.models.lowering import lower
from quire.models.tensors import TensorSpec, linear
from quire.program.operations import EmbedGathered, Experts, Gather, Heads
from quire.program.sharding import cache_heads, shard, split, split_heads


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [5, 16, 47, 96, 1000])
def test_parts_cover_the_whole_once(count: int, num_ranks: int) -> None:
    parts = split(count, num_ranks)
    assert parts is not None and all(parts)
    assert [place for part in parts for place in part] == list(range(count))


def test_what_is_smaller_than_the_group_is_not_divided() -> None:
    assert split(2, 3) is None


def test_heads_are_divided_by_those_that_share_keys() -> None:
    assert split_heads(Heads(8, 4, 16), 3) == [
        (range(2), range(1)), (range(2, 4), range(1, 2)), (range(4, 8), range(2, 4)),
    ]  # fmt: skip
    assert split_heads(Heads(8, 2, 16), 4) == [
        (range(2), range(1)), (range(2, 4), range(1)),
        (range(4, 6), range(1, 2)), (range(6, 8), range(1, 2)),
    ]  # fmt: skip
    assert split_heads(Heads(2, 1, 16), 3) is None, "a rank would have no query"


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("name", SPECS)
def test_ranks_gather_in_the_same_places_and_have_everything_together(
    name: str, num_ranks: int
) -> None:
    program, parameters = lower(SPECS[name])
    divided = [shard(program, rank, num_ranks, 101) for rank in range(num_ranks)]
    for each, _ in divided:
        kinds = [(type(a), a.inputs, a.outputs) for a in divided[0][0].operations]
        assert [(type(a), a.inputs, a.outputs) for a in each.operations] == kinds
        assert each.widths[each.result] == program.widths[program.result]
        assert any(isinstance(a, Gather) for a in each.operations)
        assert any(isinstance(a, EmbedGathered) for a in each.operations)
    for number in divided[0][1].linears:
        held = [o for _, shares in divided for part in shares.linears[number] for o in part]
        num_outputs = sum(part.num_outputs for part in parameters.linears[number])
        assert set(held) == set(range(num_outputs))
    assert sum(sum(cache_heads(each)) for each, _ in divided) >= sum(cache_heads(program))


@pytest.mark.parametrize("num_ranks", [2, 3, 9])
def test_every_expert_is_one_ranks_alone(num_ranks: int) -> None:
    program, parameters = lower(SPECS["olmoe"])
    divided = [shard(program, rank, num_ranks, 101, is_by_expert=True) for rank in range(num_ranks)]
    held = [[a.held for a in each.operations if isinstance(a, Experts)] for each, _ in divided]
    for layer in zip(*held, strict=True):
        assert [expert for part in layer if part is not None for expert in part] == list(range(9))
    for operation in program.operations:
        if isinstance(operation, Experts):
            for number in (operation.up, operation.down):
                rows = [row for _, shares in divided for row in shares.linears[number][0]]
                size = sum(part.num_outputs for part in parameters.linears[number])
                assert rows == list(range(size))


def test_a_cut_names_the_stored_rows_that_it_is() -> None:
    step = cut(TensorSpec("w", (10, 4), first_row=3, stored_rows=40, row_step=2), range(2, 6))
    assert (step.first_row, step.shape, step.stored_rows) == (7, (4, 4), 40)
    assert rows_within(step) == slice(2, 6)
    first, second = cut_outputs(
        [linear("a", 8, 10, has_bias=True), linear("b", 8, 6)], (range(7, 12),)
    )
    assert first.bias is not None and first.bias.shape == (3,)
    assert (first.num_outputs, second.num_outputs) == (3, 2)
