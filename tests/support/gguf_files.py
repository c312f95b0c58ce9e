"""GGUF files for tests: a plain writer of the container, and tiny models beside a floating-point
twin.

Blocks are random bytes with sane scales; what they stand for is asked of the `gguf` package, the
format's own tool.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.torch import save_file

Array = NDArray[Any]

# Encoding: number in the file, numbers a block, bytes a block, and where its float16 scales lie
# with their size.
BLOCKS: dict[str, tuple[int, int, int, dict[int, float]]] = {
    "Q4_0": (2, 32, 18, {0: 0.01}),
    "Q4_1": (3, 32, 20, {0: 0.01, 2: 0.05}),
    "Q5_0": (6, 32, 22, {0: 0.005}),
    "Q5_1": (7, 32, 24, {0: 0.005, 2: 0.05}),
    "Q8_0": (8, 32, 34, {0: 0.0007}),
    "Q4_K": (12, 256, 144, {0: 0.0003, 2: 0.0012}),
    "Q5_K": (13, 256, 176, {0: 0.00015, 2: 0.0012}),
    "Q6_K": (14, 256, 210, {208: 0.00003}),
    "MXFP4": (39, 32, 17, {}),
}
FLOATS = {"F32": 0, "F16": 1, "BF16": 30}


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[tuple[int, ...], int, bytes]],
) -> Path:
    """Version 3; tensors are name to (shape, the contiguous dimension last;
    number of the encoding; data)."""
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        header += _text(key) + _value(value)
    offset, body = 0, b""
    for name, (shape, number, data) in tensors.items():
        header += (
            _text(name)
            + struct.pack("<I", len(shape))
            + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        )
        header += struct.pack("<IQ", number, offset)
        body += data + bytes(-len(data) % 32)
        offset = len(body)
    path.write_bytes(header + bytes(-len(header) % 32) + body)
    return path


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    head = struct.pack("<I", 9)
    if all(isinstance(item, str) for item in value):
        return head + struct.pack("<IQ", 8, len(value)) + b"".join(map(_text, value))
    kind, code = (6, "f") if any(isinstance(item, float) for item in value) else (5, "i")
    return head + struct.pack("<IQ", kind, len(value)) + struct.pack(f"<{len(value)}{code}", *value)


def random_blocks(
    encoding: str, shape: tuple[int, ...], rng: np.random.Generator
) -> tuple[bytes, Array]:
    """The bytes of a tensor, and the float32 numbers that they stand for."""
    _, length, num_bytes, scales = BLOCKS[encoding]
    blocks = rng.integers(0, 256, (int(np.prod(shape)) // length, num_bytes), dtype=np.uint8)
    for at, size in scales.items():
        numbers = (rng.uniform(0.5, 1.5, len(blocks)) * size).astype(np.float16)
        blocks[:, at : at + 2] = numbers.view(np.uint8).reshape(-1, 2)
    if encoding == "MXFP4":
        blocks[:, 0] = rng.integers(117, 121, len(blocks))  # powers of two about 1 / 256
    rows = blocks.reshape(*shape[:-1], -1)
    return blocks.tobytes(), np.asarray(dequantize(rows, GGMLQuantizationType[encoding])).reshape(
        shape
    )


def floats(encoding: str, numbers: Array) -> tuple[bytes, Array]:
    """As `random_blocks`, for given numbers in a floating-point encoding."""
    if encoding == "F32":
        return numbers.astype("<f4").tobytes(), numbers
    tensor = torch.from_numpy(numbers).to(torch.float16 if encoding == "F16" else torch.bfloat16)
    return tensor.view(torch.int16).numpy().astype("<i2").tobytes(), tensor.float().numpy()


EXPERTS, CHOSEN, INNER, SHARED = 5, 2, 64, 96
HIDDEN, FFN, VOCAB, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 256, 256, 128, 8, 4, 32, 2
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_CLASSES |= {
    "gemma3": "Gemma3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
_SPARSE = ("mixtral", "olmoe", "qwen2moe", "qwen3moe")
_PROJECTIONS = {
    "attn_q": ("self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN),
    "attn_k": ("self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": ("self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": ("self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM),
    "ffn_gate": ("mlp.gate_proj", FFN, HIDDEN), "ffn_up": ("mlp.up_proj", FFN, HIDDEN),
    "ffn_down": ("mlp.down_proj", HIDDEN, FFN),
}  # fmt: skip
_PHI_PROJECTIONS = {
    "attn_qkv": ("self_attn.qkv_proj", (HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    "attn_output": ("self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM),
    "ffn_up": ("mlp.gate_up_proj", 2 * FFN, HIDDEN), "ffn_down": ("mlp.down_proj", HIDDEN, FFN),
}  # fmt: skip
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_GEMMA_NORMS = {
    "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip


class TinyModel:
    """A GGUF file and a Hugging Face folder of float32 that must compute the same."""

    def __init__(
        self, family: str, encodings: Mapping[str, str], *, is_tied: bool = False, seed: int = 0
    ) -> None:
        """`encodings`: the beginning of a GGUF name to an encoding; Q8_0 for other projections,
        F32 for the rest."""
        self.family = family
        self.architecture = "llama" if family == "mixtral" else family
        """As llama.cpp calls it."""
        self.inner = INNER if family in ("qwen2moe", "qwen3moe") else FFN
        self._encodings = encodings
        self._rng = np.random.default_rng(seed)
        self.stored: dict[str, tuple[tuple[int, ...], int, bytes]] = {}
        self.twin: dict[str, torch.Tensor] = {}
        self.is_gemma = family.startswith("gemma")
        self._matrix("token_embd.weight", "model.embed_tokens.weight", (VOCAB, HIDDEN), "F32")
        for layer in range(LAYERS):
            self._layer(f"blk.{layer}", f"model.layers.{layer}")
        self._norm("output_norm", "model.norm", HIDDEN)
        if not is_tied:
            self._matrix("output.weight", "lm_head.weight", (VOCAB, HIDDEN), "Q8_0")
        self.is_tied = is_tied

    def _layer(self, at: str, hf: str) -> None:
        for name, (module, num_outputs, num_inputs) in (
            _PHI_PROJECTIONS if self.family == "phi3" else _PROJECTIONS
        ).items():
            if self.family in _SPARSE and name.startswith("ffn"):
                continue
            is_reordered = self.architecture == "llama"
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name) if is_reordered else None
            self._matrix(
                f"{at}.{name}.weight",
                f"{hf}.{module}.weight",
                (num_outputs, num_inputs),
                "Q8_0",
                heads,
            )
            if self.family in ("qwen2", "qwen2moe") and name in ("attn_q", "attn_k", "attn_v"):
                self._vector(f"{at}.{name}.bias", f"{hf}.{module}.bias", num_outputs, 0.1)
        for name, module in (_GEMMA_NORMS if self.is_gemma else _NORMS).items():
            self._norm(f"{at}.{name}", f"{hf}.{module}", HIDDEN)
        if self.family in ("qwen3", "gemma3", "qwen3moe", "olmoe"):
            wide = (HEADS, KV_HEADS) if self.family == "olmoe" else (1, 1)
            self._norm(f"{at}.attn_q_norm", f"{hf}.self_attn.q_norm", wide[0] * HEAD_DIM)
            self._norm(f"{at}.attn_k_norm", f"{hf}.self_attn.k_norm", wide[1] * HEAD_DIM)
        if self.family in _SPARSE:
            self._experts(at, hf)

    def _experts(self, at: str, hf: str) -> None:
        """All experts of a layer in one tensor for each role, a router, and a shared one."""
        is_mixtral = self.family == "mixtral"
        hf = f"{hf}.block_sparse_moe" if is_mixtral else f"{hf}.mlp"
        names = {"gate": "w1", "up": "w3", "down": "w2"}
        for role, short in names.items():
            shape = (HIDDEN, self.inner) if role == "down" else (self.inner, HIDDEN)
            name, module = f"{at}.ffn_{role}_exps.weight", short if is_mixtral else f"{role}_proj"
            encoding = self._encodings.get(f"ffn_{role}_exps", "Q8_0")
            data, numbers = random_blocks(encoding, (EXPERTS, *shape), self._rng)
            self.stored[name] = ((EXPERTS, *shape), BLOCKS[encoding][0], data)
            for expert, part in enumerate(numbers):
                whole = torch.from_numpy(np.ascontiguousarray(part))
                self.twin[f"{hf}.experts.{expert}.{module}.weight"] = whole
        router = (EXPERTS, HIDDEN)
        self._matrix(f"{at}.ffn_gate_inp.weight", f"{hf}.gate.weight", router, "F32")
        if self.family == "qwen2moe":
            for role in names:
                shape = (HIDDEN, SHARED) if role == "down" else (SHARED, HIDDEN)
                module = f"{hf}.shared_expert.{role}_proj.weight"
                self._matrix(f"{at}.ffn_{role}_shexp.weight", module, shape, "Q8_0")
            gate = f"{hf}.shared_expert_gate.weight"
            self._vector(f"{at}.ffn_gate_inp_shexp.weight", gate, HIDDEN, 0.1)
            self.twin[gate] = self.twin[gate][None]

    def _matrix(
        self, name: str, hf: str, shape: tuple[int, int], encoding: str, heads: int | None = None
    ) -> None:
        encoding = next(
            (
                kind
                for start, kind in self._encodings.items()
                if name.split(".", 2)[-1].startswith(start) or name.startswith(start)
            ),
            encoding,
        )
        if encoding in FLOATS:
            number = FLOATS[encoding]
            data, numbers = floats(
                encoding, (self._rng.standard_normal(shape) * 0.06).astype(np.float32)
            )
        else:
            number = BLOCKS[encoding][0]
            data, numbers = random_blocks(encoding, shape, self._rng)
        self.stored[name] = (shape, number, data)
        # llama.cpp's converter stores each head's two halves row by row in turn
        if heads is not None:
            numbers = (
                numbers.reshape(heads, shape[0] // heads // 2, 2, shape[1])
                .swapaxes(1, 2)
                .reshape(shape)
            )
        self.twin[hf] = torch.from_numpy(np.ascontiguousarray(numbers))

    def _vector(self, name: str, hf: str, size: int, std: float) -> None:
        numbers = (self._rng.standard_normal(size) * std).astype(np.float32)
        self.stored[name] = ((size,), 0, numbers.tobytes())
        self.twin[hf] = torch.from_numpy(numbers)

    def _norm(self, name: str, hf: str, size: int) -> None:
        numbers = (self._rng.standard_normal(size) * 0.1 + 1).astype(np.float32)
        self.stored[f"{name}.weight"] = ((size,), 0, numbers.tobytes())
        self.twin[f"{hf}.weight"] = torch.from_numpy(numbers - 1 if self.is_gemma else numbers)

    @property
    def metadata(self) -> dict[str, Any]:
        sizes = {
            "block_count": LAYERS, "context_length": 128, "embedding_length": HIDDEN,
            "feed_forward_length": FFN, "attention.head_count": HEADS,
            "attention.head_count_kv": KV_HEADS, "attention.key_length": HEAD_DIM,
            "attention.value_length": HEAD_DIM, "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 10000.0, "rope.dimension_count": HEAD_DIM,
        }  # fmt: skip
        if self.is_gemma:
            sizes |= {"attention.sliding_window": 8}
        if self.family == "gemma2":
            sizes |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
        if self.family in _SPARSE:
            sizes |= {"expert_count": EXPERTS, "expert_used_count": CHOSEN}
            sizes |= {"expert_feed_forward_length": self.inner}
            sizes |= {"expert_shared_feed_forward_length": SHARED}
        return {
            "general.architecture": self.architecture,
            **{f"{self.architecture}.{key}": value for key, value in sizes.items()},
        }

    @property
    def config(self) -> dict[str, Any]:
        extra: dict[str, Any] = (
            {"query_pre_attn_scalar": HEAD_DIM, "sliding_window": 8} if self.is_gemma else {}
        )
        if self.family == "gemma2":
            extra |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
        if self.family == "gemma3":
            extra |= {"rope_theta": 10000.0, "rope_local_base_freq": 10000.0}
        if self.family in _SPARSE:
            count = "num_local_experts" if self.family == "mixtral" else "num_experts"
            extra |= {count: EXPERTS, "num_experts_per_tok": CHOSEN}
        if self.family in ("qwen2moe", "qwen3moe"):
            is_normalised = self.family == "qwen3moe"
            extra |= {"moe_intermediate_size": INNER, "norm_topk_prob": is_normalised}
        if self.family == "qwen2moe":
            extra |= {"shared_expert_intermediate_size": SHARED}
        return {
            "architectures": [_CLASSES[self.family]], "hidden_size": HIDDEN,
            "intermediate_size": FFN,
            "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "vocab_size": VOCAB,
            "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "torch_dtype": "float32",
            "tie_word_embeddings": self.is_tied, **extra,
        }  # fmt: skip

    def write(self, folder: Path, **metadata: Any) -> tuple[Path, Path]:
        """The GGUF file and the twin's folder."""
        twin = folder / "twin"
        twin.mkdir()
        save_file(self.twin, twin / "model.safetensors")
        (twin / "config.json").write_text(json.dumps(self.config))
        return write_gguf(folder / "model.gguf", self.metadata | metadata, self.stored), twin
