"""What an engine shows of itself: its last steps, its blocks, and who runs and waits. Plain
records, torch-free.

An `Inspection` is a base and the steps after it. A reader that applies a step's record to the state
before it (rows removed, rows entered, blocks replaced, blocks appended, tokens computed, blocks
published and forgotten, in this order) has the state that the worker saw in that step. Records hold
numbers and requests' ids, never a token or a text: those are read one block at a time
(`BlockContent`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EnteredRow:
    """A sequence has got a row: first admission, resumption after preemption, or a fork."""

    row: int
    name: str
    """The request's id, and the sequence's index where there are several."""
    tenant: str
    num_prompt_tokens: int
    num_known_tokens: int
    """Prompt and output so far."""
    num_hit_tokens: int
    """Of those, tokens whose KV was there already."""
    num_preemptions: int
    arrival_s: float
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RowState:
    """A row in the base."""

    row: int
    name: str
    num_prompt_tokens: int
    num_computed: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step: what changed, and what was computed. Times on the engine's clock."""

    step: int
    began_s: float
    elapsed_s: float
    predicted_s: float
    """0 where steps are not bounded by time."""
    num_tokens: int
    removed: tuple[tuple[int, str], ...] = ()
    """(row, why: a finish reason, or "preempted")."""
    entered: tuple[EnteredRow, ...] = ()
    replaced: tuple[tuple[int, int, int], ...] = ()
    """(row, place in its table, block)."""
    appended: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(row, blocks)."""
    copies: tuple[tuple[int, int], ...] = ()
    decoded: tuple[int, ...] = ()
    """Rows that computed one more token and sampled the next."""
    chunks: tuple[tuple[int, int, int, int], ...] = ()
    """(row, first position, tokens, samples) of every other piece of work."""
    published: tuple[int, ...] = ()
    """In order: a block that entered the prefix index, or ~block for one that left it."""
    num_waiting: int = 0
    waits_for: str | None = None
    """Why the first of those who wait was not let in."""


@dataclass(frozen=True, slots=True)
class Base:
    """The state after a step, for the records that follow it."""

    step: int
    rows: tuple[RowState, ...]
    cached: tuple[int, ...]
    """Blocks in the prefix index, in use or not."""


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """A sequence that runs or waits now."""

    name: str
    row: int
    """-1 where it waits."""
    tenant: str
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    num_hit_tokens: int
    num_preemptions: int
    age_s: float
    """Since its request arrived."""
    waits_for: str | None = None


@dataclass(frozen=True, slots=True)
class Inspection:
    """An engine's last steps and its state now."""

    engine: str
    """Changes with every engine: what was learnt of another says nothing of this one."""
    now_s: float
    num_blocks: int
    block_size: int
    num_groups: int
    """Of layers: a row's blocks are one of each for each `block_size` tokens, -1 where nothing
    reads it any more."""
    max_num_seqs: int
    max_num_batched_tokens: int
    last_step: int
    base: Base | None
    """None where the records follow what the asker has."""
    steps: tuple[StepRecord, ...]
    gone_rows: tuple[int, ...]
    """Rows that ended with the last step: the next one's record will remove them."""
    requests: tuple[RequestSnapshot, ...]
    """The first of those who run, then of those who wait, in order of service."""
    num_running: int
    num_waiting: int
    num_preemptions: int
    num_copies: int
    num_merges: int
    num_evictions: int
    waste: float
    """Unused share of allocated KV slots, averaged over steps."""
    num_expert_hits: int = 0
    """Experts that a layer needed in a step and that were in memory, where not all are."""
    num_expert_misses: int = 0
    expert_bytes_read: int = 0
    expert_wait_s: float = 0.0
    num_experts_forecast: int = 0
    num_experts_foreseen: int = 0
    expert_bytes_ahead: int = 0
    num_stored_kv_blocks: int = 0
    """Places of sequences whose KV is kept in tiers below the pool, now; the next ones are
    totals."""
    num_restored_kv_blocks: int = 0
    num_faulty_kv_blocks: int = 0
    num_kept_kv_blocks: int = 0
    """Blocks of the pool that are evicted last, now."""


@dataclass(frozen=True, slots=True)
class BlockContent:
    """What one block held in one step."""

    block: int
    step: int
    token_ids: tuple[int, ...]
    owners: tuple[str, ...]
    """Names of the sequences whose tables name it."""
    position: int
    """Of its first token in the sequence; -1 where no sequence names it."""
    is_cached: bool
    origin: str = ""
    """Where what it holds now came from: "computed" or "restored" (read from a tier); empty where
    it is not cached now."""
    is_stored: bool = False
    """Whether a tier has it, too."""
    is_kept: bool = False
    """Whether it is evicted last."""
