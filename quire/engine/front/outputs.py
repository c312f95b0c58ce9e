"""What users get back. Names and fields are those that users of vLLM know."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, overload

from quire.core.request import FIRST_VERSION, RequestMetrics
from quire.lora.request import LoRARequest


class Logprob(NamedTuple):
    """One token's log-probability (natural logarithm), its rank (1 is the most likely),
    and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsByToken = dict[int, Logprob]
"""Token id -> `Logprob`: the token itself first,
then the alternatives from the most likely down."""


class FlatLogprobs(Sequence[LogprobsByToken | None]):
    """The log-probabilities of many tokens in a few lists, without an object per entry; reads like
    a list of dicts.

    Entries of position `i` are those from `start_indices[i]` to `end_indices[i]` of the other
    lists.
    """

    def __init__(self, records: Iterable[LogprobsByToken | None]) -> None:
        self.start_indices: list[int] = []
        self.end_indices: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.ranks: list[int | None] = []
        self.decoded_tokens: list[str | None] = []
        for record in records:
            self.start_indices.append(len(self.token_ids))
            for token_id, entry in (record or {}).items():
                self.token_ids.append(token_id)
                self.logprobs.append(entry.logprob)
                self.ranks.append(entry.rank)
                self.decoded_tokens.append(entry.decoded_token)
            self.end_indices.append(len(self.token_ids))

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> LogprobsByToken: ...
    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...
    def __getitem__(self, index: int | slice) -> LogprobsByToken | FlatLogprobs:
        if isinstance(index, slice):
            return FlatLogprobs([self[place] for place in range(len(self))[index]])
        start, end = self.start_indices[index], self.end_indices[index]
        entries = zip(
            self.logprobs[start:end],
            self.ranks[start:end],
            self.decoded_tokens[start:end],
            strict=True,
        )
        return {
            token_id: Logprob(*entry)
            for token_id, entry in zip(self.token_ids[start:end], entries, strict=True)
        }


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's sequences, so far or whole."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[LogprobsByToken] | None = None
    """One dict per output token; `FlatLogprobs` with `flat_logprobs`."""
    finish_reason: str | None = None
    """"stop", "length", "repetition", "abort", "error", or None while unfinished."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it; None for the model's end-of-sequence token."""
    lora_request: LoRARequest | None = None
    """What it was generated with besides the model."""
    drafted: tuple[tuple[int, int], ...] = field(default=(), compare=False)
    """Of `text`, the characters from one place to another that came of draft tokens, which were
    accepted in a step together with the token behind them. Says how an answer came to be: equal
    answers may differ in it."""

    def finished(self) -> bool:
        """Return whether this sequence has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """What is known of a request: its prompt and its sequences."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[LogprobsByToken | None] | None = None
    """One entry per prompt token, None for the first."""
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    error: str | None = None
    """Why it failed, where `finish_reason` is "error"."""
    pooled: bytes | None = None
    """Of a request for vectors: these, as little-endian float32."""
    num_vectors: int = 0
    """How many they are."""
    lora_request: LoRARequest | None = None
    """What it was answered with besides the model."""
    kv_transfer_params: dict[str, Any] | None = None
    """Of a finished request with `do_remote_decode`: what the engine that goes on with it needs."""

    def name_adapter(self, request: LoRARequest | None) -> None:
        """Say what it was answered with besides the model, of its sequences too."""
        self.lora_request = request
        for each in self.outputs:
            each.lora_request = request

    @property
    def weight_version(self) -> str:
        """What the weights are called that it was answered with: the last ones, where they were
        replaced meanwhile (`metrics.weight_versions` has all)."""
        return self.metrics.weight_versions[-1] if self.metrics.weight_versions else FIRST_VERSION

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were not computed because the prefix cache held them."""
        return self.metrics.num_prefix_hit_tokens

    @property
    def num_cache_write_tokens(self) -> int:
        """Prompt tokens that were computed and that the prefix cache holds since."""
        return self.metrics.num_cache_write_tokens

    @property
    def encoder_prompt(self) -> None:
        """None, as the next: models that generate text have no encoder."""

    @property
    def encoder_prompt_token_ids(self) -> None:
        """None."""


@dataclass(slots=True)
class BeamSearchSequence:
    """One finished beam, prompt excluded."""

    token_ids: list[int]
    text: str
    cumulative_logprob: float
    score: float
    """`cumulative_logprob / len(token_ids) ** length_penalty`."""
    finish_reason: str
    prompt_token_ids: list[int] = field(default_factory=list, repr=False)

    @property
    def cum_logprob(self) -> float:
        """`cumulative_logprob`, by vLLM's name."""
        return self.cumulative_logprob

    @property
    def tokens(self) -> list[int]:
        """The prompt's token ids and the beam's."""
        return self.prompt_token_ids + self.token_ids


@dataclass(slots=True)
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    request_id: str
    sequences: list[BeamSearchSequence]
    prompt_token_ids: list[int]
    prompt: str | None = None
    error: str | None = None
    """Why the search failed; it then has no sequences."""
