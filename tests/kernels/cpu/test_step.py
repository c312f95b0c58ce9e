"""The native step around its arithmetic (which tests/nn holds to the walk, family by family): caches, threads, refusals."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from quire.kernels import cpu
from quire.kernels.interface import AttentionBatch, DecoderWeights, ForwardPass, Kernels, NormWeights
from quire.kernels.reference import ReferenceKernels
from quire.kernels.selection import load
from quire.models.registry import declare
from quire.nn.builder import build_decoder
from quire.nn.context import StepContext
from quire.nn.decoder import DecoderModel
from quire.weights.dummy import DummyWeights

pytestmark = pytest.mark.skipif(cpu.IMPORT_ERROR is not None, reason=f"no native kernels: {cpu.IMPORT_ERROR}")

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
Caches = list[tuple[Tensor, Tensor]]


@pytest.fixture(scope="module")
def model() -> DecoderModel:
    return build_decoder(declare(LLAMA), DummyWeights(), load("cpu"), dtype="bfloat16", max_model_len=64)


def _caches(dtype: torch.dtype = torch.bfloat16, num_kv_heads: int = 2, head_size: int = 16) -> Caches:
    shape = (NUM_BLOCKS, num_kv_heads, BLOCK_SIZE, head_size)
    return [(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in range(2)]


def _run(
    model: DecoderModel, caches: Caches, start: int = 0, num_tokens: int = 9, forward: ForwardPass | None = None
) -> Tensor:
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
    forward = forward or model.compiled
    assert forward is not None
    return forward(positions * 7 % 101, positions, batch, caches)


def _walk_of(model: DecoderModel) -> ForwardPass:
    def walk(
        token_ids: Tensor, positions: Tensor, batch: AttentionBatch, kv_caches: Sequence[tuple[Tensor, Tensor]],
        num_wanted: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return model.walk(token_ids, positions, StepContext(batch, kv_caches, num_wanted))

    return walk


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_size", [16, 64, 128, 256])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_heads_have_the_bits_of_the_walk(native_isa: Kernels, architecture: str, head_size: int, dtype: str) -> None:
    """With and without norms of heads, for sizes that stay in registers and one that does not, more tokens than go at once."""
    config = LLAMA | {"architectures": [architecture], "head_dim": head_size, "num_hidden_layers": 1}
    model = build_decoder(declare(config), DummyWeights(), native_isa, dtype=dtype, max_model_len=64)
    results = []
    for forward in (model.compiled, _walk_of(model)):
        caches = _caches(model.dtype, head_size=head_size)[:1]
        results.append((_run(model, caches, num_tokens=19, forward=forward), *caches[0]))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))


RAGGED = ((0, 5), (2, 6), (7, 1), (0, 9), (3, 1), (1, 4))
"""Where sequences' new tokens begin, and how many they are."""


def _run_ragged(model: DecoderModel, num_wanted: Tensor | None) -> tuple[Tensor, Caches]:
    """Hidden states of all sequences of RAGGED, and the caches, which had been filled before."""
    attention = model.spec.attentions[0]
    shape = (3 * len(RAGGED), attention.num_kv_heads, BLOCK_SIZE, attention.head_dim)
    generator = torch.Generator().manual_seed(1)
    caches = [
        (torch.randn(shape, generator=generator).to(model.dtype), torch.randn(shape, generator=generator).to(model.dtype))
        for _ in model.blocks
    ]
    tables = torch.randperm(shape[0], generator=generator).to(torch.int32).view(len(RAGGED), 3)
    positions = torch.cat([torch.arange(start, start + count) for start, count in RAGGED])
    owners = torch.repeat_interleave(torch.arange(len(RAGGED)), torch.tensor([count for _, count in RAGGED]))
    batch = AttentionBatch(
        query_start=torch.tensor([0, *itertools.accumulate(count for _, count in RAGGED)], dtype=torch.int32),
        context_len=torch.tensor([start + count for start, count in RAGGED], dtype=torch.int32),
        block_tables=tables,
        slots=tables[owners, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE,
        positions=positions,
        max_query_len=max(count for _, count in RAGGED),
        max_context_len=max(start + count for start, count in RAGGED),
    )
    assert model.compiled is not None
    return model.compiled(positions * 7 % 101, positions, batch, caches, num_wanted), caches


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(
    "num_wanted", [(1, 1, 1, 1, 1, 1), (0, 1, 0, 0, 1, 0), (5, 0, 1, 2, 0, 4), (0,) * 6, (0, 0, 0, 9, 0, 0)]
)
@pytest.mark.parametrize("num_heads", [4, 2, 3])  # queries of 3 heads of 8 end within a panel
def test_some_hidden_states_of_a_ragged_batch(num_heads: int, num_wanted: tuple[int, ...], num_threads: int) -> None:
    heads = {"num_key_value_heads": 1, "head_dim": 8} if num_heads == 3 else {"head_dim": 16}
    config = LLAMA | {"num_attention_heads": num_heads, **heads}
    model = build_decoder(declare(config), DummyWeights(), load("cpu"), dtype="bfloat16", max_model_len=64)
    before = cpu.num_threads()
    try:
        cpu.set_num_threads(num_threads)
        expected, full = _run_ragged(model, None)
        found, caches = _run_ragged(model, torch.tensor(num_wanted, dtype=torch.int32))
    finally:
        cpu.set_num_threads(before)
    ends = list(itertools.accumulate(count for _, count in RAGGED))
    wanted = [token for end, count in zip(ends, num_wanted, strict=True) for token in range(end - count, end)]
    others = sorted(set(range(ends[-1])) - set(wanted))
    assert torch.equal(found[wanted], expected[wanted])
    assert torch.isfinite(found).all() and not torch.equal(found[others], expected[others])
    assert all(torch.equal(a, b) for pair, own in zip(caches, full, strict=True) for a, b in zip(pair, own, strict=True))


@pytest.mark.parametrize(
    ("num_wanted", "message"),
    [
        (
            torch.tensor([0, 0, 2, 0, 0, 0], dtype=torch.int32),
            "2 hidden states are asked for of sequence 2, which has 1 tokens",
        ),
        (torch.tensor([0, -1, 0, 0, 0, 0], dtype=torch.int32), "-1 hidden states are asked for of sequence 1"),
        (torch.tensor([1, 1], dtype=torch.int32), "num_wanted"),
        (torch.zeros(6, dtype=torch.int64), "num_wanted"),
    ],
)
def test_hidden_states_that_there_are_not_are_refused(model: DecoderModel, num_wanted: Tensor, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        _run_ragged(model, num_wanted)


def test_each_call_uses_the_caches_that_it_is_given(model: DecoderModel) -> None:
    alone = _caches()
    first, second = _run(model, alone), _run(model, alone, start=9, num_tokens=1)
    ours, others = _caches(), _caches()
    assert torch.equal(_run(model, ours), first)
    _run(model, others, num_tokens=20)
    assert torch.equal(_run(model, ours, start=9, num_tokens=1), second)
    assert all(torch.equal(a, b) for pair, own in zip(alone, ours, strict=True) for a, b in zip(pair, own, strict=True))


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
    assert set(after) == {"linear", "attention", "elementwise", "sampling"}
    for kind in ("linear", "attention", "elementwise"):
        assert 0.0 < after[kind] - before[kind] < 10.0, kind


def test_caches_of_another_shape_are_refused(model: DecoderModel) -> None:
    with pytest.raises(ValueError, match="the cache of layer 0 has another shape"):
        _run(model, _caches(num_kv_heads=4))
    with pytest.raises(ValueError, match="1 caches for 2 layers"):
        _run(model, _caches()[:1])


def test_weights_that_do_not_fit_are_refused(model: DecoderModel) -> None:
    weights = model.weights()
    block = weights.blocks[0]

    def compiled(**changes: object) -> None:
        changed: DecoderWeights = dataclasses.replace(weights, **changes)  # type: ignore[arg-type]
        load("cpu").compile_decoder(changed)

    foreign = ReferenceKernels().pack_linear(torch.zeros(64, 96))
    with pytest.raises(TypeError, match="packed by another back end"):
        compiled(blocks=(dataclasses.replace(block, mlp=dataclasses.replace(block.mlp, down=foreign)),))
    with pytest.raises(ValueError, match=r"a weight is \[192, 64\], not \[96, 64\]"):
        compiled(blocks=(dataclasses.replace(block, mlp=dataclasses.replace(block.mlp, is_gated=False)),))
    with pytest.raises(ValueError, match="expected RoPE"):
        compiled(max_model_len=63)
    with pytest.raises(ValueError, match="expected a norm over"):
        norm = NormWeights("rms", torch.ones(63), None, 1e-6, 0.0)
        compiled(blocks=(dataclasses.replace(block, attention_norm=norm),))
