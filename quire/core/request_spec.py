"""What is asked of an engine: one request as plain values, made once and never changed.

A `RequestSpec` is all that a request's tokens and its place in the order of service depend on. It
is made where the request arrives, in the engine's process or in another, and travels as it is: to
the journal, over the wire and into the scheduler, which keeps what becomes of it in a `Request`. A
new field is declared here and read where it takes effect; nothing in between names it. Two requests
of equal specs give the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from quire.config.limits import SchedulerLimits
from quire.core.content import Content
from quire.core.kvcache.prefix import Namespace
from quire.core.plan import RowSampling
from quire.core.pooling import Pool, WeighTokens
from quire.core.transfers import KVTransfer
from quire.errors import InvalidParameterError, PromptTooLongError


class Keep(NamedTuple):
    """A beginning of a prompt that is to stay in the prefix cache for a time."""

    num_tokens: int | None
    """None for all of it."""
    seconds: float


@dataclass(frozen=True, slots=True)
class BeamSettings:
    """The parameters of a beam search that other requests do not have."""

    beam_width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """One request. Plain values alone, so that it can be encoded; equal where all of them are."""

    request_id: str = ""
    """Unique among the requests in flight; appears in logs."""
    prompt_token_ids: tuple[int, ...] = ()
    contents: tuple[Content, ...] = ()
    """What stands where tokens of the prompt only hold a place, of an image, say: cached prefixes
    are told apart by it."""
    undivided: tuple[tuple[int, int], ...] = ()
    """Spans [first, end) of the prompt, ascending, whose tokens see one another both ways: no step
    computes a part of one, but for what the cache has."""
    sampling: RowSampling = field(default_factory=RowSampling)
    max_tokens: int = 1
    """Output tokens per sequence; bounded by the context length once
    the spec went through `fit`."""
    num_sequences: int = 1
    """Samples, whose sequences fork at the prompt's end."""
    beam: BeamSettings | None = None
    """In place of samples: the best beams."""
    pool: Pool | None = None
    """In place of tokens: a vector of the prompt."""
    weigh: WeighTokens | None = None
    """In place of tokens: the logits of some."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end a sequence: the request's own and, unless it ignores them,
    the model's end-of-sequence tokens."""
    repetition: tuple[int, int, int] | None = None
    """Ends a sequence that repeats itself; see `RepetitionDetectionParams.rule`."""
    priority: int = 0
    """The smaller goes first; only under the policies `priority` and `fair`."""
    tenant: str = ""
    """On whose account it is served, under the policy `fair`."""
    weight: float = 1.0
    """The tenant's share relative to others'; above 0."""
    namespace: Namespace = ()
    """Requests share cached prefixes only within one."""
    reads_cache: bool = True
    keep: tuple[Keep, ...] = ()
    """Which cached blocks of the prompt are evicted after others, once it has ended."""
    transfer: KVTransfer | None = None
    """What of its prompt's keys and values comes from another engine, or goes to one."""
    arrival_s: float = 0.0
    """When it arrived, on the machine's monotonic clock."""

    @property
    def generates(self) -> bool:
        """Whether it is for tokens, and not for numbers of its prompt alone."""
        return self.pool is None and self.weigh is None

    @property
    def comes_at_once(self) -> bool:
        """Whether nothing of what it comes to is known before its end."""
        return self.beam is not None

    def __post_init__(self) -> None:
        assert all(each.end <= len(self.prompt_token_ids) for each in self.contents)


@dataclass(frozen=True, slots=True)
class ResumedSequence:
    """A sequence that another engine has begun and that this one is to go on with."""

    index: int
    output_token_ids: tuple[int, ...]
    """What it has generated so far, at least one token."""


def fit(spec: RequestSpec, limits: SchedulerLimits) -> RequestSpec:
    """Return the spec with `max_tokens` bounded by the context. Called once for each spec, where it
    is made.

    A question of lengths and limits alone, not of other requests. Raises PromptTooLongError, with
    the numbers, for what could never be served.
    """
    num_prompt = len(spec.prompt_token_ids)
    if num_prompt == 0:
        raise InvalidParameterError("the prompt is empty; give at least one token", param="prompt")
    if not spec.generates:
        return _fit_whole(replace(spec, max_tokens=0), num_prompt, limits)
    if num_prompt >= limits.max_model_len:
        raise PromptTooLongError(
            f"the prompt has {num_prompt} tokens, but the context holds "
            f"{limits.max_model_len}, of which at least one is "
            "for the answer; shorten the prompt or raise max_model_len"
        )
    # The last token sampled is never computed, so it needs no slot.
    num_slots = min(num_prompt + spec.max_tokens, limits.max_model_len) - 1
    num_blocks = limits.num_blocks_for(num_slots)
    if num_blocks > limits.num_blocks:
        raise PromptTooLongError(
            f"the prompt's {num_prompt} tokens and up to {num_slots + 1 - num_prompt} new "
            f"ones need {num_blocks} KV "
            f"blocks of {limits.block_size}, but the whole pool has {limits.num_blocks}; "
            "shorten the prompt, lower "
            "max_tokens, or give the KV cache more memory"
        )
    max_tokens = min(spec.max_tokens, limits.max_model_len - num_prompt)
    return spec if max_tokens == spec.max_tokens else replace(spec, max_tokens=max_tokens)


def _fit_whole(spec: RequestSpec, num_prompt: int, limits: SchedulerLimits) -> RequestSpec:
    """A spec that generates nothing: its prompt may take all of the context."""
    if num_prompt > limits.max_model_len:
        cut = ", or ask for its first ones with truncate_prompt_tokens" * (spec.pool is not None)
        raise PromptTooLongError(
            f"the text has {num_prompt} tokens, and the model takes {limits.max_model_len}; "
            f"shorten it{cut}"
        )
    num_blocks = limits.num_blocks_for(num_prompt)
    if num_blocks > limits.num_blocks:
        raise PromptTooLongError(
            f"the text's {num_prompt} tokens need {num_blocks} KV blocks of {limits.block_size}, "
            f"but the whole pool has {limits.num_blocks}; give the KV cache more memory"
        )
    return spec
