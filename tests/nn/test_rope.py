"""Tables of RoPE against `transformers`, beyond the original context,
and the fixed choice for growing variants."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.models.config_reader import ConfigReader
from quire.models.rope import RopeSpec, read_rope
from quire.nn.rope import rope_table

HEAD_DIM, ORIGINAL = 16, 64
VARIANTS: dict[str, dict[str, object]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": ORIGINAL,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
        "truncate": False,
    },
    "yarn_attention_factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "attention_factor": 1.5,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6],
        "long_factor": [1.0, 1.3, 2.2, 4.1, 8.9, 16.0, 32.0, 33.5],
        "original_max_position_embeddings": ORIGINAL,
    },
}


def _spec(scaling: dict[str, object]) -> RopeSpec:
    values = {
        "rope_scaling": dict(scaling),
        "rope_theta": 5000.0,
        "max_position_embeddings": 4 * ORIGINAL,
    }
    if scaling["rope_type"] == "dynamic":
        values["max_position_embeddings"] = ORIGINAL
    config = ConfigReader(values, "LlamaForCausalLM")
    spec = read_rope(config, HEAD_DIM)
    config.integer("max_position_embeddings")
    config.finish()
    return spec


def _reference_table(scaling: dict[str, object], num_positions: int) -> Tensor:
    """What `transformers` computes when the sequence has `num_positions` tokens."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    max_positions = ORIGINAL if scaling["rope_type"] == "dynamic" else 4 * ORIGINAL
    config: Any = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=max_positions,
        rope_parameters={**scaling, "rope_theta": 5000.0},
    )
    rotary: Any = LlamaRotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1), torch.arange(num_positions)[None])
    half = HEAD_DIM // 2
    return torch.stack((cos[0, :, :half], sin[0, :, :half]), dim=1)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("num_positions", [ORIGINAL // 2, ORIGINAL, 4 * ORIGINAL])
def test_table_equals_transformers(variant: str, num_positions: int) -> None:
    table = rope_table(_spec(VARIANTS[variant]), num_positions)
    assert table.dtype == torch.float32
    torch.testing.assert_close(
        table, _reference_table(VARIANTS[variant], num_positions), rtol=0, atol=2e-6
    )


def test_variants_differ_from_each_other() -> None:
    """Otherwise the comparison above would show nothing."""
    tables = [rope_table(_spec(scaling), 4 * ORIGINAL) for scaling in VARIANTS.values()]
    for i, table in enumerate(tables):
        assert all((table - other).abs().max() > 1e-3 for other in tables[:i])


@pytest.mark.parametrize("variant", ["dynamic", "longrope"])
def test_growing_variants_are_settled_by_max_model_len(variant: str) -> None:
    """Up to the original context nothing depends on the length; beyond it the whole table does,
    once and for all."""
    spec = _spec(VARIANTS[variant])
    short, original, longer = (rope_table(spec, n) for n in (ORIGINAL // 2, ORIGINAL, 2 * ORIGINAL))
    assert torch.equal(short, original[: ORIGINAL // 2])
    assert not torch.equal(longer[:ORIGINAL], original)


def test_partial_rotation_and_su_are_read() -> None:
    scaling = {**VARIANTS["longrope"], "type": "su"}
    del scaling["rope_type"]
    values = {"rope_scaling": scaling, "partial_rotary_factor": 0.5, "max_position_embeddings": 256}
    config = ConfigReader(
        {**values, "original_max_position_embeddings": ORIGINAL}, "Phi3ForCausalLM"
    )
    spec = read_rope(config, 2 * HEAD_DIM, is_partial=True)
    assert spec.rotated_dim == HEAD_DIM
    expected = _reference_table(VARIANTS["longrope"], 256)
    theta_matches = rope_table(RopeSpec(HEAD_DIM, 5000.0, spec.scaling), 256)
    torch.testing.assert_close(theta_matches, expected, rtol=0, atol=2e-6)


def test_original_context_beside_the_section_wins() -> None:
    """As in `transformers`; Phi-3 and some Llama derivatives keep it there."""
    scaling = {**VARIANTS["llama3"], "original_max_position_embeddings": 128}
    values = {
        "rope_scaling": scaling,
        "rope_theta": 5000.0,
        "max_position_embeddings": 4 * ORIGINAL,
    }
    spec = read_rope(
        ConfigReader({**values, "original_max_position_embeddings": ORIGINAL}, "LlamaForCausalLM"),
        HEAD_DIM,
    )
    assert spec == _spec(VARIANTS["llama3"])
    assert spec != read_rope(ConfigReader(values, "LlamaForCausalLM"), HEAD_DIM)
