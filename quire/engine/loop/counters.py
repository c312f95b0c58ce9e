"""The numbers of a running engine, as they are counted: declared once,
read by metrics, status and reports."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.core.scheduler.experts import expert_use
from quire.core.scheduler.scheduler import Scheduler
from quire.core.scheduler.tiers import stored_stats
from quire.core.scheduler.transfers import transfer_stats


class EngineCounters(msgspec.Struct, frozen=True, kw_only=True):
    """A picture of one scheduler. Counts are since its engine was started."""

    num_running: int = 0
    """Sequences that are being computed."""
    num_waiting: int = 0
    """Sequences that wait for memory, a row, or the engine."""
    kv_usage: float = 0.0
    """Share of the KV blocks in use, 0 to 1."""
    num_steps: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_prefix_hit_tokens: int = 0
    num_parked: int = 0
    """Of those who wait: sequences that wait for something that another sequence is computing."""
    num_evictions: int = 0
    """Cached blocks given to others."""
    num_copies: int = 0
    """Blocks copied on write."""
    num_merges: int = 0
    """Blocks merged with identical ones."""
    num_computed_tokens: int = 0
    num_steps_by_size: tuple[int, ...] = ()
    """Steps of at most 1, 2, 4, ... tokens (and more than the one before);
    the last also counts those that are larger."""
    num_steps_by_duration: tuple[int, ...] = ()
    """Steps of up to 1, 2, 4, ... ms, where steps are bounded by time;
    the last also counts those that are longer."""
    predicted_step_s: float = 0.0
    """Of those steps together, as the next two."""
    measured_step_s: float = 0.0
    misjudged_step_s: float = 0.0
    """Amounts by which predictions were off."""
    num_drafts: int = 0
    """Sequences and steps for which tokens were drafted."""
    num_draft_tokens: int = 0
    """Draft tokens that were computed."""
    num_accepted_by_place: tuple[int, ...] = ()
    """Draft tokens that were right, by their place behind the known tokens."""
    num_expert_hits: int = 0
    """Experts that a layer needed in a step and that were in memory, where not all are."""
    num_expert_misses: int = 0
    expert_bytes_read: int = 0
    expert_wait_s: float = 0.0
    """That steps waited for those bytes."""
    num_experts_forecast: int = 0
    """Experts that were missing and that the next layer would need, by forecasts."""
    num_experts_foreseen: int = 0
    """Those of them that it needed."""
    expert_bytes_ahead: int = 0
    """That the system was asked to read meanwhile."""
    num_stored_kv_blocks: int = 0
    """Places of sequences whose KV is kept besides the pool, now; the next ones are totals."""
    num_kept_kv_blocks: int = 0
    num_restored_kv_blocks: int = 0
    num_faulty_kv_blocks: int = 0
    """Damaged or unreadable, and so computed."""
    num_late_kv_fetches: int = 0
    """Given up because they took too long."""
    num_kv_bytes_written: int = 0
    num_kv_bytes_read: int = 0
    is_kv_storing_off: bool = False
    """Whether a disk has failed, so that nothing is kept any more."""
    num_staged_prompts: int = 0
    """Prompts that were kept for other engines."""
    num_staged_kv_bytes: int = 0
    """Kept for them now."""
    num_pulled_prompts: int = 0
    """Prompts whose keys and values came from another engine; the next is their bytes."""
    num_pulled_kv_bytes: int = 0
    num_failed_kv_transfers: int = 0
    """That came to nothing, so that prompts were computed."""
    num_late_kv_transfers: int = 0
    """Of these, given up because they took too long."""
    target_step_s: float = 0.0
    """How long a step should take; 0 where it may take any time."""

    def counters(self) -> dict[str, Any]:
        """Return these numbers by name, without what a subclass adds."""
        return {name: getattr(self, name) for name in EngineCounters.__struct_fields__}


def count(scheduler: Scheduler) -> EngineCounters:
    """Read them, also from another thread while steps go on:
    they may then be of two neighbouring steps."""
    stats, manager, pace = scheduler.stats, scheduler.manager, scheduler.pace
    stored = stored_stats(scheduler.admission.prerequisites)
    moved = transfer_stats(scheduler.admission.prerequisites)
    return EngineCounters(
        num_running=len(scheduler.running),
        num_waiting=scheduler.num_waiting,
        kv_usage=manager.pool.num_used / scheduler.limits.num_blocks,
        num_steps=stats.num_steps,
        num_generated_tokens=stats.num_generated_tokens,
        num_preemptions=stats.num_preemptions,
        num_prefix_hit_tokens=stats.num_prefix_hit_tokens,
        num_parked=scheduler.admission.num_parked,
        num_evictions=manager.num_evictions,
        num_copies=manager.num_copies,
        num_merges=manager.num_merges,
        num_computed_tokens=stats.num_computed_tokens,
        num_steps_by_size=tuple(stats.num_steps_by_size),
        num_steps_by_duration=tuple(stats.num_steps_by_duration),
        predicted_step_s=stats.predicted_s,
        measured_step_s=stats.measured_s,
        misjudged_step_s=stats.misjudged_s,
        num_drafts=stats.num_runs,
        num_draft_tokens=stats.num_run_tokens,
        num_accepted_by_place=tuple(stats.num_right_by_place),
        **expert_use(scheduler.admission.prerequisites),
        num_stored_kv_blocks=stored.num_stored_blocks,
        num_kept_kv_blocks=stored.num_kept_blocks,
        num_restored_kv_blocks=stored.num_restored_blocks,
        num_faulty_kv_blocks=stored.num_faulty_blocks,
        num_late_kv_fetches=stored.num_late_fetches,
        num_kv_bytes_written=stored.num_bytes_written,
        num_kv_bytes_read=stored.num_bytes_read,
        is_kv_storing_off=stored.is_off,
        num_staged_prompts=moved.num_staged,
        num_staged_kv_bytes=moved.num_staged_bytes,
        num_pulled_prompts=moved.num_pulled,
        num_pulled_kv_bytes=moved.num_pulled_bytes,
        num_failed_kv_transfers=moved.num_failed,
        num_late_kv_transfers=moved.num_late,
        target_step_s=pace.target_s if pace is not None and pace.is_bounding else 0.0,
    )
