"""Tiny checkpoints in the public quantized formats, each beside a floating-point twin that it must
equal.

Written from the formats' descriptions with plain numpy loops, and sharing no code with the package
that reads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.kernels.interface import QuantizedWeight

Array = NDArray[Any]
Tensors = dict[str, Tensor]
Source = np.random.Generator | Array
"""Integers and scales are drawn, or are those of given weights [outputs, inputs],
rounded to nearest."""
Pack = Callable[[str, tuple[int, int], Source], tuple[Tensors, Array]]
"""From a module's name and its [outputs, inputs] to the tensors stored for it and the
weights that they stand for."""

HIDDEN, FFN, VOCAB, HEAD_DIM = 64, 96, 128, 16
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": FFN,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": HEAD_DIM, "vocab_size": VOCAB, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "torch_dtype": "float32", "eos_token_id": 2,
}  # fmt: skip
_KV, _Q = 2 * HEAD_DIM, 4 * HEAD_DIM
MODULES = {
    "self_attn.q_proj": (_Q, HIDDEN), "self_attn.k_proj": (_KV, HIDDEN),
    "self_attn.v_proj": (_KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, _Q), "mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN, HIDDEN),
    "mlp.down_proj": (HIDDEN, FFN),
}  # fmt: skip


def write_pair(
    folder: Path, pack: Pack, quantization_config: Mapping[str, Any] | None, seed: int = 0
) -> tuple[Path, Path]:
    """A checkpoint whose projections `pack` stores, and its twin of float32 weights."""
    rng = np.random.default_rng(seed)
    others: Tensors = {
        "model.embed_tokens.weight": _normal(rng, VOCAB, HIDDEN),
        "lm_head.weight": _normal(rng, VOCAB, HIDDEN) * 0.3,
        "model.norm.weight": _normal(rng, HIDDEN) * 0.1 + 1,
    }
    packed: Tensors = {}
    plain: Tensors = {}
    for layer in range(2):
        at = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            others[f"{at}.{norm}.weight"] = _normal(rng, HIDDEN) * 0.1 + 1
        for name, shape in MODULES.items():
            tensors, weight = pack(f"{at}.{name}", shape, rng)
            packed |= tensors
            plain[f"{at}.{name}.weight"] = torch.from_numpy(weight.astype(np.float32))
    extra = {} if quantization_config is None else {"quantization_config": quantization_config}
    return _write(folder / "quantized", others | packed, extra), _write(
        folder / "plain", others | plain, {}
    )


def store_model(
    folder: Path, original: Path, pack: Pack, quantization_config: Mapping[str, Any]
) -> Path:
    """A real checkpoint with its projections, but for a tied head, stored by `pack`."""
    folder.mkdir(parents=True)
    for path in original.glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((original / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "quantization_config": quantization_config})
    )
    tensors: Tensors = {}
    for name, tensor in load_file(original / "model.safetensors").items():
        if "_proj." in name:
            stored, _ = pack(
                name.removesuffix(".weight"),
                (tensor.shape[0], tensor.shape[1]),
                tensor.float().numpy(),
            )
            tensors |= {key: value.contiguous() for key, value in stored.items()}
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")
    return folder


def _write(folder: Path, tensors: Tensors, extra: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps({**CONFIG, **extra}))
    return folder


def _normal(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))


def words_of(values: Array, bits: int) -> Array:
    """Unsigned integers [A, B] to int32 [A, B * bits / 32]: the first value in the lowest bits."""
    per_word = 32 // bits
    words = np.zeros((values.shape[0], values.shape[1] // per_word), dtype=np.uint32)
    for place in range(per_word):
        words |= values[:, place::per_word].astype(np.uint32) << np.uint32(bits * place)
    return words.view(np.int32)


def _numbers(
    source: Source, shape: tuple[int, int], bits: int, group: int
) -> tuple[Array, Array, Array]:
    """Unsigned values [N, K], and scales and zero points [N, K / group];
    scales are float16 numbers."""
    if isinstance(source, np.ndarray):
        return _rounded(source, bits, group)
    rng, groups = source, (shape[0], shape[1] // group)
    values = rng.integers(0, 2**bits, shape)
    values[0, :2] = (0, 2**bits - 1)
    scales = (rng.uniform(0.5, 1.5, groups) * 0.6 / 2**bits).astype(np.float16).astype(np.float32)
    return values, scales, rng.integers(1, 2**bits, groups)


def _rounded(weights: Array, bits: int, group: int) -> tuple[Array, Array, Array]:
    """As `_numbers`: each group's range, widened to hold zero, divided evenly."""
    groups = weights.astype(np.float64).reshape(weights.shape[0], -1, group)
    low, high = np.minimum(groups.min(2), 0), np.maximum(groups.max(2), 0)
    scales = ((high - low) / (2**bits - 1)).astype(np.float16).astype(np.float32)
    zeros = np.clip(np.round(-low / scales), 1, 2**bits - 1).astype(np.int64)
    values = np.clip(np.round(groups / scales[..., None]) + zeros[..., None], 0, 2**bits - 1)
    return values.astype(np.int64).reshape(weights.shape), scales, zeros


def gptq(
    bits: int, group: int, *, version: int = 1, is_symmetric: bool = False, order: str = "none"
) -> Pack:
    """order: "none", "identity" (g_idx is there and says nothing), "blocks" (groups swapped),
    "scattered"."""

    def pack(name: str, shape: tuple[int, int], source: Source) -> tuple[Tensors, Array]:
        values, scales, zeros = _numbers(source, shape, bits, group)
        if is_symmetric:
            zeros[:] = 2 ** (bits - 1)
        index = np.arange(shape[1]) // group
        if order == "scattered":
            assert isinstance(source, np.random.Generator)
            index = source.permutation(index)
        elif order == "blocks":
            index = index[::-1].copy()
        tensors = {
            f"{name}.qweight": torch.from_numpy(words_of(values, bits).T.copy()),
            f"{name}.qzeros": torch.from_numpy(words_of(zeros.T - version, bits)),
            f"{name}.scales": torch.from_numpy(scales.T.astype(np.float16)),
        }
        if order != "none":
            tensors[f"{name}.g_idx"] = torch.from_numpy(index.astype(np.int32))
        return tensors, (values - zeros[:, index]) * scales[:, index]

    return pack


def awq(group: int) -> Pack:
    """Within a word, from the lowest bits: columns 0, 2, 4, 6, 1, 3, 5, 7."""

    def interleave(values: Array) -> Array:
        columns = values.reshape(values.shape[0], -1, 8)
        return words_of(columns[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(values.shape), 4)

    def pack(name: str, shape: tuple[int, int], source: Source) -> tuple[Tensors, Array]:
        values, scales, zeros = _numbers(source, shape, 4, group)
        tensors = {
            f"{name}.qweight": torch.from_numpy(interleave(values.T)),
            f"{name}.qzeros": torch.from_numpy(interleave(zeros.T)),
            f"{name}.scales": torch.from_numpy(scales.T.astype(np.float16)),
        }
        return tensors, (values - np.repeat(zeros, group, 1)) * np.repeat(scales, group, 1)

    return pack


def packed_integers(bits: int, group: int, *, is_symmetric: bool) -> Pack:
    """compressed-tensors, "pack-quantized"."""

    def pack(name: str, shape: tuple[int, int], source: Source) -> tuple[Tensors, Array]:
        values, scales, zeros = _numbers(source, shape, bits, group)
        if is_symmetric:
            zeros[:] = 2 ** (bits - 1)
        tensors = {
            f"{name}.weight_packed": torch.from_numpy(words_of(values, bits)),
            f"{name}.weight_scale": torch.from_numpy(scales),
            f"{name}.weight_shape": torch.tensor(shape),
        }
        if not is_symmetric:
            tensors[f"{name}.weight_zero_point"] = torch.from_numpy(
                words_of(zeros.T, bits).T.copy()
            )
        return tensors, (values - np.repeat(zeros, group, 1)) * np.repeat(scales, group, 1)

    return pack


def byte_integers(*, is_symmetric: bool = True, is_per_tensor: bool = False) -> Pack:
    """compressed-tensors, "int-quantized": a signed byte each."""

    def pack(name: str, shape: tuple[int, int], source: Source) -> tuple[Tensors, Array]:
        if isinstance(source, np.ndarray):
            assert is_symmetric and not is_per_tensor
            scales = (np.abs(source).max(1, keepdims=True) / 127).astype(np.float32)
            values = np.round(source / scales).astype(np.int64)
            tensors = {
                f"{name}.weight": torch.from_numpy(values.astype(np.int8)),
                f"{name}.weight_scale": torch.from_numpy(scales),
            }
            return tensors, values * scales
        rng = source
        values = rng.integers(-128, 128, shape)
        values[0, :2] = (-128, 127)
        scales = (rng.uniform(0.5, 1.5, (1, 1) if is_per_tensor else (shape[0], 1)) * 0.002).astype(
            np.float32
        )
        zeros = (
            np.zeros(scales.shape, dtype=np.int64)
            if is_symmetric
            else rng.integers(-60, 60, scales.shape)
        )
        tensors = {
            f"{name}.weight": torch.from_numpy(values.astype(np.int8)),
            f"{name}.weight_scale": torch.from_numpy(scales if not is_per_tensor else scales[0]),
        }
        if not is_symmetric:
            tensors[f"{name}.weight_zero_point"] = torch.from_numpy(zeros.astype(np.int8))
        return tensors, (values - zeros) * scales

    return pack


def grouped_byte_integers(bits: int, group: int) -> Pack:
    """compressed-tensors, "int-quantized" in groups, with zero points."""

    def pack(name: str, shape: tuple[int, int], source: Source) -> tuple[Tensors, Array]:
        values, scales, zeros = _numbers(source, shape, bits, group)
        middle = 2 ** (bits - 1)
        tensors = {
            f"{name}.weight": torch.from_numpy((values - middle).astype(np.int8)),
            f"{name}.weight_scale": torch.from_numpy(scales),
            f"{name}.weight_zero_point": torch.from_numpy((zeros - middle).astype(np.int8)),
        }
        return tensors, (values - np.repeat(zeros, group, 1)) * np.repeat(scales, group, 1)

    return pack


def fp8(
    scale_name: str, *, block: tuple[int, int] | None = None, is_per_output: bool = False
) -> Pack:
    """e4m3 with scales per block, output or tensor."""

    def pack(name: str, shape: tuple[int, int], source: Source) -> tuple[Tensors, Array]:
        tall, wide = block or ((1, shape[1]) if is_per_output else shape)
        grid = (-(-shape[0] // tall), -(-shape[1] // wide))
        if isinstance(source, np.ndarray):
            padded = np.zeros((grid[0] * tall, grid[1] * wide), np.float32)
            padded[: shape[0], : shape[1]] = np.abs(source)
            largest = padded.reshape(grid[0], tall, grid[1], wide).max((1, 3))
            scales = (largest / 448).astype(np.float32)
        else:
            scales = (source.uniform(0.5, 1.5, grid) * 0.005).astype(np.float32)
        full = np.repeat(np.repeat(scales, tall, 0)[: shape[0]], wide, 1)[:, : shape[1]]
        numbers = (
            source / full if isinstance(source, np.ndarray) else source.standard_normal(shape) * 20
        )
        stored = torch.from_numpy(numbers.astype(np.float32)).to(torch.float8_e4m3fn)
        is_single = block is None and not is_per_output
        tensors = {
            f"{name}.weight": stored,
            f"{name}.{scale_name}": torch.from_numpy(scales[0, 0:1] if is_single else scales),
        }
        return tensors, stored.float().numpy() * full

    return pack


def compressed_tensors(
    layout: str, activations: Mapping[str, Any] | None = None, **weights: Any
) -> dict[str, Any]:
    """Return the `quantization_config` of a compressed-tensors checkpoint, all but the head."""
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)


def mxfp4(weights: Array) -> tuple[Tensor, Tensor, Array]:
    """Blocks of 32 inputs of weights [..., outputs, inputs] in MXFP4, rounded to nearest: blocks
    uint8 [..., outputs, inputs / 32, 16], scales uint8, and what they mean."""
    groups = weights.astype(np.float32).reshape(*weights.shape[:-1], -1, 32)
    largest = np.maximum(np.abs(groups).max(-1, keepdims=True), 2.0**-100)
    exponents = np.floor(np.log2(largest)) - 2
    scaled = groups / np.exp2(exponents).astype(np.float32)
    codes = np.abs(np.abs(scaled)[..., None] - _E2M1).argmin(-1)
    meant = np.sign(scaled) * _E2M1[codes] * np.exp2(exponents).astype(np.float32)
    codes = codes + np.where(scaled < 0, 8, 0)
    blocks = (codes[..., 0::2] + 16 * codes[..., 1::2]).astype(np.uint8)
    scales = (exponents[..., 0] + 127).astype(np.uint8)
    return torch.from_numpy(blocks), torch.from_numpy(scales), meant.reshape(weights.shape)


def store_stacked_mxfp4(stored: Mapping[str, Tensor], suffixes: tuple[str, ...]) -> Tensors:
    """Tensors as a checkpoint of gpt-oss has them: of each that ends so, [E, inputs, outputs],
    `*_blocks` and `*_scales` in its place."""
    found: Tensors = {}
    for name, tensor in stored.items():
        if not name.endswith(suffixes):
            found[name] = tensor
            continue
        blocks, scales, _ = mxfp4(tensor.transpose(1, 2).float().numpy())
        found |= {f"{name}_blocks": blocks.contiguous(), f"{name}_scales": scales.contiguous()}
    return found


def store_gpt_oss(folder: Path, plain: Path) -> Path:
    """A checkpoint of gpt-oss with its experts in MXFP4, as it is published."""
    stored = load_file(plain / "model.safetensors")
    quantized = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    tensors = store_stacked_mxfp4(stored, ("experts.gate_up_proj", "experts.down_proj"))
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": quantized}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def mxfp4_weight(weight: Tensor) -> QuantizedWeight:
    """In groups of 8 inputs, rounded down to what there is."""
    groups = weight.view(len(weight), -1, 8)
    scales = torch.exp2(groups.abs().amax(-1).log2().ceil() - 3)
    numbers = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12])
    places = torch.searchsorted(
        numbers, (groups.abs() / scales[..., None]).floor().long(), right=True
    )
    values = (numbers[places - 1] * groups.sign()).to(torch.int8).view(weight.shape)
    return QuantizedWeight(values, scales, None, 4, 8, "float", is_mxfp4=True)
