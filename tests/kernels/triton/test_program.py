"""The fused step gives the bits of the operations one by one, for each kind of block,
prefills and decodes mixed."""

from __future__ import annotations

import importlib.util
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_cases import thorough
from program_cases import one_by_one
from torch import Tensor

from quire.kernels import load
from quire.kernels.interface import AttentionBatch, Kernels
from quire.kernels.kv_cache import empty_cache
from quire.models.blocks import KVLayerSpec
from quire.models.registry import declare
from quire.nn.builder import build_decoder
from quire.nn.context import StepContext
from quire.weights.dummy import DummyWeights

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed (pip install triton)", allow_module_level=True)

from quire.kernels.triton.kernels import TritonKernels
from quire.kernels.triton.unfinished import PartialSums

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], **SIZES},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], **SIZES},  # norms of heads
    # norms of all heads together: one by one
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], **SIZES},
    "gpt2": {  # layer norms, biases, learned positions, no RoPE
        "architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_layer": 1, "n_head": 2,
        "n_positions": 64, "vocab_size": 61,
    },
    "deepseek": {
        "architectures": ["DeepseekV3ForCausalLM"], **SIZES, "num_key_value_heads": 2,
        "q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
        "v_head_dim": 16, "first_k_dense_replace": 1, "moe_intermediate_size": 16,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2,
        "n_shared_experts": 1,
    },
}  # fmt: skip
BLOCK_SIZE = 4


def make_batch(device: torch.device) -> AttentionBatch:
    """A sequence of five new tokens, and one that has computed eight and brings its ninth."""
    positions = torch.tensor([0, 1, 2, 3, 4, 8])
    tables = torch.tensor([[3, 0, 0], [1, 4, 2]], dtype=torch.int32)
    tables[0, 1] = 5
    rows = torch.tensor([0, 0, 0, 0, 0, 1])
    slots = tables[rows, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    starts, lengths = (
        torch.tensor([0, 5, 6], dtype=torch.int32),
        torch.tensor([5, 9], dtype=torch.int32),
    )
    starts, lengths, tables, slots, positions = (
        each.to(device) for each in (starts, lengths, tables, slots, positions)
    )
    return AttentionBatch(starts, lengths, tables, slots, positions, 5, 9)


@pytest.mark.slow_except("qwen3-*", "gpt2-*")
@pytest.mark.parametrize(
    ("family", "dtype", "kv_format"),
    [
        ("qwen3", "bfloat16", "fp8"),
        ("gpt2", "bfloat16", "bfloat16"),
        ("deepseek", "bfloat16", "int8"),
        thorough("llama", "bfloat16", "int8"),
        thorough("olmo2", "bfloat16", "bfloat16"),
        thorough("qwen3", "float32", "float32"),
    ],
)
def test_fused_is_one_by_one(
    kernels: Kernels, device: torch.device, family: str, dtype: str, kv_format: str
) -> None:
    model = build_decoder(
        declare(CONFIGS[family]), DummyWeights(), kernels, dtype=dtype, max_model_len=64
    )
    batch, results = make_batch(device), []
    token_ids = torch.tensor([7, 8, 9, 10, 60, 3], device=device)
    for each in (model, one_by_one(model)):
        generator = torch.Generator().manual_seed(1)
        caches = []
        for layer in model.spec.kv_layers:
            keys, values = (random_cache(layer, kv_format, generator).to(device) for _ in range(2))
            caches.append((keys, keys if layer.is_latent else values))
        hidden = each.forward(token_ids, batch.positions, StepContext(batch, caches))
        results.append((hidden, *(cache for pair in caches for cache in pair)))
    for fused, single in zip(*results, strict=True):
        assert torch.equal(fused.view(torch.uint8), single.view(torch.uint8))
        assert fused.dtype is not model.dtype or fused.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["Qwen2ForCausalLM", thorough("Qwen3ForCausalLM"), thorough("Gemma2ForCausalLM")]
)
def test_products_that_the_next_kernel_finishes_are_one_by_one_the_same(
    kernels: Kernels, device: torch.device, family: str
) -> None:
    """Into attention (with a bias, or norms of heads), behind it, and behind the MLP;
    behind these a norm of its own."""
    assert isinstance(kernels, TritonKernels)
    config = {
        "architectures": [family],
        **SIZES,
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_attention_heads": 16,
    }
    of_family = (
        {"query_pre_attn_scalar": 16, "sliding_window": 64} if family.startswith("Gemma") else {}
    )
    spec = declare({**config, "num_key_value_heads": 2, "head_dim": 16, **of_family})
    many = TritonKernels(
        device,
        replace(kernels.tuning, num_programs=64, linear=replace(kernels.tuning.linear, block_k=32)),
    )
    model = build_decoder(spec, DummyWeights(), many, dtype="bfloat16", max_model_len=64)
    x = torch.zeros(6, 256, dtype=torch.bfloat16, device=device)
    qkv, output, _, down = model.weights.linears[:4]
    for weight in (qkv, output, down):
        assert isinstance(many.unfinished_linear(x, weight), PartialSums)
    batch, results = make_batch(device), []
    token_ids = torch.tensor([7, 8, 9, 10, 60, 3], device=device)
    for each in (model, one_by_one(model)):
        caches = [_empty_pair(layer, device) for layer in spec.kv_layers]
        results.append(
            (each.forward(token_ids, batch.positions, StepContext(batch, caches)), caches)
        )
    (fused, ours), (single, theirs) = results
    assert torch.equal(fused, single) and fused.isfinite().all() and fused.any()
    assert torch.equal(
        torch.stack([*itertools.chain(*ours)]), torch.stack([*itertools.chain(*theirs)])
    )


def random_cache(layer: KVLayerSpec, kv_format: str, generator: torch.Generator) -> Tensor:
    """Six blocks with keys or values in them."""
    cache = empty_cache(6, layer.num_kv_heads, BLOCK_SIZE, layer.head_dim, kv_format)
    rows = torch.randn(6 * BLOCK_SIZE, layer.num_kv_heads, layer.head_dim, generator=generator)
    load("reference").write_kv(rows, rows, cache, cache, torch.arange(6 * BLOCK_SIZE))
    return cache


@pytest.mark.slow_except("qwen3-num_wanted0")
@pytest.mark.parametrize("num_wanted", [(2, 0), (0, 1), *map(thorough, ((1, 1), (0, 0), (3, 0)))])
@pytest.mark.parametrize("family", ["qwen3", "deepseek", thorough("gpt2")])
def test_tokens_that_nobody_asks_about_stop_at_the_last_layer(
    kernels: Kernels, device: torch.device, family: str, num_wanted: tuple[int, int]
) -> None:
    """The others have the bits of the whole pass, and so has every key and value; these,
    what the layer before it left."""
    model = build_decoder(
        declare(CONFIGS[family]), DummyWeights(), kernels, dtype="bfloat16", max_model_len=64
    )
    below = one_by_one(model, num_blocks=len(model.spec.blocks) - 1)
    batch, token_ids = make_batch(device), torch.tensor([7, 8, 9, 10, 60, 3], device=device)
    asked = torch.tensor(num_wanted, dtype=torch.int32)
    results = []
    for which, counts in ((model, None), (below, None), (model, asked)):
        caches = [_empty_pair(layer, device) for layer in model.spec.kv_layers]
        hidden = which.forward(token_ids, batch.positions, StepContext(batch, caches, counts))
        results.append((hidden, caches))
    (whole, whole_caches), (before, _), (found, found_caches) = results
    assert torch.equal(
        torch.stack([*itertools.chain(*found_caches)]),
        torch.stack([*itertools.chain(*whole_caches)]),
    )
    is_wanted = [index >= 5 - num_wanted[0] for index in range(5)] + [num_wanted[1] > 0]
    for row, is_asked in enumerate(is_wanted):
        assert torch.equal(found[row], (whole if is_asked else before)[row]), row


def _empty_pair(layer: KVLayerSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    keys = _empty(layer, device)
    return keys, keys if layer.is_latent else _empty(layer, device)


def _empty(layer: KVLayerSpec, device: torch.device) -> Tensor:
    return empty_cache(
        6, layer.num_kv_heads, BLOCK_SIZE, layer.head_dim, "bfloat16", device
    ).zero_()
