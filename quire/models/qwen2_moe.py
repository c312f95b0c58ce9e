"""Qwen 1.5 and 2, sparse: Qwen 2's blocks with a mixture of experts beside a shared, gated MLP.
Qwen 3's sparse family shares its shape (`SparseQwen`).
"""

from __future__ import annotations

from functools import partial

from quire.common.frozen_record import FrozenRecord, replace
from quire.models.blocks import BlockSpec, ExpertsSpec, Mixer
from quire.models.config_reader import ConfigReader
from quire.models.declaration import DecoderSpec
from quire.models.dimensions import ACTIVATIONS, Dimensions, read_dimensions
from quire.models.experts import (
    experts,
    read_routing,
    read_sparse_layers,
    require_full_attention,
)
from quire.models.parts import Norm, attention, decoder, gated_mlp, pre_norm_block
from quire.models.rope import RopeSpec, read_rope
from quire.models.tensors import linear, rms_norm
from quire.program.operations import Activation, Routing


class SparseQwen(FrozenRecord):
    """What both generations say of a sparse decoder."""

    size: Dimensions
    rope: RopeSpec | None
    norm: Norm
    activation: Activation
    has_bias: bool
    """Of queries, keys and values."""
    inner: int
    """The width of one expert."""
    routing: Routing
    is_sparse: tuple[bool, ...]
    """By layer: whether it has experts; the others have an MLP of `intermediate_size`."""

    @classmethod
    def read(
        cls,
        config: ConfigReader,
        key: str,
        num_experts: tuple[int, int],
        *,
        inner: int,
        bias: tuple[str, bool],
    ) -> SparseQwen:
        """Read it: `key` counts the experts. Defaults are `num_experts` (all, and chosen ones) of
        width `inner`; `bias` is the key that says whether there are biases, with its default."""
        size = read_dimensions(config)
        require_full_attention(config, size.num_layers)
        config.ignore("router_aux_loss_coef", "output_router_logits")  # training
        is_normalised = config.flag("norm_topk_prob", False)
        return cls(
            size=size,
            rope=read_rope(config, size.head_dim),
            norm=partial(rms_norm, size=size.hidden, eps=config.number("rms_norm_eps", 1e-6)),
            activation=config.choice("hidden_act", ACTIVATIONS, "silu"),
            has_bias=config.flag(*bias),
            inner=config.integer("moe_intermediate_size", inner),
            routing=read_routing(config, key, num_experts, is_normalised=is_normalised),
            is_sparse=read_sparse_layers(config, size.num_layers),
        )

    def mixture(self, at: str) -> ExpertsSpec:
        """The experts of a block."""
        return experts(f"{at}.mlp", self.size.hidden, self.inner, self.routing, self.activation)

    def block(self, at: str, index: int, heads: Mixer, mixture: ExpertsSpec) -> BlockSpec:
        """A block with `mixture` where its layer has experts."""
        mlp = mixture if self.is_sparse[index] else gated_mlp(at, self.size, self.activation)
        return pre_norm_block(at, self.norm, heads, mlp)


def declare_qwen2_moe(config: ConfigReader) -> DecoderSpec:
    """Declare a decoder."""
    common = SparseQwen.read(config, "num_experts", (60, 4), inner=1408, bias=("qkv_bias", True))
    size = common.size
    shared = replace(size, ffn=config.integer("shared_expert_intermediate_size", 5632))

    def mixture(at: str) -> ExpertsSpec:
        gate = linear(f"{at}.mlp.shared_expert_gate", size.hidden, 1)
        return replace(
            common.mixture(at),
            shared=gated_mlp(at, shared, common.activation, module="mlp.shared_expert"),
            shared_gate=replace(gate, keeps_floats=True),
        )

    def block(at: str, index: int) -> BlockSpec:
        heads = attention(at, size, common.rope, has_bias=common.has_bias)
        return common.block(at, index, heads, mixture(at))

    return decoder(config, size, common.norm, block)
