"""The parameters of `LLM.beam_search`, by vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from quire.core import checks
from quire.core.params import MAX_BEAM_WIDTH, MAX_TOKENS, BeamRules, SamplingParams
from quire.errors import InvalidParameterError


@dataclass(slots=True)
class BeamSearchParams:
    """Beam search: keep the `beam_width` best sequences by
    `cumulative_logprob / len ** length_penalty`.

    Raises `InvalidParameterError` (with `param` set) for a value out of its range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    """Divides the logits before the log-softmax that scores candidates;
    0 leaves them as they are."""
    length_penalty: float = 1.0
    """Above 0 favours longer sequences, below 0 shorter ones."""
    include_stop_str_in_output: bool = False
    early_stopping: bool | Literal["never"] = False
    """True stops at `beam_width` finished sequences; False when no running beam can, at its present
    length, beat the worst finished one; "never" when none could at any length.
    """
    skip_special_tokens: bool = True
    stop_token_ids: list[int] = field(default_factory=list)
    allowed_token_ids: list[int] | None = None
    structured_outputs: None = None
    """Not available for beams."""

    def __post_init__(self) -> None:
        if self.structured_outputs is not None:
            raise InvalidParameterError(
                "structured_outputs are not available for beam search in this version; use "
                "generate",
                param="structured_outputs",
            )
        self.beam_width = checks.integer("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        self.max_tokens = checks.integer("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        self.as_sampling()  # judges all that other requests have, too

    def as_sampling(self) -> SamplingParams:
        """Return the same as parameters of any request."""
        return SamplingParams(
            n=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            seed=0,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            stop_token_ids=self.stop_token_ids,
            allowed_token_ids=self.allowed_token_ids,
            beam_search=BeamRules(self.length_penalty, self.early_stopping),
        )
