"""Whole models against `transformers` and against recorded runs: logits, greedy texts,
any chunking."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from program_cases import one_by_one
from safetensors.torch import save_file
from torch import Tensor

from quire.kernels.interface import Kernels
from quire.kernels.reference.kernels import ReferenceKernels
from quire.models.registry import declare
from quire.nn.builder import build_decoder
from quire.nn.decoder import DecoderModel
from quire.weights.checkpoint import SafetensorsCheckpoint
from quire.weights.folder import read_model_config

PROMPT = [(7 * i * i + 3 * i + 11) % 190 + 5 for i in range(70)]


def _assert_close(actual: Tensor, expected: Tensor, relative: float = 1e-5) -> None:
    """Within `relative` of the scale of the logits."""
    assert actual.shape == expected.shape
    error, scale = (actual - expected).abs().max().item(), expected.abs().max().item()
    assert error <= relative * scale, f"error {error:.3g} at scale {scale:.3g}"


@pytest.mark.slow_except("*-cpu", "llama3-reference", "gemma2-reference", "mixtral-reference")
def test_prefill_and_chunked_decode_equal_transformers(
    pair: Any, kernels: Kernels, drive: Callable[..., Any]
) -> None:
    """Close to the reference implementation, and bit for bit the same in any
    chunks and with any block size."""
    model = pair.build(kernels=kernels)
    expected = pair.reference_logits(PROMPT)
    assert expected.std() > 0.1, "the weights should matter"
    prefill = drive(model, 128).feed(PROMPT)
    _assert_close(prefill, expected)
    assert torch.equal(drive(model, 128).feed_chunks(PROMPT, (1, 30, 17, 5)), prefill)
    assert torch.equal(drive(model, 128, block_size=4).feed_chunks(PROMPT, (33, 25)), prefill)


@pytest.mark.slow_except("llama3-*", "gemma2-cpu", "qwen2_moe-cpu", "deepseek_v3-cpu")
def test_greedy_text_equals_transformers(
    pair: Any, kernels: Kernels, drive: Callable[..., Any]
) -> None:
    prompt = PROMPT[:40]
    found = drive(pair.build(kernels=kernels), 80).greedy(prompt, 12)
    assert found == pair.reference_greedy(prompt, 12)


def test_old_and_new_config_declare_the_same(pair: Any) -> None:
    """The real config.json (keys of its time) and the one that today's `transformers`
    writes mean the same model."""
    assert declare(pair.config) == declare(read_model_config(pair.folder))
    assert declare(pair.config).num_parameters == sum(
        p.numel()
        for name, p in pair.reference.state_dict().items()
        if not (name == "lm_head.weight" and pair.reference.config.tie_word_embeddings)
    )


@pytest.mark.slow_except(
    "llama3-*", "gemma2-cpu", "gpt2-cpu", "qwen2_moe-cpu", "gpt_oss-cpu", "deepseek_v3-cpu"
)
def test_bfloat16_stays_near_float32(
    pair: Any, kernels: Kernels, drive: Callable[..., Any]
) -> None:
    expected = pair.reference_logits(PROMPT)
    model = pair.build("bfloat16", kernels)
    assert model.dtype == torch.bfloat16
    actual = drive(model, 128).feed(PROMPT)
    assert actual.dtype == torch.float32
    limit = 0.005 * expected.abs().max()
    if pair.has_experts:  # a rounding may choose another expert, in transformers as well
        theirs = copy.deepcopy(pair.reference).bfloat16()
        strayed = theirs(torch.tensor([PROMPT]), use_cache=False).logits[0].float()
        limit = torch.maximum(limit, 1.5 * (strayed - expected).abs().mean())
    assert (actual - expected).abs().mean() < limit
    assert torch.equal(drive(model, 128).feed_chunks(PROMPT, (1, 30, 17, 5)), actual)


@pytest.mark.slow_except("cpu")
def test_stories260k_reproduces_its_recorded_greedy_run(
    shared: Path, kernels: Kernels, drive: Callable[..., Any]
) -> None:
    folder = shared / "data/models/stories260K/hf"
    recorded = json.loads((folder.parent / "reference.json").read_text())["greedy_ids_200_from_bos"]
    spec = declare(read_model_config(folder))
    with SafetensorsCheckpoint(folder, spec) as weights:
        model = build_decoder(spec, weights, kernels, dtype="float32", max_model_len=512)
    assert [1, *drive(model, 512).greedy([1], len(recorded) - 1)] == recorded


def _recorded_array(entry: dict[str, Any]) -> np.ndarray:
    return (
        np.frombuffer(base64.b64decode(entry["data"]), dtype=np.float32)
        .reshape(entry["shape"])
        .copy()
    )


def _load_gpt_nano(folder: Path, out: Path) -> DecoderModel:
    """A minGPT checkpoint (plain linear layers, untied head) as GPT-2's own layout,
    through a folder on disk."""
    stored = json.loads((folder / "gpt-nano-sort-model.json").read_text())
    sizes = stored.pop("config")
    tensors = {}
    for name, entry in stored.items():
        tensor = torch.from_numpy(_recorded_array(entry))
        is_linear = tensor.ndim == 2 and ".h." in name
        tensors[name] = (tensor.T if is_linear else tensor).contiguous()
    save_file(tensors, out / "model.safetensors")
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": sizes["n_embd"],
        "n_head": sizes["n_head"],
        "n_layer": sizes["n_layer"],
        "n_positions": sizes["block_size"],
        "vocab_size": sizes["vocab_size"],
        "tie_word_embeddings": False,
    }
    spec = declare(config)
    with SafetensorsCheckpoint(out, spec) as weights:
        return build_decoder(
            spec, weights, ReferenceKernels(), dtype="float32", max_model_len=sizes["block_size"]
        )


def test_gpt_nano_reproduces_its_recorded_logits(
    shared: Path, tmp_path: Path, drive: Callable[..., Any]
) -> None:
    folder = shared / "data/models/gpt_nano_sort"
    recorded = json.loads((folder / "gpt-nano-sort-t0-partials.json").read_text())
    model = _load_gpt_nano(folder, tmp_path)
    logits = torch.from_numpy(_recorded_array(recorded["lm_head"]))
    for row, token_ids in enumerate(_recorded_array(recorded["idx"]).astype(int).tolist()):
        _assert_close(drive(model, 16).feed(token_ids), logits[row], 1e-5)


def test_num_bytes_counts_what_is_held(shared: Path) -> None:
    folder = shared / "data/models/stories260K/hf"
    spec = declare(read_model_config(folder))
    assert spec.is_tied
    with SafetensorsCheckpoint(folder, spec) as weights:
        model = build_decoder(spec, weights, ReferenceKernels(), dtype="float32", max_model_len=512)
    rope_bytes = 512 * 8 * 4
    assert model.num_bytes >= spec.weight_bytes("float32") + rope_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_pass_equals_its_operations(
    pair: Any, dtype: str, native: Kernels, drive: Callable[..., Any]
) -> None:
    """Hidden states and logits of one pass in several chunks,
    and what is in the caches afterwards."""
    model = pair.build(dtype, native)
    compiled, walk = drive(model, 128), drive(one_by_one(model), 128)
    for size in (33, 1, 30, 6):
        start = compiled.length
        assert torch.equal(
            compiled.feed(PROMPT[start : start + size]), walk.feed(PROMPT[start : start + size])
        )
    for ours, theirs in zip(compiled.caches, walk.caches, strict=True):
        assert torch.equal(ours[0].nan_to_num(), theirs[0].nan_to_num())
        assert torch.equal(ours[1].nan_to_num(), theirs[1].nan_to_num())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_that_nobody_asks_about_stop_at_the_last_layer(
    pair: Any, dtype: str, native: Kernels, drive: Callable[..., Any]
) -> None:
    """The others have the bits of the whole pass, and so has every key and value."""
    model = pair.build(dtype, native)
    whole, part = drive(model, 128), drive(model, 128)
    below = drive(one_by_one(model, num_blocks=len(model.spec.blocks) - 1), 128)
    for size, num_wanted in ((33, 1), (20, 0), (6, 4), (9, 3)):
        chunk = PROMPT[whole.length : whole.length + size]
        expected, before, found = whole.feed(chunk), below.feed(chunk), part.feed(chunk, num_wanted)
        num_others = size - num_wanted if 2 * num_wanted <= size else 0
        assert torch.equal(found[num_others:], expected[num_others:])
        assert torch.equal(found[:num_others], before[:num_others])
    for ours, theirs in zip(part.caches, whole.caches, strict=True):
        assert torch.equal(ours[0].nan_to_num(), theirs[0].nan_to_num())
        assert torch.equal(ours[1].nan_to_num(), theirs[1].nan_to_num())


def test_native_pass_refuses_what_lies_outside(
    pair: Any, native: Kernels, drive: Callable[..., Any]
) -> None:
    model = pair.build("float32", native)
    driver = drive(model, 64)
    with pytest.raises(IndexError, match="token id 199 is outside"):
        driver.feed([1, 199])
    driver = drive(model, 300)
    driver.length = 255
    with pytest.raises(ValueError, match="position 256 is outside"):
        driver.feed([1, 2])
    driver = drive(model, 32)
    driver.length = 30
    driver.table[1] = 7
    with pytest.raises(ValueError, match="outside the cache"):
        driver.feed([1])
