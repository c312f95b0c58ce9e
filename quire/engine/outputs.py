"""What users get back. Names and fields are those that users of vLLM know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from quire.core.request import RequestMetrics


class Logprob(NamedTuple):
    """One token's log-probability (natural logarithm), its rank (1 is the most likely), and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsByToken = dict[int, Logprob]
"""Token id -> `Logprob`: the token itself first, then the alternatives from the most likely down."""


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's sequences, so far or whole."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[LogprobsByToken] | None = None
    """One dict per output token."""
    finish_reason: str | None = None
    """"stop", "length", "repetition", "abort", "error", or None while unfinished."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it; None for the model's end-of-sequence token."""


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


@dataclass(slots=True)
class BeamSearchSequence:
    """One finished beam, prompt excluded."""

    token_ids: list[int]
    text: str
    cumulative_logprob: float
    score: float
    """`cumulative_logprob / len(token_ids) ** length_penalty`."""
    finish_reason: str


@dataclass(slots=True)
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    request_id: str
    sequences: list[BeamSearchSequence]
    prompt_token_ids: list[int]
    prompt: str | None = None
    error: str | None = None
    """Why the search failed; it then has no sequences."""
