"""Experts that the next layer will need, by its router's choice for the rows of the layer before:
counted, read ahead where the file is not in the system's cache, given up where they are wrong, and
of no effect on any bit."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quire import LLM, SamplingParams
from quire.engine.loop.counters import EngineCounters, count
from quire.engine.plan.experts import expert_bytes
from quire.kernels import cpu
from quire.models.registry import declare
from quire.quant.formats import WeightFormats
from quire.worker.experts import ExpertReports

if cpu.IMPORT_ERROR is not None:
    pytest.skip(f"no native kernels: {cpu.IMPORT_ERROR}", allow_module_level=True)

from quire.kernels.cpu.paging import PagedExperts

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 64,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 32,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "vocab_size": 200,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
TRIALS = 128
"""Steps of which the first ones have forecasts in any case."""


def _write(folder: Path, *, agrees: bool) -> Path:
    """Write a model whose layers add next to nothing to their rows, or drown them: the next router
    chooses as it would have before the layer, or not."""
    generator, weights = torch.Generator().manual_seed(0), dict[str, torch.Tensor]()
    for tensor in declare(CONFIG).tensors:
        drawn = torch.randn(tensor.stored_shape, generator=generator) / 16
        if tensor.name.endswith("norm.weight"):
            drawn = torch.ones(tensor.stored_shape)
        elif tensor.name.endswith(("o_proj.weight", "down_proj.weight")):
            layer = int(tensor.name.split(".")[2])
            drawn *= 0.001 if agrees else 100.0 ** (layer + 1)
        weights[tensor.name] = drawn.to(torch.bfloat16)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def _llm(model: Path, share: float | None = 0.25) -> LLM:
    whole = expert_bytes(declare(CONFIG), WeightFormats(), "bfloat16")
    paged: dict[str, Any] = {}
    if share is not None:
        paged = {
            "expert_memory": int(share * whole) + 1,
            "weights_cache": str(model.parent / "cache"),
        }
    return LLM(str(model), skip_tokenizer_init=True, kv_cache_memory="4MiB", num_threads=1, **paged)


def _answers(llm: LLM, num_tokens: int, num_requests: int = 1) -> list[object]:
    prompts: Any = [{"prompt_token_ids": [3, 50 + i, 9]} for i in range(num_requests)]
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=num_tokens, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [each.outputs[0].token_ids for each in outputs]


def _used(llm: LLM) -> EngineCounters:
    return count(llm.engine.scheduler)


def _drop(folder: Path) -> None:
    for path in folder.glob("*.experts.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _is_cached(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.preadv(descriptor, [bytearray(1)], path.stat().st_size // 2, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the file leave the system's cache after each step."""
    if not hasattr(os, "RWF_NOWAIT"):
        pytest.skip("this system cannot say what is cached")
    sample = tmp_path / "sample.experts.safetensors"
    sample.write_bytes(bytes(1 << 20))
    _drop(tmp_path)
    try:
        if _is_cached(sample):
            pytest.skip("this file system keeps what it has cached")
    except OSError as error:
        pytest.skip(f"this file system cannot say what is cached: {error}")
    take_news = ExpertReports.take_news

    def after_step(reports: ExpertReports, wait_s: float) -> Any:
        _drop(tmp_path / "cache")
        return take_news(reports, wait_s)

    monkeypatch.setattr(ExpertReports, "take_news", after_step)
    yield


@pytest.mark.slow
def test_what_agreeing_routers_need_is_foreseen(tmp_path: Path) -> None:
    llm = _llm(_write(tmp_path / "model", agrees=True))
    try:
        _answers(llm, 2 * TRIALS)
        use = _used(llm)
        assert use.num_experts_forecast > 0
        assert use.num_experts_foreseen >= 0.8 * use.num_experts_forecast
        assert use.num_experts_forecast <= use.num_expert_misses
    finally:
        llm.close()


@pytest.mark.slow
def test_no_bit_depends_on_what_is_read_ahead(tmp_path: Path, cold: None) -> None:
    model = _write(tmp_path / "model", agrees=True)
    with_all = _llm(model, None)
    want = [_answers(with_all, 20, requests) for requests in (1, 6)]
    with_all.close()
    for share in (0.1, 0.25, 0.6, 1.0):
        llm = _llm(model, share)
        try:
            assert [_answers(llm, 20, requests) for requests in (1, 6)] == want
            use = _used(llm)
            assert (use.expert_bytes_ahead > 0) == (use.num_experts_forecast > 0) == (share < 1.0)
        finally:
            llm.close()


@pytest.mark.slow
def test_forecasts_go_on_where_they_are_right(tmp_path: Path, cold: None) -> None:
    llm = _llm(_write(tmp_path / "model", agrees=True), 0.1)
    try:
        _answers(llm, TRIALS // 2)
        before = _used(llm)
        _answers(llm, TRIALS // 4)  # none of these steps has them in any case
        after = _used(llm)
        assert after.num_experts_forecast - before.num_experts_forecast >= TRIALS // 4
        assert after.expert_bytes_ahead > before.expert_bytes_ahead
    finally:
        llm.close()


@pytest.mark.slow
def test_forecasts_end_where_they_are_wrong(tmp_path: Path, cold: None) -> None:
    llm = _llm(_write(tmp_path / "model", agrees=False), 0.1)
    try:
        _answers(llm, TRIALS // 2)
        before = _used(llm)
        _answers(llm, TRIALS // 4)
        after = _used(llm)
        assert before.num_experts_forecast > 0
        assert after.num_experts_forecast == before.num_experts_forecast
        assert after.num_expert_misses > before.num_expert_misses
        _answers(llm, TRIALS // 2)  # and are tried again
        assert _used(llm).num_experts_forecast > after.num_experts_forecast
    finally:
        llm.close()


@pytest.mark.slow
def test_a_file_in_the_systems_cache_is_not_read_ahead(tmp_path: Path) -> None:
    llm = _llm(_write(tmp_path / "model", agrees=True), 0.1)
    try:
        _answers(llm, TRIALS // 2)
        before = _used(llm)
        _answers(llm, TRIALS // 4)
        after = _used(llm)
        assert after.num_experts_forecast == before.num_experts_forecast
        assert after.expert_bytes_ahead == 0
    finally:
        llm.close()


@pytest.mark.slow
def test_a_file_that_is_cut_short_is_named_where_it_is_read_ahead(
    tmp_path: Path, cold: None
) -> None:
    llm = _llm(_write(tmp_path / "model", agrees=True), 0.1)
    try:
        want = _answers(llm, 8)
        (path,) = (tmp_path / "cache").glob("*.experts.safetensors")
        whole = path.read_bytes()
        os.truncate(path, len(whole) // 8)
        llm.reset_prefix_cache()
        failed = llm.generate({"prompt_token_ids": [3, 4, 5]}, use_tqdm=False)[0]
        assert failed.outputs[0].finish_reason == "error"
        assert f"{path.name}: expert " in str(failed.error)
        assert "is cut short" in str(failed.error)
        path.write_bytes(whole)
        llm.reset_prefix_cache()
        assert _answers(llm, 8) == want
    finally:
        llm.close()


def test_nothing_is_foreseen_where_it_is_not_wanted(
    tmp_path: Path, cold: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = PagedExperts.fill

    def filled(pool: PagedExperts) -> None:
        pool.set_reads_ahead(False)
        fill(pool)

    model = _write(tmp_path / "model", agrees=True)
    monkeypatch.setattr(PagedExperts, "fill", filled)
    llm = _llm(model, 0.1)
    try:
        _answers(llm, 20)
        use = _used(llm)
        assert use.num_expert_misses > 0
        assert use.num_experts_forecast == use.expert_bytes_ahead == 0
    finally:
        llm.close()
