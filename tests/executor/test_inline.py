"""Closing frees the model, whoever still holds the engine."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from quire import LLM
from quire.worker.memory import give_back


def test_closing_frees_weights_and_memory() -> None:
    llm = LLM("quire-storyteller", kv_cache_memory="4MiB", num_threads=1)
    worker = llm.engine.executor.worker  # type: ignore[attr-defined]
    held = [weakref.ref(worker.model.head.weight.data), weakref.ref(worker.memory.caches[0][0])]
    executor = llm.engine.executor
    llm.close()
    executor.close()
    gc.collect()
    del worker
    assert [reference() for reference in held] == [None, None]


def test_what_a_closed_executor_held_on_a_gpu_is_the_drivers_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: called.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: called.append("empty_cache"))
    give_back(torch.device("cpu"))
    assert not called
    give_back(torch.device("cuda"))
    assert called == ["synchronize", "empty_cache"]


def test_a_device_that_failed_is_closed_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    give_back(torch.device("cuda"))
    assert "a GPU's memory could not be given back: RuntimeError" in caplog.text
