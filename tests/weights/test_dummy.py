"""Dummy weights: deterministic, sane, quick, and a model built from them runs."""

from __future__ import annotations

import time

import torch
from timing import timed

from quire.kernels.reference.kernels import ReferenceKernels
from quire.models.registry import declare
from quire.models.tensors import TensorSpec
from quire.nn.builder import build_decoder
from quire.weights.dummy import _STRIP_LEN, DummyWeights

TENSOR = TensorSpec("a.weight", (300, 200))


def _fill(
    weights: DummyWeights, tensor: TensorSpec, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    out = torch.full(tensor.shape, torch.nan, dtype=dtype)
    weights.fill(out, tensor)
    return out


def test_values_depend_on_seed_and_name_alone() -> None:
    first = _fill(DummyWeights(3), TENSOR)
    assert torch.equal(first, _fill(DummyWeights(3), TENSOR))
    assert not torch.equal(first, _fill(DummyWeights(4), TENSOR))
    assert not torch.equal(first, _fill(DummyWeights(3), TensorSpec("b.weight", TENSOR.shape)))


def test_values_are_small_and_centred() -> None:
    values = _fill(
        DummyWeights(), TensorSpec("norm.weight", (2000, 1000), centre=1.0), torch.bfloat16
    ).float()
    assert abs(values.mean().item() - 1) < 1e-3
    assert 0.015 < values.std().item() < 0.025
    assert torch.linalg.matrix_rank(values[:500, :500] - 1) > 490, "rows must not repeat"


def test_a_deep_model_of_dummy_weights_has_sane_logits() -> None:
    spec = declare(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 24,
            "num_attention_heads": 4,
            "vocab_size": 101,
            "max_position_embeddings": 32,
        }
    )
    model = build_decoder(
        spec, DummyWeights(), ReferenceKernels(), dtype="bfloat16", max_model_len=32
    )
    logits = model.logits(model.kernels.embedding(torch.arange(5), model.weights.tables[0]))
    assert torch.isfinite(logits).all()
    assert logits.abs().max() < 20


@timed
def test_filling_is_quick() -> None:
    """50 million values in well under the seconds that drawing each would take."""
    out = torch.empty(5000, 10_000, dtype=torch.bfloat16)
    weights = DummyWeights()
    start = time.process_time()
    weights.fill(out, TensorSpec("big.weight", (5000, 10_000)))
    assert time.process_time() - start < 2.0


def test_a_long_tensor_repeats_what_a_short_one_of_its_name_begins_with() -> None:
    long = _fill(DummyWeights(), TensorSpec("a.weight", (2 * _STRIP_LEN + 5,)))
    assert torch.equal(long[_STRIP_LEN:], long[:-_STRIP_LEN])
    assert torch.equal(long[:60_000], _fill(DummyWeights(), TENSOR).view(-1))


@timed
def test_a_small_tensor_costs_what_it_holds() -> None:
    """Models of many experts consist of thousands of them."""
    out = torch.empty(8, 16)
    weights = DummyWeights()
    start = time.process_time()
    for index in range(2000):
        weights.fill(out, TensorSpec(f"experts.{index}.weight", (8, 16)))
    assert time.process_time() - start < 0.5
