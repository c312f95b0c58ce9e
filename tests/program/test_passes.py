"""No pass changes a bit: whole programs before and after each, on the reference kernels,
for every kind of block."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from program_cases import (
    RAGGED,
    SPECS,
    WANTED,
    Caches,
    are_equal,
    build,
    one_by_one,
    run_ragged,
    wanted_rows,
)
from torch import Tensor

from quire.kernels.interpreter import Interpreter
from quire.kernels.reference import ReferenceKernels
from quire.models.lowering import lower
from quire.nn.decoder import DecoderModel
from quire.program.operations import (
    Add,
    HeadOperation,
    Linear,
    Norm,
    PrepareHeads,
    Program,
    Select,
    WriteKV,
)
from quire.program.passes import fuse_add_norm, fuse_heads, select_wanted

PASSES: dict[str, Callable[[Program], Program]] = {
    "fuse_add_norm": fuse_add_norm,
    "fuse_heads": fuse_heads,
}


@pytest.fixture(scope="module", params=SPECS)
def model(request: pytest.FixtureRequest) -> DecoderModel:
    return build(SPECS[request.param], ReferenceKernels())


@pytest.mark.slow_combinations
@pytest.mark.parametrize("name", PASSES)
def test_a_pass_changes_no_bit(model: DecoderModel, name: str) -> None:
    whole, wanted = (PASSES[name](each) for each in (model.program, select_wanted(model.program)))
    rewritten = Interpreter(whole, wanted, model.weights, model.kernels)
    for num_wanted in (None, WANTED[2]):
        expected, theirs = run_ragged(model, num_wanted)
        found, ours = run_ragged(model, num_wanted, rewritten)
        assert torch.equal(found, expected) and are_equal(ours, theirs)


@pytest.fixture(scope="module")
def passes(model: DecoderModel) -> tuple[Tensor, Caches, Tensor]:
    """What a whole pass computes, and what the layers before the last one leave."""
    before, _ = run_ragged(one_by_one(model, num_blocks=len(model.spec.blocks) - 1))
    whole, caches = run_ragged(model)
    return whole.clone(), caches, before.clone()


@pytest.mark.slow_combinations
@pytest.mark.parametrize("alignment", [None, 16])
@pytest.mark.parametrize("num_wanted", WANTED)
def test_tokens_that_are_not_wanted_stop_at_the_last_write_to_a_cache(
    model: DecoderModel,
    passes: tuple[Tensor, Caches, Tensor],
    num_wanted: tuple[int, ...],
    alignment: int | None,
) -> None:
    """The others have the bits of the whole pass, and so has every key and value; these,
    what the layers before left."""
    expected, theirs, before = passes
    run = Interpreter(
        model.program, select_wanted(model.program, alignment), model.weights, model.kernels
    )
    found, ours = run_ragged(model, num_wanted, run)
    wanted = wanted_rows(num_wanted)
    others = sorted(set(range(sum(count for _, count in RAGGED))) - set(wanted))
    assert torch.equal(found[wanted], expected[wanted]) and torch.equal(
        found[others], before[others]
    )
    assert are_equal(ours, theirs)


def test_what_is_fused_is_gone() -> None:
    program, _ = lower(SPECS["qwen3"])
    kinds = [type(each) for each in fuse_heads(fuse_add_norm(program)).operations]
    assert kinds.count(Norm) == 1, "the first has nothing to add"
    assert kinds.count(Add) == 1, "the last has no norm behind it"
    assert kinds.count(PrepareHeads) == 3 and WriteKV not in kinds


def test_heads_that_a_back_end_cannot_fuse_stay_apart() -> None:
    program, _ = lower(SPECS["qwen3"])
    assert fuse_heads(program, lambda operation: False) == program


def test_keys_of_all_rows_and_queries_of_wanted_ones_are_projected() -> None:
    program, _ = lower(SPECS["qwen3"])
    apart = select_wanted(program, 16)
    halves = [
        each.columns for each in apart.operations if isinstance(each, Linear) and each.columns
    ]
    assert halves == [range(64, 128), range(64)]
    assert [each.heads.num_queries for each in apart.operations if isinstance(each, HeadOperation)][
        -5:
    ] == [0, 0, 0, 4, 4]
    assert sum(isinstance(each, Select) for each in apart.operations) == 2
    assert select_wanted(program, 128) == select_wanted(program), "keys begin within a panel"
