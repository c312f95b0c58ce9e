"""What the server's process and the engine's say to each other: typed records, encoded as
MessagePack. Nothing else crosses.

`Down` goes to the engine, `Up` comes from it. A request is known by its `number`, which the server
gives out and never uses again, so that a late word about a request that has ended can be told from
one about its successor. An unknown type, an unknown field or a value out of its type closes the
connection (`quire.engine.process.channel`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.core.grammars import Grammar
from quire.core.kvcache.events import KVEventBatch
from quire.core.plan import ThinkTagTokens, TokenLogprobs
from quire.core.request import CacheMiss
from quire.core.request_spec import RequestSpec, ResumedSequence
from quire.engine.loop.cache import CachedTokens, CacheQuestion, Cleared
from quire.engine.loop.counters import EngineCounters
from quire.engine.loop.inspection import BlockContent, Inspection

PROTOCOL_VERSION = 13
"""Both ends come from one installation; a difference means that it was
replaced under a running server."""
JSON_LOGS = "json-logs"
"""The argument by which an engine is told to log as JSON: before the first message,
which may go wrong already."""


class _TaggedMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    pass


class Start(_TaggedMessage, frozen=True):
    """The first message down: what to build."""

    model: str
    options: dict[str, Any]
    """Of `EngineConfig.from_options`."""
    files: dict[str, tuple[int, int, str]] = {}
    """The model's files as the server found them: an engine builds of no others."""
    version: int = PROTOCOL_VERSION


NO_LISTS = 0
"""In place of a number of lists: the request brings its own."""


class Lists(_TaggedMessage, frozen=True):
    """What the requests that name this number have in common; they may be many,
    and this may be long. See `RequestSpec`."""

    number: int
    stop_token_ids: tuple[int, ...]
    """Also those that end a sequence."""
    logit_bias: tuple[tuple[int, float], ...]
    allowed_token_ids: tuple[int, ...] | None
    bad_words: tuple[tuple[int, ...], ...]
    grammar: Grammar | None
    marks: ThinkTagTokens | None


class Forget(_TaggedMessage, frozen=True):
    """No further request will name these lists."""

    number: int


class AddRequest(_TaggedMessage, frozen=True):
    """A request, new or begun by an engine that is no more: all that its tokens depend on."""

    number: int
    spec: RequestSpec
    resumed: tuple[ResumedSequence, ...] = ()
    lists: int = NO_LISTS
    """The number of `Lists` that were sent before, and are then missing from `spec`."""


class Abort(_TaggedMessage, frozen=True):
    """Forget a request."""

    number: int


class Finish(_TaggedMessage, frozen=True):
    """One sequence has reached a stop string, which only the server knows of."""

    number: int
    index: int


class Inspect(_TaggedMessage, frozen=True):
    """What are your last steps? Answered between two steps."""

    number: int
    """Of the question; the answer bears it, too."""
    engine: str
    """What the asker knows is of this engine."""
    since: int
    """The last step that the asker knows."""


class InspectBlock(_TaggedMessage, frozen=True):
    """What did a block hold in a step?"""

    number: int
    block: int
    step: int


class AskCache(_TaggedMessage, frozen=True):
    """What does the prompt cache hold, or: forget it."""

    number: int
    question: CacheQuestion


class Sleep(_TaggedMessage, frozen=True):
    """Give the memory of weights and KV cache back, between two steps."""

    number: int
    level: int


class WakeUp(_TaggedMessage, frozen=True):
    """Bring parts of the memory back."""

    number: int
    parts: tuple[str, ...]


class UpdateWeights(_TaggedMessage, frozen=True):
    """Compute with the weights of a folder from now on."""

    number: int
    folder: str
    version: str
    waits: bool
    """Whether requests that have been told before end with the former weights; the next one is told
    when this is done."""


class Pause(_TaggedMessage, frozen=True):
    """Make no step until you are told otherwise, or go on."""

    number: int
    holds: bool


Command = Sleep | WakeUp | UpdateWeights | Pause
Question = Inspect | InspectBlock | AskCache
Down = Start | Lists | Forget | AddRequest | Abort | Finish | Question | Command


class Ready(_TaggedMessage, frozen=True):
    """The model is loaded."""

    load_s: float


class StartFailed(_TaggedMessage, frozen=True):
    """The engine cannot be built. `is_final`: not with these options and files,
    however often one tries."""

    message: str
    is_final: bool


class Heartbeat(_TaggedMessage, EngineCounters, frozen=True, kw_only=True):
    """A sign of life, sent a few times a second whether there is work or not,
    also while a step runs."""

    step_age_s: float | None = None
    """How long the step in progress has been running."""


class ServeStats(_TaggedMessage, frozen=True, array_like=True):
    """How a request fared so far; times on the machine's monotonic clock."""

    first_scheduled_s: float | None
    num_prefix_hit_tokens: int
    num_cache_write_tokens: int
    cache_miss: CacheMiss | None
    num_preemptions: int
    num_prefill_chunks: int
    waited_for: str | None
    num_waited_steps: int
    num_accepted_tokens: int
    num_rejected_tokens: int
    weight_versions: tuple[str, ...]


class TokenDelta(_TaggedMessage, frozen=True, array_like=True):
    """What happened to one sequence in one step."""

    number: int
    index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token, where the request wants them."""
    finish_reason: str | None = None
    stop_token_id: int | None = None
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    """With the first token, where the request wants them."""
    served: ServeStats | None = None
    """With the first token and at the end."""
    pooled: bytes = b""
    """At the end of a request for vectors."""
    cumulative_logprob: float = 0.0
    """Of a sequence whose tokens come at once."""


class StepDeltas(_TaggedMessage, frozen=True):
    """All that a step brought, in one message: a request whose sequences fork
    is never seen half forked."""

    deltas: tuple[TokenDelta, ...]


class Refused(_TaggedMessage, frozen=True):
    """A request that this engine will not serve."""

    number: int
    message: str


class Inspected(_TaggedMessage, frozen=True):
    """The answer to `Inspect`."""

    number: int
    inspection: Inspection


class InspectedBlock(_TaggedMessage, frozen=True):
    """The answer to `InspectBlock`; None where the block or the step is not known."""

    number: int
    content: BlockContent | None


class CacheAnswered(_TaggedMessage, frozen=True):
    """The answer to `AskCache`; exactly one of them, or none where it is not known."""

    number: int
    events: KVEventBatch | None = None
    tokens: CachedTokens | None = None
    cleared: Cleared | None = None


class Done(_TaggedMessage, frozen=True):
    """A command was carried out, or could not be."""

    number: int
    asleep: tuple[str, ...]
    """Parts of the memory that are the system's from now on."""
    error: str | None = None
    is_lasting: bool = False
    """Whether this engine will never do it."""


Seen = Inspected | InspectedBlock | CacheAnswered
Up = Ready | StartFailed | Heartbeat | StepDeltas | Refused | Seen | Done
