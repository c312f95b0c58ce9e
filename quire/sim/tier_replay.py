"""A trace through the control plane with its tiers, on a virtual clock: what a model's plan says of
steps, blocks and disks decides how long things take; scheduler, tiers and files are the real ones.

One request after the other, so that a hit saves time and never shortens a queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quire.config.limits import SchedulerLimits
from quire.core.plan import Record, StepPlan
from quire.core.request import Request
from quire.core.request_spec import RequestSpec, fit
from quire.core.scheduler.prerequisites import Prerequisite
from quire.core.scheduler.scheduler import Scheduler
from quire.core.scheduler.tiers import RestoreCosts, StoredPrefixes, TierStats
from quire.core.step_cost import StepCostModel, UnitCosts, block_costs, work_of
from quire.core.tiers import TIERS, TierNews
from quire.executor.null import NullExecutor, NullMemory
from quire.tiers.companion import StoredBlocks
from quire.tiers.disk import DiskStore
from quire.tiers.segments import CacheIdentity

_IDLE_S = 0.001
"""Of a step without work, while something is read."""


@dataclass(frozen=True, slots=True)
class TierModel:
    """What a replay takes from a model's plan."""

    limits: SchedulerLimits
    costs: UnitCosts
    payload_bytes: int
    """Of the blocks of all groups of layers at one place."""
    read_bytes_per_s: float = 500e6
    max_blocks: int = 1024
    """Read by one order."""

    @property
    def block_s(self) -> float:
        """Seconds to read one place."""
        return self.payload_bytes / self.read_bytes_per_s


@dataclass(frozen=True, slots=True)
class Served:
    """What became of one request."""

    num_prompt_tokens: int
    num_hit_tokens: int
    first_token_s: float


class _TimedTiers:
    """Implements `Companion` around the worker's half: what is read comes when it is due."""

    name = TIERS

    def __init__(self, half: StoredBlocks, block_s: float, clock: Callable[[], float]) -> None:
        self._half, self._block_s, self._clock = half, block_s, clock
        self._due: deque[tuple[float, TierNews]] = deque()

    @property
    def is_reading(self) -> bool:
        """Whether something is yet to come."""
        return bool(self._due)

    def begin(self, plan: StepPlan) -> None:
        self._half.begin(plan)

    def take_news(self, wait_s: float) -> tuple[Record, ...]:
        now = self._clock()
        for news in map(TierNews._make, self._half.take_news(0.0)):
            seconds = news.num_places * self._block_s if news.verb == "fetched" else 0.0
            begun_s = max(now, self._due[-1][0]) if self._due else now
            self._due.append((begun_s + seconds, news._replace(seconds=seconds)))
        ready = list[Record]()
        while self._due and self._due[0][0] <= now:
            ready.append(self._due.popleft()[1])
        return tuple(ready)

    def close(self) -> None:
        self._half.close()


class TierReplay:
    """One pool, and a disk of some size, or none."""

    def __init__(self, model: TierModel, folder: Path | None, disk_bytes: int) -> None:
        limits = model.limits
        self._limits, self._now_s = limits, 0.0
        self._costs = StepCostModel(model.costs)
        memory = NullMemory(limits.num_blocks, limits.block_size)
        self._tiers: _TimedTiers | None = None
        prerequisites: list[Prerequisite] = []
        if folder is not None:
            payload_bytes = len(limits.windows) * memory.block_bytes
            identity = CacheIdentity(bytes(32), limits.block_size, payload_bytes)
            # as many places as would fit, of the bytes that they take here
            max_bytes = disk_bytes // model.payload_bytes * identity.record_bytes
            cost_of = block_costs(self._costs, limits.block_size, limits.max_model_len)
            half = StoredBlocks(
                memory, lambda: DiskStore(folder, identity, max_bytes, cost_of), is_threaded=False
            )
            self._tiers = _TimedTiers(half, model.block_s, lambda: self._now_s)
            costs = RestoreCosts(self._costs, model.block_s, model.max_blocks)
            prerequisites.append(StoredPrefixes(costs, TierStats()))
        self._scheduler = Scheduler(limits, prerequisites=prerequisites)
        self._executor = NullExecutor(
            limits.max_num_seqs,
            limits.num_blocks,
            limits.block_size,
            windows=limits.windows,
            memory=memory,
            companions=() if self._tiers is None else (self._tiers,),
        )

    def serve(self, name: str, prompt: tuple[int, ...], max_tokens: int) -> Served:
        """Serve one request to its end. Raises PromptTooLongError."""
        spec = RequestSpec(
            request_id=name,
            prompt_token_ids=prompt,
            max_tokens=max_tokens,
            arrival_s=self._now_s,
        )
        request = self._scheduler.add(fit(spec, self._limits))
        while self._scheduler.has_work:
            self._step()
        return _served(request)

    def settle(self) -> None:
        """Write what is to be written."""
        while self._scheduler.admission.has_orders:
            self._step()

    def close(self) -> None:
        """Write what is to be written, and let go of the folder."""
        self.settle()
        if self._tiers is not None:
            self._tiers.close()

    def _step(self) -> None:
        plan = self._scheduler.schedule(self._now_s)
        result = self._executor.execute(plan)
        self._now_s += self._costs.seconds(work_of(plan.work)) if plan.work else _IDLE_S
        self._scheduler.update(plan, result, self._now_s)


def _served(request: Request) -> Served:
    metrics = request.metrics
    assert metrics.first_token_s is not None
    return Served(
        len(request.prompt_token_ids),
        metrics.num_prefix_hit_tokens,
        metrics.first_token_s - metrics.arrival_s,
    )
