"""Qwen 3, sparse: Qwen 3's blocks with a mixture of experts in place of the MLP."""

from __future__ import annotations

from quire.common.frozen_record import replace
from quire.models.blocks import BlockSpec
from quire.models.config_reader import ConfigReader
from quire.models.declaration import DecoderSpec
from quire.models.parts import attention, decoder
from quire.models.qwen2_moe import SparseQwen


def declare_qwen3_moe(config: ConfigReader) -> DecoderSpec:
    """Declare a decoder."""
    key = "num_experts" if config.has("num_experts") else "num_local_experts"
    common = SparseQwen.read(config, key, (128, 8), inner=768, bias=("attention_bias", False))
    size, norm, has_bias = common.size, common.norm, common.has_bias

    def block(at: str, index: int) -> BlockSpec:
        heads = replace(
            attention(at, size, common.rope, has_bias=has_bias, has_output_bias=has_bias),
            query_norm=norm(f"{at}.self_attn.q_norm", size=size.head_dim),
            key_norm=norm(f"{at}.self_attn.k_norm", size=size.head_dim),
        )
        return common.block(at, index, heads, common.mixture(at))

    return decoder(config, size, norm, block)
