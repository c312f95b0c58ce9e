"""Requests and their sequences: what the control plane knows of each piece of work.

A `Request` is a `RequestSpec` as it is served; its `Sequence`s are the token streams that answer it
(several with `n > 1` or beam search). A sequence has *known* tokens (prompt and output so far) and
*computed* ones (their KV is in its blocks); a step computes some of the gap. These are records: who
may change them is the scheduler. `RequestRecord` and `SequenceRecord` hold what is known of them
elsewhere, too: by a server whose scheduler is in another process.

The scheduler knows nothing of how tokens are chosen. A request's `DecodingStrategy` says what a
closed gap should yield and turns the outcome into appends, forks and finishes through
`SequenceOps`, which the scheduler implements.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple, Protocol

from quire.core.content import content_ids
from quire.core.kvcache.manager import BlockTable
from quire.core.kvcache.prefix import ChainKeys, ScoringKey
from quire.core.plan import RowSampling, Task, TokenLogprobs, WorkResult
from quire.core.repetition import RepetitionWatch
from quire.core.request_spec import RequestSpec, ResumedSequence

Rank = tuple[int, int, int]
"""(priority, arrival number, sequence index): the smaller goes first."""


class SequenceStatus(Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    """In the queue (new, preempted, or a fork without a row); holds no blocks."""
    RUNNING = "running"
    """Holds a row and blocks."""
    PARKED = "parked"
    """A beam whose candidates are in and that lost its blocks before its siblings were ready;
    holds nothing."""
    FINISHED = "finished"


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"


class CacheMiss(NamedTuple):
    """Why whole blocks of a prompt were not found in the prefix cache, when it was first let in."""

    reason: Literal["", "disabled", "not_read", "evicted", "differs", "new"] = ""
    """Empty: none was missing. "disabled": there is no cache. "not_read": the request wanted them
    computed. "evicted": they were there and had to make room. "differs": what is cached behind the
    same beginning goes on otherwise. "new": nothing goes on there."""
    num_tokens: int = 0
    """That were computed for it."""
    num_evicted_tokens: int = 0
    """Of those: known to have been cached before."""


FIRST_VERSION = "0"
"""Of the weights that an engine was built with."""


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds on the engine's clock; None until they happen.
    Counts are totals over the request's sequences."""

    arrival_s: float = 0.0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    num_prefix_hit_tokens: int = 0
    """Prompt tokens that were not computed because the cache held them, at first admission."""
    num_cache_write_tokens: int = 0
    """Prompt tokens that it has computed and that the cache holds since, in whole blocks."""
    cache_miss: CacheMiss | None = None
    """Why it was not more; None before it is admitted."""
    num_preemptions: int = 0
    num_prefill_chunks: int = 0
    waited_for: str | None = None
    """Why it was not admitted when it was last considered before its first admission;
    None where it never was refused."""
    num_waited_steps: int = 0
    """Steps that were planned without it before its first."""
    num_accepted_tokens: int = 0
    """Output tokens that were drafted, and computed together with those before them."""
    num_rejected_tokens: int = 0
    """Draft tokens that were computed in vain."""
    detokenize_s: float = 0.0
    """Time spent on making text of its tokens."""
    weight_versions: tuple[str, ...] = ()
    """Of the weights that its tokens were computed with, the last one last."""

    def note_version(self, version: str) -> None:
        """Note weights that it is computed with."""
        if not self.weight_versions or self.weight_versions[-1] != version:
            self.weight_versions = (*self.weight_versions, version)


class RequestRecord(RequestSpec):
    """A spec, and what became of it so far: as a scheduler knows it,
    or a server whose engine runs elsewhere."""

    __slots__ = ("error", "metrics", "pooled", "prompt_logprobs", "sequences")
    __setattr__ = object.__setattr__  # a spec is frozen, what becomes of it is not
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    sequences: abc.Sequence[SequenceRecord]
    error: str | None
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprobs | None]
    """One entry per prompt token scored so far; the first is None,
    since nothing predicts the first token."""
    pooled: bytes
    """What a request for vectors has come to (`WorkResult.pooled`)."""

    def __init__(self, spec: RequestSpec) -> None:
        for name in RequestSpec.__slots__:
            object.__setattr__(self, name, getattr(spec, name))
        self.sequences = []
        self.error = None
        self.metrics = RequestMetrics(spec.arrival_s)
        self.prompt_logprobs = []
        self.pooled = b""

    @property
    def is_finished(self) -> bool:
        """Whether every sequence has ended."""
        for sequence in self.sequences:  # noqa: SIM110 (asked several times a token; a generator costs three times as much)
            if sequence.status is not SequenceStatus.FINISHED:
                return False
        return True

    def release(self) -> None:
        """Forget the sequences of a finished request, once nothing reads them again.

        They refer to it as it does to them, so that without this all of it would stay until the
        collector of cycles looks.
        """
        assert self.is_finished
        self.sequences = []


class Request(RequestRecord):
    """A request in a scheduler."""

    __slots__ = ("arrival", "arrival_step", "content_ids", "resumed", "strategy")

    sequences: list[Sequence]
    strategy: DecodingStrategy
    resumed: tuple[ResumedSequence, ...]
    """Its unfinished sequences, where the request was begun elsewhere;
    their tokens go on as they would have there."""
    content_ids: tuple[int, ...] | None
    """What stands at each position of the prompt; None: its tokens."""
    arrival: int
    """Its place in the order of arrival."""
    arrival_step: int
    """The last step planned before it arrived."""

    def __init__(
        self,
        spec: RequestSpec,
        strategy: DecodingStrategy,
        resumed: tuple[ResumedSequence, ...] = (),
    ) -> None:
        super().__init__(spec)
        self.content_ids = content_ids(spec.prompt_token_ids, spec.contents)
        self.strategy = strategy
        self.resumed = resumed
        self.arrival = self.arrival_step = 0

    @property
    def scoring(self) -> ScoringKey | None:
        """How prompt log-probabilities are wanted, or None where they are not,
        or came with the first token elsewhere."""
        sampling = self.sampling
        if sampling.num_prompt_logprobs is None or self.resumed:
            return None
        return (
            sampling.num_prompt_logprobs,
            sampling.logprobs_mode,
            sampling.logprob_token_ids,
            sampling.temperature,
        )


@dataclass(slots=True, eq=False)
class SequenceRecord:
    """One token stream of a request, and what became of it so far."""

    request: RequestRecord
    index: int
    """Its number within the request; also the index from which its seed is derived."""
    token_ids: list[int]
    status: SequenceStatus = field(default=SequenceStatus.WAITING, kw_only=True)
    cumulative_logprob: float = field(default=0.0, kw_only=True)
    finish_reason: FinishReason | None = field(default=None, kw_only=True)
    stop_reason: int | str | None = field(default=None, kw_only=True)
    """The stop token or stop string that ended it, if one did."""

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """Tokens generated so far."""
        return self.token_ids[len(self.request.prompt_token_ids) :]

    @property
    def name(self) -> str:
        """For logs: the request's id, and the sequence's index where there are several."""
        return (
            self.request.request_id
            if self.index == 0
            else f"{self.request.request_id}#{self.index}"
        )


@dataclass(slots=True, eq=False)
class Sequence(SequenceRecord):
    """One token stream of a request in a scheduler."""

    request: Request
    table: BlockTable
    keys: ChainKeys | None
    sampling: RowSampling
    num_computed: int = 0
    num_planned: int = 0
    """What `num_computed` will be once the steps in flight are taken in."""
    row: int = -1
    is_resident: bool = False
    """Whether the worker already knows the row (a plan has carried its `NewRow`)."""
    fast_plan_end: int = 0
    """While fewer tokens than this are planned, each of its steps is a plain decode: one token, in
    a slot of a block of its own, that is not the last one allowed. Set when a slower look has
    established that.
    """
    fast_update_end: int = 0
    """While fewer tokens than this are computed, the outcome of a plain decode is appended and
    nothing else comes of it: no block is full, and it is not the last one allowed.
    """
    num_reserved: int = 0
    """Blocks promised at admission for known tokens that are not computed yet."""
    len_at_admission: int = 0
    """Known tokens when it was last admitted: it has made progress once it has more."""
    waits_for: str | None = None
    """While waiting: why it was not admitted when it was last considered."""
    rank: Rank = (0, 0, 0)
    watch: RepetitionWatch | None = field(init=False, default=None)
    """Detects whether the output repeats itself, where the request wants that."""

    def __post_init__(self) -> None:
        if self.request.repetition is not None:
            self.watch = RepetitionWatch(
                self.request.repetition, len(self.request.prompt_token_ids)
            )

    @property
    def content_ids(self) -> list[int]:
        """What stands at each known position, for the prefix cache;
        `token_ids` itself where those say so."""
        prompt = self.request.content_ids
        return self.token_ids if prompt is None else [*prompt, *self.token_ids[len(prompt) :]]

    @property
    def gap(self) -> int:
        """Tokens that the next step may compute: known ones that no step in flight computes, or
        else the one it samples.

        0 where a step in flight must be taken in first: it decides how to go on, or gives scores
        that are counted on.
        """
        gap, num_planned, request = (
            len(self.token_ids) - self.num_planned,
            self.num_planned,
            self.request,
        )
        if num_planned == self.num_computed:
            return gap
        if gap:
            return gap if request.scoring is None else 0
        num_output = num_planned + 1 - len(request.prompt_token_ids)
        return 1 if request.strategy.is_plain and num_output < request.max_tokens else 0

    @property
    def has_progressed(self) -> bool:
        """Whether it has gained a token since it was last admitted,
        or has computed all it knows and waits for others."""
        return len(self.token_ids) > self.len_at_admission or self.num_computed == len(
            self.token_ids
        )

    def refuse(self, reason: str) -> None:
        """Note why it is not admitted now."""
        self.waits_for = reason
        if self.request.metrics.first_scheduled_s is None:
            self.request.metrics.waited_for = reason


class Conclusion(NamedTuple):
    """A finished output of a request that comes at once."""

    token_ids: tuple[int, ...]
    cumulative_logprob: float
    finish_reason: FinishReason


class SequenceOps(Protocol):
    """What a decoding strategy may do to sequences; implemented by the scheduler."""

    def append(
        self,
        sequence: Sequence,
        token_id: int,
        logprobs: TokenLogprobs | None,
        *,
        is_on_worker: bool,
    ) -> None:
        """Add a token; `is_on_worker` where the worker appended it to its row already.
        May finish the sequence."""
        ...

    def fork(self, parent: Sequence, index: int) -> Sequence:
        """Return a new sequence with the parent's tokens, sharing its blocks where it has any."""
        ...

    def finish(
        self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """End a sequence and free what it holds."""
        ...

    def conclude(self, request: Request, answers: abc.Iterable[Conclusion]) -> None:
        """Put finished sequences in place of those of a request that comes at once, all of which
        have ended."""
        ...


class DecodingStrategy(Protocol):
    """One request's way from logits to tokens."""

    @property
    def is_plain(self) -> bool:
        """Whether from now on each closed gap yields one sampled token,
        which is appended and nothing else."""
        ...

    @property
    def early_tasks(self) -> tuple[Task, ...]:
        """What a chunk of the prompt is to yield that does not close the gap."""
        ...

    def tasks(self, sequence: Sequence) -> tuple[Task, ...]:
        """Return what the sequence is to yield when its gap closes. Called at every decode:
        it should create nothing."""
        ...

    def absorb(self, ops: SequenceOps, sequence: Sequence, result: WorkResult) -> None:
        """Take the outcome of a closed gap."""
        ...
