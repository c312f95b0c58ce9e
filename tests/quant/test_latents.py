"""Latent attention in the formats that weights are stored and held in: the weight that is folded into
queries and outputs is one of floats in any case."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quantized_checkpoints import Pack, byte_integers, gptq, packed_integers
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.engine.assembly.quantization import quantize_model
from quire.models.registry import declare
from quire.quant.formats import formats_at_load
from quire.quant.quantization_config import read_storage
from quire.quant.writer import Recipe
from tests.golden.cases import STORED
from tests.golden.checkpoints import CONFIGS, write_checkpoint
from tests.quant.test_experts import logprobs, store

SIZES = {"q_lora_rank": 64, "moe_intermediate_size": 32, "torch_dtype": "float32"}
BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [16, 16],
}


def write(folder: Path, **changes: Any) -> Path:
    """V3's tiny checkpoint, with a bias of the router that only float32 holds."""
    path = write_checkpoint(folder, {**CONFIGS["deepseek v3"], **SIZES, **changes})
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("correction_bias"):
            tensors[name] = tensor.float() * 1.0001
    save_file(tensors, path / "model.safetensors")
    return path


def fp8_blocks(name: str, shape: tuple[int, int], source: Any) -> tuple[dict[str, Tensor], Any]:
    """e4m3 in blocks of 16 by 16, each with a scale of its own, as DeepSeek V3 is published in
    larger ones."""
    padded = np.zeros([-(-size // 16) * 16 for size in shape], np.float32)
    padded[: shape[0], : shape[1]] = source
    blocks = padded.reshape(padded.shape[0] // 16, 16, -1, 16)
    scales = np.abs(blocks).max(axis=(1, 3)) / 448
    full = np.repeat(np.repeat(scales, 16, 0), 16, 1)[: shape[0], : shape[1]]
    stored = torch.from_numpy(source / full).to(torch.float8_e4m3fn)
    held = {f"{name}.weight": stored, f"{name}.weight_scale_inv": torch.from_numpy(scales)}
    return held, stored.float().numpy() * full


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpoints_of_fp8_blocks_compute_what_their_floats_compute(
    dtype: str, tmp_path: Path
) -> None:
    plain = write(tmp_path / "plain", num_nextn_predict_layers=1)
    stored, floats = store(tmp_path, plain, fp8_blocks, BLOCKS)
    tensors = load_file(stored / "model.safetensors")
    ahead = {"model.layers.2.eh_proj.weight": torch.zeros(64, 128)}  # predicts a token further on
    save_file(tensors | ahead, stored / "model.safetensors")
    found = [logprobs(each, dtype=dtype) for each in (stored, floats, plain)]
    torch.testing.assert_close(found[0], found[1], atol=2e-4 if dtype == "float32" else 0.1, rtol=0)
    assert (found[0] - found[2]).abs().max() > 1e-3


PACKS: dict[str, Pack] = {
    "gptq": gptq(4, 32),
    "pack": packed_integers(4, 32, is_symmetric=True),
    "bytes": byte_integers(),
}


@pytest.mark.parametrize("case", PACKS)
def test_stored_integers_compute_what_their_floats_compute(case: str, tmp_path: Path) -> None:
    plain = write(tmp_path / "plain")
    stored, floats = store(tmp_path, plain, PACKS[case], STORED[case][1])
    torch.testing.assert_close(logprobs(stored), logprobs(floats), atol=2e-4, rtol=0)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_what_is_written_is_what_is_quantized_at_load(form: str, tmp_path: Path) -> None:
    plain = write(tmp_path / "plain")
    quantize_model(str(plain), Recipe(form), tmp_path / "written")
    written, held = logprobs(tmp_path / "written"), logprobs(plain, quantization=form)
    assert torch.equal(written, held)
    assert not torch.equal(held, logprobs(plain))
    config = json.loads((tmp_path / "written" / "config.json").read_text())
    folded = [f"model.layers.{layer}.self_attn.kv_b_proj" for layer in range(2)]
    ignored = [*folded, "model.layers.1.mlp.gate"]
    assert config["quantization_config"]["ignore"] == ignored


def test_the_plan_counts_what_is_folded_as_floats() -> None:
    config = {**CONFIGS["deepseek v3"], **SIZES}
    spec = declare(config)
    storage = read_storage({"quantization_config": BLOCKS}, spec, "int8")
    assert storage is not None
    for formats in (formats_at_load(spec, "int8"), storage.formats):
        assert "model.layers.0.self_attn.kv_b_proj.weight" not in formats.by_name
        assert "model.layers.0.self_attn.o_proj.weight" in formats.by_name
    assert "model.layers.0.self_attn.kv_b_proj.weight" in storage.layout
