"""Closing frees the model, whoever still holds the engine."""

from __future__ import annotations

import gc
import weakref

from quire import LLM


def test_closing_frees_weights_and_memory() -> None:
    llm = LLM("quire-storyteller", kv_cache_memory="4MiB", num_threads=1)
    worker = llm.engine.executor.worker  # type: ignore[attr-defined]
    held = [weakref.ref(worker.model.head.data), weakref.ref(worker.memory.caches[0][0])]
    executor = llm.engine.executor
    llm.close()
    executor.close()
    gc.collect()
    del worker
    assert [reference() for reference in held] == [None, None]
