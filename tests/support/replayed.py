"""Recorded steps where there is no GPU: what is "recorded" is computed again at each replay,
from and to the same places."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.engine.loop.engine import Engine
from quire.worker.graphs import GraphSettings, StepGraphs
from quire.worker.memory import KVMemory, PoolShape


class ComputedGraphs:
    """A `GraphBackend` that computes."""

    def __init__(self, bytes_each: int = 0) -> None:
        self.num_recorded = self.num_replays = 0
        self._bytes_each = bytes_each

    @property
    def held_bytes(self) -> int:
        return self.num_recorded * self._bytes_each

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        compute()
        self.num_recorded += 1

        def replay() -> None:
            self.num_replays += 1
            compute()

        return replay


def replay_steps(engine: Engine, backend: ComputedGraphs | None = None) -> StepGraphs:
    """Have an engine's small steps recorded at their first use; on a GPU with the real thing."""
    worker = engine.executor.worker  # type: ignore[attr-defined]
    if worker.graphs is None:
        limits, plan = engine.plan.limits, engine.plan
        shape = PoolShape(limits.num_blocks + 1, limits.block_size, plan.kv_format)
        worker.memory = KVMemory(plan.spec.kv_layers, shape, torch.device("cpu"))
        worker.use_graphs(
            backend or ComputedGraphs(), GraphSettings(256, limits.max_model_len, 1 << 40)
        )
    graphs: StepGraphs = worker.graphs
    # whose attention takes no sequence without tokens: decodes alone are replayed
    if worker.model.kernels.name == "cpu":
        forward = graphs.forward
        graphs.forward = lambda arrays: forward(arrays) if arrays.max_query_len == 1 else None  # type: ignore[method-assign]
    graphs.settings = graphs.settings._replace(paying_uses=1)
    return graphs
