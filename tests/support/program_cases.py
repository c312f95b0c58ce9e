"""For tests of programs: small decoders with every kind of block, a ragged step for them,
and what it leaves behind."""

from __future__ import annotations

import itertools
from functools import partial

import torch
from torch import Tensor

from quire.common.frozen_record import replace
from quire.kernels.interface import AttentionBatch, ForwardPass, Kernels
from quire.kernels.interpreter import Interpreter
from quire.models.blocks import AttentionSpec, BlockSpec, MlpSpec, Sublayer
from quire.models.declaration import DecoderSpec
from quire.models.lowering import lower
from quire.models.registry import declare
from quire.models.rope import RopeSpec
from quire.models.tensors import TensorSpec, layer_norm, linear
from quire.nn.builder import build_decoder
from quire.nn.decoder import DecoderModel
from quire.program.passes import select_wanted
from quire.weights.dummy import DummyWeights

SIZES: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 101,
    "max_position_embeddings": 64,
}

LATENT: dict[str, object] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "original_max_position_embeddings": 16,
    },
}


def parallel_decoder() -> DecoderSpec:
    """Attention and a plain MLP on one normed input, as in Phi-2,
    with a sublayer of its own behind them."""
    norm = partial(layer_norm, size=64, eps=1e-5)

    def block(at: str) -> BlockSpec:
        query, key, value = (
            linear(f"{at}.{name}", 64, width, has_bias=True)
            for name, width in (("q", 64), ("k", 32), ("v", 32))
        )
        attention = AttentionSpec(
            query, key, value, linear(f"{at}.o", 64, 64), 16, 0.25, RopeSpec(8, 10000.0)
        )
        mlp = MlpSpec(None, linear(f"{at}.up", 64, 96), linear(f"{at}.down", 96, 64), "gelu_tanh")
        more = replace(
            mlp, gate=linear(f"{at}.more.gate", 64, 96), up=linear(f"{at}.more.up", 64, 96)
        )
        shared = norm(f"{at}.norm")
        return BlockSpec(
            (
                (Sublayer(shared, attention), Sublayer(shared, mlp)),
                (Sublayer(norm(f"{at}.last"), more),),
            )
        )

    embedding = TensorSpec("embedding", (101, 64))
    return DecoderSpec(
        "Parallel",
        64,
        "float32",
        embedding,
        (block("a"), block("b")),
        norm("norm"),
        linear("head", 64, 101),
    )


SPECS: dict[str, DecoderSpec] = {
    "llama": declare(SIZES | {"architectures": ["LlamaForCausalLM"]}),
    "odd heads": declare(
        SIZES
        | {
            "architectures": ["LlamaForCausalLM"],
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 8,
        }
    ),
    "qwen3": declare(SIZES | {"architectures": ["Qwen3ForCausalLM"]}),
    "olmo2": declare(SIZES | {"architectures": ["Olmo2ForCausalLM"]}),
    "gemma2": declare(
        SIZES
        | {"architectures": ["Gemma2ForCausalLM"], "sliding_window": 4, "sliding_window_size": 4}
    ),
    "gpt2": declare(
        {
            "architectures": ["GPT2LMHeadModel"],
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "vocab_size": 101,
        }
    ),
    "parallel": parallel_decoder(),
    "qwen2 moe": declare(
        SIZES
        | {"architectures": ["Qwen2MoeForCausalLM"], "mlp_only_layers": [1], "num_experts": 5}
        | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
    ),
    "latent": declare(SIZES | LATENT | {"architectures": ["DeepseekV3ForCausalLM"]}),
    "latent of the stream": declare(
        SIZES
        | LATENT
        | {"architectures": ["DeepseekV2ForCausalLM"], "q_lora_rank": None, "n_group": 1}
        | {"topk_method": "greedy", "attention_bias": True}
    ),
    "olmoe": declare(SIZES | {"architectures": ["OlmoeForCausalLM"], "num_experts": 9}),
}
"""Queries of the odd heads end within a panel of the CPU's weights."""

BLOCK_SIZE = 4
RAGGED = ((0, 5), (2, 6), (7, 1), (0, 9), (3, 1), (1, 4))
"""Where sequences' new tokens begin, and how many they are."""
WANTED = [(1, 1, 1, 1, 1, 1), (0, 1, 0, 0, 1, 0), (5, 0, 1, 2, 0, 4), (0,) * 6, (0, 0, 0, 9, 0, 0)]
"""Of each of these sequences, so many hidden states; never most of them."""
Caches = list[tuple[Tensor, Tensor]]


def build(spec: DecoderSpec, kernels: Kernels, dtype: str = "float32") -> DecoderModel:
    """With dummy weights."""
    return build_decoder(spec, DummyWeights(), kernels, dtype=dtype, max_model_len=64)


def one_by_one(model: DecoderModel, num_blocks: int | None = None) -> DecoderModel:
    """The model, or its first blocks, run operation by operation as they were lowered."""
    spec = replace(model.spec, blocks=model.spec.blocks[:num_blocks])
    program = replace(lower(spec)[0], head=model.program.head)
    run = Interpreter(program, select_wanted(program), model.weights, model.kernels)
    return replace(model, spec=spec, program=program, run=run)


def run_ragged(
    model: DecoderModel, num_wanted: tuple[int, ...] | None = None, run: ForwardPass | None = None
) -> tuple[Tensor, Caches]:
    """Hidden states of all sequences of RAGGED, and the caches, which had been filled before."""
    generator = torch.Generator().manual_seed(1)
    num_blocks = 3 * len(RAGGED)
    tables = torch.randperm(num_blocks, generator=generator).to(torch.int32).view(len(RAGGED), 3)
    caches = []
    for layer in model.spec.kv_layers:
        shape = (num_blocks, layer.num_kv_heads, BLOCK_SIZE, layer.head_dim)
        keys, values = (torch.randn(shape, generator=generator).to(model.dtype) for _ in range(2))
        caches.append((keys, keys if layer.is_latent else values))
    positions = torch.cat([torch.arange(start, start + count) for start, count in RAGGED])
    owners = torch.repeat_interleave(
        torch.arange(len(RAGGED)), torch.tensor([count for _, count in RAGGED])
    )
    batch = AttentionBatch(
        query_start=torch.tensor(
            [0, *itertools.accumulate(count for _, count in RAGGED)], dtype=torch.int32
        ),
        context_len=torch.tensor([start + count for start, count in RAGGED], dtype=torch.int32),
        block_tables=tables,
        slots=tables[owners, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE,
        positions=positions,
        max_query_len=max(count for _, count in RAGGED),
        max_context_len=max(start + count for start, count in RAGGED),
    )
    wanted = None if num_wanted is None else torch.tensor(num_wanted, dtype=torch.int32)
    with torch.inference_mode():
        return (run or model.run)(positions * 7 % 101, positions, batch, caches, wanted), caches


def wanted_rows(num_wanted: tuple[int, ...]) -> list[int]:
    """Of RAGGED's tokens, those that are wanted."""
    ends = itertools.accumulate(count for _, count in RAGGED)
    return [
        token
        for end, count in zip(ends, num_wanted, strict=True)
        for token in range(end - count, end)
    ]


def are_equal(ours: Caches, theirs: Caches) -> bool:
    """Whether all keys and values are the same, bit for bit."""
    return all(
        torch.equal(a, b)
        for pair, other in zip(ours, theirs, strict=True)
        for a, b in zip(pair, other, strict=True)
    )
