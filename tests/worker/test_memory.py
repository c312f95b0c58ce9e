"""KV memory: its size is the plan's, its blocks can be copied in every format,
and what quantizing it costs in quality."""

from __future__ import annotations

import resource
from functools import cache
from pathlib import Path

import pytest
import torch

from quire.common.kv_formats import KV_FORMATS
from quire.config.engine import EngineConfig
from quire.core.plan import BlockCopy, NewRow, RowSampling, RowWork, StepPlan
from quire.engine.assembly.builder import build_engine
from quire.kernels import load
from quire.models.blocks import KVLayerSpec
from quire.nn.context import StepContext
from quire.worker.batch import gather, move
from quire.worker.memory import KVMemory, PoolShape
from quire.worker.staging import Staging

LAYERS = (
    KVLayerSpec(2, 16, None),
    KVLayerSpec(3, 20, 8),
    KVLayerSpec(1, 40, None, is_latent=True),
)

STORIES = (
    "Once upon a time there was a little fox who lived in a forest. One day the fox met a "
    "bear, and the bear said that the "
    "river was full of fish. The fox was very happy and ran to the river with the bear. But "
    "when they came there",
    "Lily and Tom wanted to play in the park. Their mother told them to take a red ball and "
    "a blue kite. In the park they saw "
    "a big dog. The dog was sad because it had lost its bone, so Lily and Tom helped the dog "
    "to look for it.",
)
KL_BUDGET = {"bfloat16": 5e-5, "int8": 5e-4, "fp8": 8e-3}
"""Mean Kullback-Leibler divergence from the float32 cache, nats a token; measured 2.1e-5,
2.4e-4 and 4.4e-3."""


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="needs Linux's account of a process's memory"
)
def test_pages_are_touched_at_first_use_or_all_at_once() -> None:
    before = resident_bytes()
    memory = KVMemory(
        [KVLayerSpec(4, 64, None)] * 2, PoolShape(2048, 16, "float32"), torch.device("cpu")
    )
    assert resident_bytes() - before < memory.num_bytes / 4
    memory.populate(2)
    assert resident_bytes() - before > memory.num_bytes * 0.95


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_it_takes_the_bytes_that_were_planned(kv_format: str) -> None:
    memory = KVMemory(LAYERS, PoolShape(5, 16, kv_format), torch.device("cpu"))
    assert memory.num_bytes == 5 * 16 * sum(layer.bytes_per_token(kv_format) for layer in LAYERS)


def test_bytes_are_halved_and_quartered_but_for_the_scales() -> None:
    layer = KVLayerSpec(8, 128, None)
    sizes = [layer.bytes_per_token(name) for name in ("float32", "bfloat16", "int8", "fp8")]
    assert sizes == [2 * 8 * 512, 2 * 8 * 256, 2 * 8 * 132, 2 * 8 * 132]


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_blocks_are_copied_whole(name: str, kv_format: str) -> None:
    memory = KVMemory(LAYERS, PoolShape(5, 4, kv_format), torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    raw = [cache.view(torch.uint8) for pair in memory.caches for cache in pair]
    for each in raw:
        each.copy_(torch.randint(256, each.shape, generator=generator))
    before = [each.clone() for each in raw]
    memory.copy_blocks([BlockCopy(0, 1), BlockCopy(1, 2)], load(name), Staging(torch.device("cpu")))
    for each, old in zip(raw, before, strict=True):
        assert torch.equal(each, old[[0, 0, 1, 3, 4]])


@cache
def _distributions(kv_format: str) -> torch.Tensor:
    """Log-probabilities of the whole vocabulary at every position of the stories,
    float64 [positions, V]."""
    config = EngineConfig(
        model="quire-storyteller",
        dtype="float32",
        kv_cache_dtype=kv_format,
        kv_cache_memory="4MiB",
        num_threads=1,
    )
    engine = build_engine(config)
    worker, tokenizer = engine.executor.worker, engine.tokenizer  # type: ignore[attr-defined]
    assert tokenizer is not None
    found = []
    for story in STORIES:
        token_ids = tuple(tokenizer.encode(story))
        row = NewRow(0, "story", token_ids, len(token_ids), tuple(range(20)), RowSampling())
        worker.rows.apply(StepPlan(0, new_rows=(row,)))
        work = [RowWork(0, 0, len(token_ids))]
        inputs = move(
            gather(worker.rows, work), worker.rows.block_size, Staging(torch.device("cpu"))
        )
        context = StepContext(inputs.batch, worker.memory.caches)
        hidden = worker.model.forward(inputs.token_ids, inputs.batch.positions, context)
        found.append(worker.model.logits(hidden).double().log_softmax(-1))
    engine.close()
    return torch.cat(found)


@pytest.mark.parametrize("kv_format", KL_BUDGET)
def test_quantizing_costs_no_more_than_its_budget(kv_format: str) -> None:
    exact, got = _distributions("float32"), _distributions(kv_format)
    assert len(exact) > 90
    divergence = (exact.exp() * (exact - got)).sum(-1).mean().item()
    assert 0.0 < divergence < KL_BUDGET[kv_format]
