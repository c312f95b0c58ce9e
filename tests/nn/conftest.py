"""For tests of whole models: a small driver,
and for each family the same weights here and in `transformers`."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.common.numbers import ceil_div
from quire.kernels import cpu
from quire.kernels.interface import AttentionBatch, Kernels
from quire.kernels.reference.kernels import ReferenceKernels
from quire.kernels.selection import load
from quire.models.registry import declare
from quire.nn.builder import build_decoder
from quire.nn.context import StepContext
from quire.nn.decoder import DecoderModel
from quire.weights.checkpoint import SafetensorsCheckpoint
from quire.weights.folder import read_model_config

BLOCK_SIZE = 16
DEVICE = os.environ.get("QUIRE_TEST_DEVICE", "cpu")


@dataclass
class Driver:
    """Feeds one sequence to a model through a paged cache of its own."""

    model: DecoderModel
    max_len: int
    length: int = 0
    block_size: int = BLOCK_SIZE
    caches: list[tuple[Tensor, Tensor]] = field(init=False)
    table: Tensor = field(init=False)

    def __post_init__(self) -> None:
        device = self.model.kernels.device
        num_blocks = ceil_div(self.max_len, self.block_size)
        # Backwards, so that nothing passes that forgets the table; NaN, so that no slot is read
        # before it is written.
        self.table = torch.arange(num_blocks - 1, -1, -1, dtype=torch.int32, device=device)
        self.caches = []
        for layer in self.model.spec.kv_layers:
            shape = (num_blocks, layer.num_kv_heads, self.block_size, layer.head_dim)
            keys = torch.full(shape, torch.nan, dtype=self.model.dtype, device=device)
            self.caches.append((keys, keys if layer.is_latent else keys.clone()))

    def feed(self, token_ids: Sequence[int], num_wanted: int | None = None) -> Tensor:
        """Compute a chunk; float32 logits [chunk, V], on the CPU. `num_wanted`:
        hidden states that are asked for; None: all."""
        device = self.table.device
        positions = torch.arange(self.length, self.length + len(token_ids), device=device)
        blocks = self.table[positions // self.block_size].long()
        self.length += len(token_ids)
        batch = AttentionBatch(
            query_start=torch.tensor([0, len(token_ids)], dtype=torch.int32, device=device),
            context_len=torch.tensor([self.length], dtype=torch.int32, device=device),
            block_tables=self.table[None],
            slots=blocks * self.block_size + positions % self.block_size,
            positions=positions,
            max_query_len=len(token_ids),
            max_context_len=self.length,
        )
        with torch.inference_mode():
            there = torch.tensor(token_ids, device=device)
            wanted = None if num_wanted is None else torch.tensor([num_wanted], dtype=torch.int32)
            hidden = self.model.forward(there, positions, StepContext(batch, self.caches, wanted))
            return self.model.logits(hidden).cpu()

    def feed_chunks(self, token_ids: Sequence[int], sizes: Iterable[int]) -> Tensor:
        """Compute consecutive chunks of the given sizes; the rest token by token."""
        rows, start = [], 0
        for size in (*sizes, *[1] * len(token_ids)):
            if chunk := token_ids[start : start + size]:
                rows.append(self.feed(chunk))
            start += size
        return torch.cat(rows)

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Greedy continuation of a prompt."""
        out = [int(self.feed(prompt)[-1].argmax())]
        while len(out) < num_tokens:
            out.append(int(self.feed(out[-1:])[-1].argmax()))
        return out


@pytest.fixture
def drive() -> Callable[..., Driver]:
    """`drive(model, max_len)` gives a fresh driver."""
    return Driver


_PRESETS = "data/tokenizers/model_configs/"
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 199,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_type": "llama3",
}
_LONG_ROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.0, 1.01, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 1.12, 2.19, 7.44, 22.9, 32.03],
}
# Family to a real config in the shared data (None: written out here) and what is scaled down or
# switched on: every kind of layer occurs, and windows are shorter than the texts.
_LATENT: dict[str, object] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
}
_YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, tuple[str | None, dict[str, object]]] = {
    "llama3": ("meta-llama--Llama-3.1-8B.json", {"rope_scaling": _LLAMA3_ROPE}),
    "llama2": ("mlc_presets/llama2_7b.json", {"num_key_value_heads": 4, "pretraining_tp": 1}),
    "llama_tied": (
        "mlc_presets/smollm2_135m.json",
        {"num_attention_heads": 9, "num_key_value_heads": 3},
    ),
    "llama_biased": (
        "meta-llama--Llama-3.1-8B.json",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 24},
    ),
    "mistral": ("mlc_presets/mistral_7b_v03.json", {"sliding_window": 24}),
    "qwen2": (
        "mlc_presets/qwen2_0_5b.json",
        {
            "use_sliding_window": True,
            "sliding_window": 24,
            "max_window_layers": 1,
            "num_hidden_layers": 3,
        },
    ),
    "qwen3": ("Qwen--Qwen3-0.6B.json", {"head_dim": 32}),
    "gemma2": (
        "mlc_presets/gemma2_2b.json",
        {
            "head_dim": 16,
            "sliding_window": 24,
            "sliding_window_size": 24,
            "query_pre_attn_scalar": 20,
        }
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "mlc_presets/gemma3_1b_it.json",
        {
            "head_dim": 16,
            "sliding_window": 24,
            "sliding_window_pattern": 3,
            "num_hidden_layers": 4,
            "query_pre_attn_scalar": 20,
            "num_key_value_heads": 1,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "phi3": (
        "mlc_presets/phi-4.json",
        {"rope_scaling": _LONG_ROPE, "original_max_position_embeddings": 32, "sliding_window": 40},
    ),
    "gpt2": (
        "mlc_presets/gpt2.json",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "n_ctx": 256},
    ),
    "smollm3": (
        None,
        {
            "architectures": ["SmolLM3ForCausalLM"],
            "model_type": "smollm3",
            "hidden_act": "silu",
            "num_hidden_layers": 3,
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": False,
            "rope_theta": 5e6,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": ("mlc_presets/olmo2_13b.json", {}),
    "mixtral": (
        "mistralai--Mixtral-8x7B-v0.1.json",
        {"num_local_experts": 5, "sliding_window": 24},
    ),
    "qwen2_moe": (
        "mlc_presets/qwen2moe.json",
        {"num_hidden_layers": 4, "mlp_only_layers": [0], "decoder_sparse_step": 2}
        | {"moe_intermediate_size": 40, "shared_expert_intermediate_size": 72, "num_experts": 6},
    ),
    "qwen3_moe": (
        "Qwen--Qwen3-30B-A3B.json",
        {"moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 4},
    ),
    "gpt_oss": (
        "openai--gpt-oss-20b.json",
        {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_hidden_layers": 3,
            "sliding_window": 24,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "experts_per_token": 3,
            "intermediate_size": 48,
            "initial_context_length": 32,
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "rope_type": "yarn",
                "truncate": False,
            },
        },
    ),
    "deepseek_v2_lite": (
        "mlc_presets/deepseek_v2_lite.json",
        _LATENT
        | {"n_routed_experts": 8, "num_experts_per_tok": 3, "routed_scaling_factor": 1.5}
        | {"rope_scaling": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}, "q_lora_rank": None},
    ),
    "deepseek_v2": (
        "mlc_presets/deepseek_v2_lite.json",
        _LATENT
        | {"n_routed_experts": 12, "num_experts_per_tok": 3, "routed_scaling_factor": 16.0}
        | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
        | {"rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}, "q_lora_rank": 40}
        | {"attention_bias": True, "n_shared_experts": 1},
    ),
    "deepseek_v3": (
        "nvidia--DeepSeek-V3.1-NVFP4.json",
        _LATENT
        | {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
        | {"rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "q_lora_rank": 40},
    ),
    "deepseek_v3_halves": (
        "nvidia--DeepSeek-V3.1-NVFP4.json",
        _LATENT
        | {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 1, "topk_group": 1}
        | {"rope_scaling": None, "q_lora_rank": None, "rope_interleave": False}
        | {"norm_topk_prob": False, "first_k_dense_replace": 0},
    ),
    "olmoe": (
        None,
        {
            "architectures": ["OlmoeForCausalLM"],
            "model_type": "olmoe",
            "clip_qkv": None,
            "hidden_act": "silu",
            "norm_topk_prob": False,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "router_aux_loss_coef": 0.01,
            "tie_word_embeddings": False,
        },
    ),
}


def tiny_config(shared: Path, family: str) -> dict[str, object]:
    """A real config scaled down."""
    file, changes = FAMILIES[family]
    base = {} if file is None else json.loads((shared / _PRESETS / file).read_text())
    tiny = {
        k: v for k, v in _TINY.items() if family != "gpt2" or k in ("vocab_size", "torch_dtype")
    }
    if "head_dim" in base:
        tiny["head_dim"] = 16
    config = base | tiny | changes
    config.pop("quantization_config", None)  # tests/quant
    if "num_attention_heads" in changes:
        config |= {"hidden_size": 16 * changes["num_attention_heads"], "head_dim": 16}  # type: ignore[operator]
    return config


def reference_model(config: dict[str, object]) -> Any:
    """The model of `transformers` that a config describes, with random weights,
    norms and biases included."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = copy.deepcopy(
        {k: v for k, v in config.items() if k not in ("model_type", "auto_map", "torch_dtype")}
    )
    hf_config = AutoConfig.for_model(str(config["model_type"]), **values)
    hf_config.eos_token_id = None  # greedy texts of a fixed length
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(hf_config, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            std = 0.2 if parameter.ndim == 1 else 0.1
            parameter.copy_((parameter if parameter.ndim == 1 else 0) + std * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # of both signs
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    return model


@dataclass
class Pair:
    """The same random weights in `transformers` and in Quire,
    and the folder they travelled through."""

    family: str
    config: dict[str, object]
    reference: Any
    folder: Path
    _logits: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    _texts: dict[tuple[tuple[int, ...], int], list[int]] = field(default_factory=dict)

    @property
    def has_experts(self) -> bool:
        """Whether a router decides what computes a token."""
        keys = ("num_experts", "num_local_experts", "n_routed_experts")
        return any(key.startswith(keys) for key in self.config)

    def build(self, dtype: str = "float32", kernels: Kernels | None = None) -> DecoderModel:
        """Load the folder into a Quire model, on the reference kernels if no others are given."""
        spec = declare(read_model_config(self.folder))
        with SafetensorsCheckpoint(self.folder, spec) as weights:
            return build_decoder(
                spec, weights, kernels or ReferenceKernels(), dtype=dtype, max_model_len=256
            )

    def reference_logits(self, token_ids: Sequence[int]) -> Tensor:
        """float32 [tokens, V] of one full forward pass, computed once."""
        known = tuple(token_ids)
        if known not in self._logits:
            with torch.inference_mode():
                output = self.reference(torch.tensor([token_ids]), use_cache=False)
                self._logits[known] = output.logits[0].float()
        return self._logits[known]

    def reference_greedy(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """The tokens that follow a prompt, computed once."""
        asked = (tuple(token_ids), num_tokens)
        if asked not in self._texts:
            generated = self.reference.generate(
                torch.tensor([token_ids]),
                attention_mask=torch.ones(1, len(token_ids), dtype=torch.long),
                max_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
            )
            self._texts[asked] = generated[0, len(token_ids) :].tolist()
        return self._texts[asked]


@pytest.fixture(params=["reference", "cpu"] if DEVICE == "cpu" else ["triton"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Each back end; the native one is skipped, with its reasons, where it cannot run.
    On a GPU (`make gpu-test`) its own."""
    if request.param == "triton":
        return load("triton", DEVICE)
    if request.param == "cpu" and (reasons := cpu.reasons_against("cpu", torch.float32)):
        pytest.skip("; ".join(reasons))
    return load(request.param)


@pytest.fixture
def native() -> Kernels:
    """The native back end; skipped, with its reasons, where it cannot run."""
    if reasons := cpu.reasons_against("cpu", torch.float32):
        pytest.skip("; ".join(reasons))
    return load("cpu")


@pytest.fixture(scope="module", params=FAMILIES)
def pair(
    request: pytest.FixtureRequest, shared: Path, tmp_path_factory: pytest.TempPathFactory
) -> Pair:
    """One pair per family."""
    torch.set_num_threads(1)
    config = tiny_config(shared, request.param)
    reference = reference_model(config)
    folder = tmp_path_factory.mktemp(request.param)
    reference.save_pretrained(folder)
    return Pair(request.param, config, reference, folder)
