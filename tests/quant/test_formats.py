"""Which projections become integers, and what they weigh."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.kernels.reference.kernels import ReferenceKernels
from quire.models.registry import declare
from quire.nn.builder import build_decoder
from quire.quant.formats import IntegerFormat, WeightFormats, formats_at_load, join
from quire.quant.linears import QuantizingLinears
from quire.weights.dummy import DummyWeights

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 99,
    "max_position_embeddings": 64, "attention_bias": True, "torch_dtype": "float32",
}  # fmt: skip


def test_int4_takes_the_largest_group_that_divides_the_inputs() -> None:
    spec = declare(
        LLAMA
        | {
            "hidden_size": 256,
            "intermediate_size": 96,
            "head_dim": 16,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
        }
    )
    formats = formats_at_load(spec, "int4")
    at = "model.layers.0."
    assert formats.by_name[at + "mlp.up_proj.weight"] == IntegerFormat(4, 128, "int8")
    assert formats.by_name[at + "mlp.down_proj.weight"] == IntegerFormat(4, 32, "int8")
    assert formats.by_name[at + "self_attn.o_proj.weight"] == IntegerFormat(8, 48, "int8"), (
        "no group divides 48"
    )
    assert formats.by_name["lm_head.weight"] == IntegerFormat(8, 256, "int8")
    assert "groups of 128 and 32" in formats.summary and "2 projections" in formats.summary


@pytest.mark.parametrize("is_tied", [True, False])
def test_int8_has_one_scale_per_output(is_tied: bool) -> None:
    spec = declare(LLAMA | {"tie_word_embeddings": is_tied})
    formats = formats_at_load(spec, "int8")
    assert len(formats.by_name) == 2 * 7 + 1
    assert all(
        formats.of(parts) == IntegerFormat(8, parts[0].num_inputs, "int8")
        for parts in spec.projections
    )


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("method", ["int8", "int4", None])
def test_the_plan_weighs_what_the_loader_makes(method: str | None, is_tied: bool) -> None:
    spec = declare(LLAMA | {"tie_word_embeddings": is_tied})
    formats = WeightFormats() if method is None else formats_at_load(spec, method)
    model = build_decoder(
        spec, DummyWeights(), ReferenceKernels(), dtype="bfloat16", max_model_len=8,
        quantize=lambda floats: QuantizingLinears(floats, formats, torch.float32),
    )  # fmt: skip
    rope_bytes = 8 * 2 * 8 * 4
    unpacked = sum(
        parts[0].num_inputs * sum(p.num_outputs for p in parts)
        for parts in spec.projections
        if method == "int4"
    )
    assert spec.head is not None
    head = spec.head.weight.num_elements if method == "int4" else 0
    assert (
        model.num_bytes - rope_bytes
        == formats.weight_bytes(spec, "bfloat16") + (unpacked - head) // 2
    )


def test_formats_join_without_loss() -> None:
    coarse, fine = IntegerFormat(4, 32, "float", has_offsets=True), IntegerFormat(8, 48, "float")
    assert join([coarse, fine]) == IntegerFormat(8, 16, "float", has_offsets=True)
    assert join([coarse, coarse]) == coarse
    spec = declare(LLAMA)
    stacked = spec.attentions[0].projections[0]
    by_name = {part.weight.name: held for part, held in zip(stacked, (coarse, fine), strict=False)}
    assert WeightFormats(by_name).of(stacked) is None, "one part is floating point, so the stack is"
