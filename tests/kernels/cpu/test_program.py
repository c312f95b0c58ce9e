"""Native programs: the bits of their operations one by one (family by family in tests/nn), caches,
threads, refusals."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from program_cases import (
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

from quire.common.frozen_record import replace
from quire.errors import ConfigError
from quire.kernels import cpu
from quire.kernels.interface import AttentionBatch, Kernels
from quire.kernels.reference import ReferenceKernels
from quire.kernels.selection import load
from quire.models.lowering import lower
from quire.models.registry import declare
from quire.nn.builder import build_decoder
from quire.nn.decoder import DecoderModel
from quire.program.operations import Operation
from quire.weights.dummy import DummyWeights

pytestmark = pytest.mark.skipif(
    cpu.IMPORT_ERROR is not None, reason=f"no native kernels: {cpu.IMPORT_ERROR}"
)

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 64,
}
BLOCK_SIZE, NUM_BLOCKS = 4, 8


@pytest.fixture(scope="module")
def model() -> DecoderModel:
    return build_decoder(
        declare(LLAMA), DummyWeights(), load("cpu"), dtype="bfloat16", max_model_len=64
    )


def _caches(
    dtype: torch.dtype = torch.bfloat16, num_kv_heads: int = 2, head_size: int = 16
) -> Caches:
    shape = (NUM_BLOCKS, num_kv_heads, BLOCK_SIZE, head_size)
    return [(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in range(2)]


def _run(model: DecoderModel, caches: Caches, start: int = 0, num_tokens: int = 9) -> Tensor:
    """Hidden states of one sequence's tokens from `start` on; its blocks are 7, 6, 5 ..."""
    positions = torch.arange(start, start + num_tokens)
    table = torch.arange(NUM_BLOCKS - 1, -1, -1, dtype=torch.int32)
    batch = AttentionBatch(
        query_start=torch.tensor([0, num_tokens], dtype=torch.int32),
        context_len=torch.tensor([start + num_tokens], dtype=torch.int32),
        block_tables=table[None],
        slots=table[positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE,
        positions=positions,
        max_query_len=num_tokens,
        max_context_len=start + num_tokens,
    )
    return model.run(positions * 7 % 101, positions, batch, caches)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_size", [16, 64, 128, 256])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_heads_have_the_bits_of_their_operations(
    native_isa: Kernels, architecture: str, head_size: int, dtype: str
) -> None:
    """With and without norms of heads, for sizes that stay in registers and one that does not,
    more tokens than go at once."""
    config = LLAMA | {
        "architectures": [architecture],
        "head_dim": head_size,
        "num_hidden_layers": 1,
    }
    model = build_decoder(
        declare(config), DummyWeights(), native_isa, dtype=dtype, max_model_len=64
    )
    results = []
    for each in (model, one_by_one(model)):
        caches = _caches(model.dtype, head_size=head_size)[:1]
        results.append((_run(each, caches, num_tokens=19), *caches[0]))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SPECS)
def test_a_program_has_the_bits_of_its_operations(native: Kernels, name: str, dtype: str) -> None:
    model = build(SPECS[name], native, dtype)
    expected, theirs = run_ragged(one_by_one(model))
    found, ours = run_ragged(model)
    assert torch.equal(found, expected) and are_equal(ours, theirs)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("num_wanted", WANTED)
@pytest.mark.parametrize("name", ["llama", "odd heads", "parallel"])
def test_some_hidden_states_of_a_ragged_batch(
    native: Kernels, name: str, num_wanted: tuple[int, ...], num_threads: int
) -> None:
    model = build(SPECS[name], native, "bfloat16")
    before = cpu.num_threads()
    try:
        cpu.set_num_threads(num_threads)
        expected, theirs = run_ragged(model)
        found, ours = run_ragged(model, num_wanted)
    finally:
        cpu.set_num_threads(before)
    wanted = wanted_rows(num_wanted)
    others = sorted(set(range(len(found))) - set(wanted))
    assert torch.equal(found[wanted], expected[wanted])
    assert torch.isfinite(found).all() and not torch.equal(found[others], expected[others])
    assert are_equal(ours, theirs)


@pytest.mark.parametrize(
    ("num_wanted", "message"),
    [
        ((0, 0, 2, 0, 0, 0), "2 hidden states are wanted of sequence 2, which has 1 tokens"),
        ((0, -1, 0, 0, 0, 0), "-1 hidden states are wanted of sequence 1"),
        ((1, 1), "num_wanted"),
    ],
)
def test_hidden_states_that_there_are_not_are_refused(
    model: DecoderModel, num_wanted: tuple[int, ...], message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        run_ragged(model, num_wanted)


def test_each_call_uses_the_caches_that_it_is_given(model: DecoderModel) -> None:
    alone = _caches()
    first, second = _run(model, alone), _run(model, alone, start=9, num_tokens=1)
    ours, others = _caches(), _caches()
    assert torch.equal(_run(model, ours), first)
    _run(model, others, num_tokens=20)
    assert torch.equal(_run(model, ours, start=9, num_tokens=1), second)
    assert all(
        torch.equal(a, b)
        for pair, own in zip(alone, ours, strict=True)
        for a, b in zip(pair, own, strict=True)
    )


def test_results_outlive_the_next_call(model: DecoderModel) -> None:
    """The arena is used again; what was returned is not."""
    caches = _caches()
    first = _run(model, caches)
    kept = first.clone()
    _run(model, caches, start=9, num_tokens=12)
    assert torch.equal(first, kept)


def test_threads_do_not_change_a_bit(model: DecoderModel) -> None:
    before = cpu.num_threads()
    try:
        results = []
        for count in (1, 2):
            cpu.set_num_threads(count)
            results.append(_run(model, _caches(), num_tokens=30))
    finally:
        cpu.set_num_threads(before)
    assert torch.equal(*results)


def test_kernels_count_their_time(model: DecoderModel) -> None:
    before = cpu.kernel_times()
    _run(model, _caches())
    after = cpu.kernel_times()
    assert set(after) == {
        "linear", "attention", "elementwise", "sampling", "gather",
    }  # fmt: skip
    for kind in ("linear", "attention", "elementwise"):
        assert 0.0 < after[kind] - before[kind] < 10.0, kind


def test_caches_of_another_shape_are_refused(model: DecoderModel) -> None:
    with pytest.raises(ValueError, match="the cache of layer 0 has another shape"):
        _run(model, _caches(num_kv_heads=4))
    with pytest.raises(ValueError, match="1 caches for 2 layers"):
        _run(model, _caches()[:1])


def test_weights_that_do_not_fit_are_refused(model: DecoderModel) -> None:
    weights = model.weights

    def compiled(**changes: Any) -> None:
        model.kernels.compile(model.program, dataclasses.replace(weights, **changes))

    foreign = ReferenceKernels().pack_linear(torch.zeros(64, 96))
    with pytest.raises(TypeError, match="packed by another back end"):
        compiled(linears=(foreign, *weights.linears[1:]))
    with pytest.raises(ValueError, match="values that do not fit"):
        compiled(linears=weights.linears[::-1])
    with pytest.raises(ValueError, match="expected RoPE"):
        compiled(max_model_len=63)
    with pytest.raises(ValueError, match="expected a norm over 64"):
        compiled(vectors=(torch.ones(63), *weights.vectors[1:]))


def test_what_cannot_be_run_has_reasons(native: Kernels) -> None:
    config = LLAMA | {"head_dim": 584, "num_attention_heads": 1, "num_key_value_heads": 1}
    with pytest.raises(
        ConfigError,
        match="cpu kernels cannot run LlamaForCausalLM: has heads of at most 576, not of 584",
    ):
        build(declare(config), native)
    program, _ = lower(SPECS["qwen3"])
    assert native.reasons_against(program) == []
    strange = replace(program, operations=(*program.operations, Operation((), ())))
    assert native.reasons_against(strange) == ["has no operation Operation"]
