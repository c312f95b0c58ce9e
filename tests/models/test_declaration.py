"""What planners ask of a declaration: sizes, KV layers, operations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.models.blocks import KVLayerSpec, LatentAttentionSpec
from quire.models.declaration import DecoderSpec, FlopsPerToken
from quire.models.fused import conv1d, fused
from quire.models.registry import declare
from quire.models.rope import YarnScaling
from quire.models.tensors import TensorSpec


def _spec(shared: Path, file: str) -> DecoderSpec:
    return declare(json.loads((shared / "data/tokenizers/model_configs" / file).read_text()))


def test_llama_8b_by_hand(shared: Path) -> None:
    spec = _spec(shared, "meta-llama--Llama-3.1-8B.json")
    assert spec.kv_layers == (KVLayerSpec(8, 128, None),) * 32
    assert (
        sum(layer.bytes_per_token("bfloat16") for layer in spec.kv_layers) == 32 * 2 * 8 * 128 * 2
    )
    per_layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    outputs = 2 * (per_layer - 4096 * 2 * 1024)
    assert spec.flops_per_token() == FlopsPerToken(
        layers=2 * 32 * per_layer, head=2 * 128256 * 4096, outputs=outputs
    )
    assert spec.weight_bytes("bfloat16") == 2 * spec.num_parameters
    assert spec.attention_flops(1000) == 32 * 4 * 4096 * 1000
    assert spec.attention_flops(1000, is_wanted=False) == 31 * 4 * 4096 * 1000
    assert (spec.hidden_size, spec.vocab_size, spec.max_position_embeddings) == (
        4096,
        128256,
        131072,
    )
    assert spec.max_positions is None


@pytest.mark.slow
def test_deepseek_v3_by_hand(shared: Path) -> None:
    """61 layers keep 512 values and 64 rotated elements once, for all of 128 heads."""
    spec = _spec(shared, "nvidia--DeepSeek-V3.1-NVFP4.json")
    assert spec.kv_layers == (KVLayerSpec(1, 576, None, is_latent=True),) * 61
    assert sum(layer.bytes_per_token("bfloat16") for layer in spec.kv_layers) == 61 * 576 * 2
    assert sum(layer.bytes_per_token("int8") for layer in spec.kv_layers) == 61 * (576 + 4)
    assert spec.attention_flops(1000) == 61 * 128 * 2 * (576 + 512) * 1000
    narrow = 2 * spec.num_parameters
    assert spec.weight_bytes("bfloat16") == narrow + 58 * 256 * 2  # biases of routers in float32
    assert spec.unused == ("model.layers.61.",)


@pytest.mark.parametrize(
    ("mscale", "mscale_all_dim", "of_scores", "of_angles"),
    [(1.0, 1.0, 1.3688879, 1.0), (0.707, 0.707, 1.2608038, 1.0), (1.0, 0.0, 1.0, 1.3688879)],
)
def test_yarn_scales_scores_by_the_square_and_angles_by_the_ratio(
    shared: Path, mscale: float, mscale_all_dim: float, of_scores: float, of_angles: float
) -> None:
    """0.1 * mscale * ln 40 + 1, as the paper's code has it: for heads of 128 and 64 elements."""
    path = "data/tokenizers/model_configs/nvidia--DeepSeek-V3.1-NVFP4.json"
    config = json.loads((shared / path).read_text())
    config["rope_scaling"] |= {"mscale": mscale, "mscale_all_dim": mscale_all_dim}
    attention = declare(config | {"num_hidden_layers": 1}).attentions[0]
    assert isinstance(attention, LatentAttentionSpec)
    assert attention.scale == pytest.approx(192**-0.5 * of_scores**2, rel=1e-6)
    assert isinstance(attention.rope.scaling, YarnScaling)
    assert attention.rope.scaling.attention_factor == pytest.approx(of_angles, rel=1e-6)


def test_a_tied_head_is_held_once(shared: Path) -> None:
    spec = _spec(shared, "mlc_presets/smollm2_135m.json")
    assert spec.is_tied
    assert spec.weight_bytes("float32") == 4 * spec.num_parameters


def test_windows_reach_the_kv_layers(shared: Path) -> None:
    spec = _spec(shared, "mlc_presets/gemma3_1b_it.json")
    windows = [layer.window for layer in spec.kv_layers]
    assert windows[:6] == [512] * 5 + [None]
    full_heads = 4 * 256
    assert spec.attention_flops(10_000) == 4 * full_heads * (
        windows.count(512) * 512 + windows.count(None) * 10_000
    )


def test_learned_positions_are_a_hard_limit(shared: Path) -> None:
    assert _spec(shared, "mlc_presets/gpt2.json").max_positions == 1024


def test_fused_parts_name_rows_of_one_stored_tensor() -> None:
    query, key = (part.weight for part in fused("a.qkv", 8, 6, 2))
    assert query == TensorSpec("a.qkv.weight", (6, 8), first_row=0, stored_rows=8)
    assert (key.shape, key.first_row, key.stored_shape) == ((2, 8), 6, (8, 8))
    up = conv1d("a.fc", 8, 12)[0]
    assert (up.weight.shape, up.weight.stored_shape, up.bias) == (
        (12, 8),
        (8, 12),
        TensorSpec("a.fc.bias", (12,), stored_rows=12),
    )
