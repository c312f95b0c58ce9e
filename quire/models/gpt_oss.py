"""gpt-oss: attention with sinks, windows in every other layer, and experts whose gated activation
is limited on both sides."""

from __future__ import annotations

from functools import partial

from quire.common.frozen_record import replace
from quire.models.blocks import AttentionSpec, BlockSpec, ExpertsSpec, MlpSpec
from quire.models.config_reader import ConfigReader
from quire.models.declaration import DecoderSpec
from quire.models.dimensions import Dimensions, read_dimensions, read_windows
from quire.models.experts import read_routing
from quire.models.parts import attention, decoder, pre_norm_block
from quire.models.rope import RopeSpec, read_rope
from quire.models.tensors import LinearSpec, StackedPlace, TensorSpec, linear, rms_norm
from quire.program.operations import Routing


def declare_gpt_oss(config: ConfigReader) -> DecoderSpec:
    """Declare a decoder whose router has a bias, and whose experts weigh their share of the softmax
    over those chosen."""
    size = read_dimensions(config)
    rope = read_rope(config, size.head_dim, default_theta=150000.0)
    norm = partial(rms_norm, size=size.hidden, eps=config.number("rms_norm_eps", 1e-5))
    has_bias = config.flag("attention_bias", True)
    routing = read_routing(config, "num_local_experts", (128, 4), is_normalised=True)
    config.require("experts_per_token", routing.num_chosen)
    config.require("hidden_act", "silu")  # the published name; what it is limited by has no other
    config.require("swiglu_limit", 7.0)
    config.ignore("initial_context_length")  # the scaling of RoPE says it too
    config.ignore("router_aux_loss_coef", "output_router_logits")  # training
    layer_types = ("sliding_attention", "full_attention") * size.num_layers
    windows = read_windows(
        config, layer_types[: size.num_layers], config.optional_integer("sliding_window", 128)
    )

    def block(at: str, index: int) -> BlockSpec:
        heads = _attention(at, size, rope, windows[index], has_bias=has_bias)
        return pre_norm_block(at, norm, heads, _experts(f"{at}.mlp", size, routing))

    # the published configs name no dtype, and all floats beside them are bfloat16
    return decoder(config, size, norm, block, default_dtype="bfloat16")


def _attention(
    at: str, size: Dimensions, rope: RopeSpec, window: int | None, *, has_bias: bool
) -> AttentionSpec:
    heads = attention(at, size, rope, has_bias=has_bias, has_output_bias=has_bias)
    sinks = TensorSpec(f"{at}.self_attn.sinks", (size.num_heads,))
    return replace(heads, window=window, sinks=sinks)


def _experts(at: str, size: Dimensions, routing: Routing) -> ExpertsSpec:
    """All experts of a layer lie in `gate_up_proj` [E, H, 2 F], in which columns of gate and up
    alternate, and `down_proj` [E, F, H]; their biases beside them, [E, 2 F] and [E, H]."""
    count, share = routing.num_experts, routing.num_chosen / routing.num_experts

    def part(
        index: int, name: str, inputs: int, outputs: int, first: int = 0, step: int = 1
    ) -> LinearSpec:
        """Every `step`th output of expert `index`, from the `first` on."""
        strided = partial(replace, first_row=first, stored_rows=outputs * step, row_step=step)
        whole = linear(f"{at}.experts.{index}.{name}", inputs, outputs, has_bias=True)
        stacked, stored = f"{at}.experts.{name}", outputs * step
        place = StackedPlace(stacked, (count, inputs, stored), index * inputs)
        beside = StackedPlace(f"{stacked}_bias", (count, stored), index)
        assert whole.bias is not None
        return LinearSpec(
            strided(whole.weight, is_transposed=True, other_place=place),
            strided(whole.bias, other_place=beside),
            share=share,
        )

    def expert(index: int) -> MlpSpec:
        gate, up = (
            part(index, "gate_up_proj", size.hidden, size.ffn, first, 2) for first in (0, 1)
        )
        return MlpSpec(gate, up, part(index, "down_proj", size.ffn, size.hidden), "clamped_swish")

    router = replace(linear(f"{at}.router", size.hidden, count, has_bias=True), keeps_floats=True)
    return ExpertsSpec(router, tuple(map(expert, range(count))), routing)
