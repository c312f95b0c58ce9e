"""What a server needs of an engine, wherever that engine runs: the contract between the HTTP API and the engine.

Torch-free. Two implementations: `quire.engine.local_client.LocalClient` (an `AsyncLLM` in this process) and
`quire.engine.process.client.ProcessClient` (an engine process under supervision, whose requests survive its death).

How to use it: `stream = await client.generate(request)` judges the request and raises what is wrong with it (a RequestError,
or an UnavailableError if nothing can be taken now) before anything is streamed; `async for output in stream` then yields
outputs as `request.params.output_kind` says and always ends with one that is `finished`, also where the engine failed (its
`error` says why). Leaving the loop early, or `await stream.aclose()`, aborts the request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from quire.core.params import SamplingParams
from quire.engine.counters import EngineCounters
from quire.engine.digest import Digest
from quire.engine.inspection import BlockContent, Inspection
from quire.engine.outputs import RequestOutput
from quire.text.tokenizer import Tokenizer

EngineState = Literal["loading", "ready", "stalled", "restarting", "draining", "failed", "closed"]
"""`stalled`: the engine shows no sign of progress and is about to be replaced. `failed`: given up for good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request, already tokenized: the engine knows no text but what it makes of its own tokens."""

    request_id: str
    """Unique among the requests in flight; appears in logs."""
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    digest: Digest | None = None
    """What the client's `digest` made of them, or of parameters that differ in `max_tokens` and `output_kind` alone; with None
    they are read for this request."""
    prompt: str | None = None
    """Only handed back, in `RequestOutput.prompt`."""
    priority: int = 0
    """The smaller goes first; only under the policies `priority` and `fair`."""
    tenant: str = ""
    """On whose account it is served, under the policy `fair`."""
    weight: float = 1.0
    """The tenant's share relative to others'; above 0."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with those of the same salt; derive it from the authenticated principal."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the model before its weights are loaded."""

    name: str
    """As given on the command line."""
    folder: str
    """Where its files lie; never to be shown to a client."""
    max_model_len: int
    vocab_size: int
    max_logprobs: int
    """Most alternatives a request may ask for; -1 allows the whole vocabulary."""
    eos_token_ids: tuple[int, ...]
    generation_config: dict[str, Any]
    """For `SamplingParams.from_generation_config`."""
    num_kv_slots: int
    """Tokens that the KV cache holds."""
    kv: dict[str, str] = {}
    """What describes the KV cache: `block_size`, `num_gpu_blocks` (all blocks, wherever they are), `cache_dtype`, ..."""
    policy: str = "fcfs"
    """The order of service, as the operator named it."""
    fingerprint: str
    """Changes whenever answers to the same request and seed may change; for `system_fingerprint`."""


class EngineStatus(EngineCounters, frozen=True, kw_only=True):
    """A picture of the engine now. Times are ages in seconds."""

    state: EngineState
    reason: str = ""
    """Why it is not ready, in words for an operator; empty where it is."""
    num_requests: int = 0
    """Requests in flight, wherever they are."""
    num_prompt_tokens: int = 0
    """Prompt tokens of all requests in flight."""
    last_step_age_s: float | None = None
    """Since the last step ended, while there is work; None while there is none."""
    last_sign_of_life_age_s: float | None = None
    num_restarts: int = 0
    engine_pid: int | None = None

    @property
    def is_ready(self) -> bool:
        """Whether a new request would be served now: what /readyz says."""
        return self.state == "ready"

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused because the server is about to end."""
        return self.state == "draining"


class OutputStream(Protocol):
    """A request's outputs. Iterate once; the last output is `finished`."""

    def __aiter__(self) -> OutputStream: ...

    async def __anext__(self) -> RequestOutput: ...

    async def aclose(self) -> None:
        """Abort the request if it is not finished. Idempotent."""
        ...


@runtime_checkable
class CallingStream(Protocol):
    """An output stream that can also call back, which saves a task's turn for each token."""

    def listen(self, take: Callable[[RequestOutput], None]) -> None:
        """Give every output to `take`, in the event loop's thread, in place of iteration; it must not raise."""
        ...


class EngineClient(Protocol):
    """An engine as a server sees it. All methods are for the event loop's thread."""

    @property
    def model(self) -> ModelInfo:
        """The model; known before it is loaded."""
        ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer (None with `skip_tokenizer_init`). Encode long texts in a thread: it releases the GIL."""
        ...

    def digest(self, params: SamplingParams) -> Digest:
        """Read parameters once for any number of requests; they must not be changed afterwards. Raises a RequestError.

        For any thread: it takes as long as what they list is long.
        """
        ...

    async def generate(self, request: GenerationRequest) -> OutputStream:
        """Accept a request.

        Raises a RequestError for one that can never be served, UnavailableError where nothing can be taken now. Requests
        are accepted while the model is loading or the engine is restarting, and then wait.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request; its stream ends with what there is and `finish_reason="abort"`. Unknown ids are ignored."""
        ...

    def status(self) -> EngineStatus:
        """How the engine is doing. Never blocks."""
        ...

    async def inspect(self, engine: str, since: int) -> Inspection | None:
        """The engine's steps after step `since` of `engine` (as an earlier inspection named it), and its state now.

        Everything that is kept, where that engine or step is not known. None where the engine cannot be asked now.
        """
        ...

    async def look_into(self, block: int, step: int) -> BlockContent | None:
        """What a KV block held in a step; None where it is not known (any more), or the engine cannot be asked now."""
        ...

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for those in flight; True if all ended in time.

        Those that did not end then with an error, so that every stream has a last output.
        """
        ...

    async def close(self) -> None:
        """End everything at once: streams end with an error. Idempotent."""
        ...
