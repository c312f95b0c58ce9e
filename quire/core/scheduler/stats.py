"""What the scheduler counts: totals since the start, cheap enough to keep in production."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from quire.core.kvcache.manager import KVCacheManager
from quire.core.request import Request

NUM_STEP_SIZES = 16
"""Up to 2 to the power of 14 tokens, and beyond."""
NUM_STEP_DURATIONS = 16
"""Up to 16 s, and beyond."""


@dataclass(slots=True)
class SchedulerStats:
    """Counters. The waste is measured in slots summed over steps,
    so that it is an average over time."""

    num_steps: int = 0
    num_computed_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_recompute_tokens: int = 0
    """Estimate of computed tokens that preemption threw away."""
    num_prompt_tokens: int = 0
    """Of finished requests."""
    num_prefix_hit_tokens: int = 0
    """Of finished requests."""
    num_finished: dict[str, int] = field(default_factory=dict)
    num_steps_by_size: list[int] = field(default_factory=lambda: [0] * NUM_STEP_SIZES)
    """Steps of at most 1, 2, 4, ... tokens (and more than the one before);
    the last also counts those that are larger."""
    num_steps_by_duration: list[int] = field(default_factory=lambda: [0] * NUM_STEP_DURATIONS)
    """The same for durations where a pace is kept: steps of up to 1, 2, 4, ... ms."""
    predicted_s: float = 0.0
    """Of those steps together, as the next two."""
    measured_s: float = 0.0
    misjudged_s: float = 0.0
    """Amounts by which predictions were off."""
    num_runs: int = 0
    """Pieces of work with tokens beyond the known ones."""
    num_run_tokens: int = 0
    """Those tokens."""
    num_right_by_place: list[int] = field(default_factory=list)
    """By their place behind the known ones: those that were right."""
    peak_num_blocks: int = 0
    peak_num_running: int = 0
    allocated_slot_steps: int = 0
    unused_slot_steps: int = 0

    @property
    def waste(self) -> float:
        """Unused share of allocated KV slots, averaged over steps."""
        return (
            self.unused_slot_steps / self.allocated_slot_steps if self.allocated_slot_steps else 0.0
        )

    def count_plan(self, num_tokens: int, num_running: int, manager: KVCacheManager) -> None:
        num_used = manager.pool.num_used
        self.num_steps += 1
        self.num_computed_tokens += num_tokens
        size = (num_tokens - 1).bit_length() if num_tokens > 1 else 0
        self.num_steps_by_size[size if size < NUM_STEP_SIZES else -1] += 1
        self.peak_num_blocks = max(self.peak_num_blocks, num_used)
        self.peak_num_running = max(self.peak_num_running, num_running)
        self.allocated_slot_steps += num_used * manager.block_size
        self.unused_slot_steps += manager.num_unused_slots * manager.num_groups

    def count_run(self, num_tokens: int, num_right: int) -> None:
        self.num_runs += 1
        self.num_run_tokens += num_tokens
        by_place = self.num_right_by_place
        by_place.extend([0] * (num_tokens - len(by_place)))
        for place in range(num_right):
            by_place[place] += 1

    def count_duration(self, predicted_s: float, measured_s: float) -> None:
        place = max(0, math.ceil(math.log2(max(measured_s, 1e-3) * 1e3)))
        self.num_steps_by_duration[min(place, NUM_STEP_DURATIONS - 1)] += 1
        self.predicted_s += predicted_s
        self.measured_s += measured_s
        self.misjudged_s += abs(measured_s - predicted_s)

    def count_finished(self, request: Request) -> None:
        finish_reason = request.sequences[0].finish_reason
        assert finish_reason is not None
        reason = finish_reason.value
        self.num_finished[reason] = self.num_finished.get(reason, 0) + 1
        self.num_prompt_tokens += len(request.prompt_token_ids)
        self.num_prefix_hit_tokens += request.metrics.num_prefix_hit_tokens
