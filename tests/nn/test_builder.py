"""Building: every tensor asked for once, into buffers no larger than one fused weight;
wrong options are refused."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.kernels.interface import PackedLinear
from quire.kernels.reference.kernels import ReferenceKernels
from quire.models.registry import declare
from quire.models.tensors import TensorSpec
from quire.nn.builder import build_decoder
from quire.weights.dummy import DummyWeights

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 64,
}
GPT2: dict[str, object] = {
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": 101,
}


class CountingWeights(DummyWeights):
    """Dummy weights that note what was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[TensorSpec] = []

    def fill(self, out: Tensor, tensor: TensorSpec) -> None:
        assert tuple(out.shape) == tensor.shape
        self.asked.append(tensor)
        super().fill(out, tensor)


class CountingKernels(ReferenceKernels):
    """Reference kernels that note the shapes they were given to pack."""

    def __init__(self) -> None:
        self.packed: list[tuple[int, ...]] = []

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:  # type: ignore[override]
        self.packed.append(tuple(weight.shape))
        return ReferenceKernels.pack_linear(weight, bias)


@pytest.mark.parametrize("config", [LLAMA, {**LLAMA, "tie_word_embeddings": True}, GPT2])
def test_every_tensor_is_loaded_exactly_once(config: dict[str, object]) -> None:
    spec, weights = declare(config), CountingWeights()
    build_decoder(spec, weights, ReferenceKernels(), dtype="float32", max_model_len=64)
    assert Counter(weights.asked) == Counter(spec.tensors)


def test_projections_of_one_input_are_one_product() -> None:
    kernels = CountingKernels()
    build_decoder(declare(LLAMA), DummyWeights(), kernels, dtype="float32", max_model_len=64)
    assert kernels.packed == [(101, 32)] + [(32 + 16 + 16, 32), (32, 32), (96, 32), (32, 48)] * 3


def test_layers_share_one_table_of_rope() -> None:
    model = build_decoder(
        declare(LLAMA), DummyWeights(), ReferenceKernels(), dtype="float32", max_model_len=40
    )
    [rope] = model.weights.ropes
    assert rope.shape == (40, 2, 4)


def test_same_seed_builds_the_same_model() -> None:
    first, second = (
        build_decoder(
            declare(LLAMA), DummyWeights(5), ReferenceKernels(), dtype="bfloat16", max_model_len=64
        )
        for _ in range(2)
    )
    hidden = first.kernels.embedding(torch.arange(7), first.weights.tables[0])
    assert first.dtype == torch.bfloat16
    assert torch.equal(first.logits(hidden), second.logits(hidden))


@pytest.mark.parametrize("dtype", ["float16", "int8", "auto", ""])
def test_other_dtypes_are_refused_by_name(dtype: str) -> None:
    with pytest.raises(
        ConfigError, match=f"dtype='{dtype}' is not supported; use float32 or bfloat16"
    ):
        build_decoder(
            declare(LLAMA), DummyWeights(), ReferenceKernels(), dtype=dtype, max_model_len=64
        )


def test_learned_positions_cannot_be_exceeded() -> None:
    with pytest.raises(ConfigError, match="max_model_len=65 exceeds the 64 positions"):
        build_decoder(
            declare(GPT2), DummyWeights(), ReferenceKernels(), dtype="float32", max_model_len=65
        )
    build_decoder(
        declare(LLAMA), DummyWeights(), ReferenceKernels(), dtype="float32", max_model_len=65
    )
