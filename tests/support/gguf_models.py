"""A real Llama checkpoint as a GGUF file in a chosen encoding, as llama.cpp's converter would lay
it out.

K-quants are rounded to nearest in the plainest way, from the format's description: the `gguf`
package, which rounds to the other encodings, can only read these.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from gguf_files import BLOCKS, Array, write_gguf
from safetensors.torch import load_file

SUPER = 256
_FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""For rows that are not whole super-blocks, as llama.cpp does."""
_PROJECTIONS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def store_gguf(folder: Path, original: Path, encoding: str, head: str) -> Path:
    """All projections in `encoding`, the tied embedding in `head`, norms in float32;
    the tokenizer beside it."""
    folder.mkdir(parents=True)
    for path in original.glob("tokenizer*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((original / "config.json").read_text())
    stored = {}
    for name, tensor in load_file(original / "model.safetensors").items():
        numbers: Array = tensor.float().numpy()
        place = _place(name)
        if numbers.ndim == 1:
            stored[place] = (numbers.shape, 0, numbers.tobytes())
            continue
        for module, heads in (
            ("attn_q.", config["num_attention_heads"]),
            ("attn_k.", config["num_key_value_heads"]),
        ):
            if module in place:  # the two halves that RoPE pairs, row by row in turn
                numbers = (
                    numbers.reshape(heads, 2, -1, numbers.shape[1])
                    .swapaxes(1, 2)
                    .reshape(numbers.shape)
                )
        kind = head if place == "token_embd.weight" else encoding
        if BLOCKS[kind][1] == SUPER and numbers.shape[1] % SUPER:
            kind = _FALLBACK[kind]
        stored[place] = (numbers.shape, BLOCKS[kind][0], _encode(numbers, kind))
    write_gguf(folder / "model.gguf", _metadata(config), stored)
    return folder


def _place(name: str) -> str:
    if not name.startswith("model.layers."):
        return {
            "model.embed_tokens.weight": "token_embd.weight",
            "model.norm.weight": "output_norm.weight",
        }[name]
    _, _, layer, module = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{_PROJECTIONS[module]}.weight"


def _metadata(config: dict[str, Any]) -> dict[str, Any]:
    sizes = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"], "rope.dimension_count": config["head_dim"],
    }  # fmt: skip
    ends = {
        f"tokenizer.ggml.{role}_token_id": config[f"{role}_token_id"] for role in ("bos", "eos")
    }
    return {
        "general.architecture": "llama",
        **{f"llama.{key}": value for key, value in sizes.items()},
        **ends,
    }


def _encode(numbers: Array, encoding: str) -> bytes:
    if encoding not in _SUPER_BLOCKS:
        return np.asarray(quantize(numbers, GGMLQuantizationType[encoding])).tobytes()
    blocks = _SUPER_BLOCKS[encoding](numbers.reshape(-1, SUPER).astype(np.float64))
    assert blocks.shape[1] == BLOCKS[encoding][2]
    return blocks.tobytes()


def _q4_k(numbers: Array) -> Array:
    head, values = _scaled_groups(numbers, 15)
    pairs = values.reshape(len(numbers), 4, 2, 32)
    return np.concatenate(
        [head, (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(len(numbers), -1)], axis=1
    )


def _q5_k(numbers: Array) -> Array:
    head, values = _scaled_groups(numbers, 31)
    high = np.bitwise_or.reduce((values >> 4) << np.arange(8, dtype=np.uint8)[:, None], axis=1)
    pairs = (values & 15).reshape(len(numbers), 4, 2, 32)
    return np.concatenate(
        [head, high, (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(len(numbers), -1)], axis=1
    )


def _scaled_groups(numbers: Array, most: int) -> tuple[Array, Array]:
    """Eight groups of 32 a super-block, each a scale and a minimum of six bits:
    the bytes before the values, and the values."""
    groups = numbers.reshape(-1, 8, 32)
    lows = np.maximum(0, -groups.min(2))
    steps = (groups.max(2).clip(0) + lows) / most
    unit, low_unit = (
        (each.max(1, keepdims=True) / 63).astype(np.float16) for each in (steps, lows)
    )
    scales, mins = (
        np.round(each / np.where(one, one, 1)).clip(0, 63).astype(np.uint8)
        for each, one in ((steps, unit), (lows, low_unit))
    )
    real = unit.astype(np.float64) * scales
    shifted = groups + (low_unit.astype(np.float64) * mins)[..., None]
    values = np.round(shifted / np.where(real, real, 1)[..., None]).clip(0, most).astype(np.uint8)
    packed = [
        scales[:, :4] | (scales[:, 4:] >> 4) << 6,
        mins[:, :4] | (mins[:, 4:] >> 4) << 6,
        (scales[:, 4:] & 15) | (mins[:, 4:] & 15) << 4,
    ]
    return np.concatenate([unit.view(np.uint8), low_unit.view(np.uint8), *packed], axis=1), values


def _q6_k(numbers: Array) -> Array:
    """Sixteen groups of 16, each with a scale of a signed byte."""
    groups = numbers.reshape(-1, 16, 16)
    steps = np.abs(groups).max(2) / 31
    unit = (steps.max(1, keepdims=True) / 127).astype(np.float16)
    scales = np.round(steps / np.where(unit, unit, 1)).clip(0, 127).astype(np.int8)
    real = unit.astype(np.float64) * scales
    values = (np.round(groups / np.where(real, real, 1)[..., None]).clip(-32, 31) + 32).astype(
        np.uint8
    )
    quarters = values.reshape(-1, 2, 4, 32)  # of each half: 32 values a quarter
    low, high = quarters & 15, quarters >> 4
    lows = np.concatenate(
        [low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], axis=2
    )
    highs = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    parts = [
        lows.reshape(-1, 128),
        highs.reshape(-1, 64),
        scales.view(np.uint8),
        unit.view(np.uint8),
    ]
    return np.concatenate(parts, axis=1)


_SUPER_BLOCKS: dict[str, Callable[[Array], Array]] = {"Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}
