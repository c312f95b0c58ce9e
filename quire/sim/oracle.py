"""The oracle: what each request must yield, computed alone and from plain token lists, without
blocks or batches.

Beam search is written a second time here, after the arrays of Transformers'
`GenerationMixin._beam_search` (finished and running beams in fixed places, -1e9 for an empty one),
so that the engine's version is checked by an independent one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.common.seeds import derive_seed
from quire.core.plan import TokenLogprobs
from quire.core.request import FinishReason
from quire.core.request_spec import RequestSpec
from quire.executor.null import null_logits, null_logprobs, null_sample

_NEVER = -1.0e9


class ExpectedOutput(NamedTuple):
    """What one sequence must be."""

    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs]

    @property
    def cumulative_logprob(self) -> float:
        """Summed in order, as the engine sums."""
        total = 0.0
        for record in self.logprobs:
            total += record.logprob
        return total


class BeamAnswer(NamedTuple):
    """One finished beam."""

    token_ids: list[int]
    score: float


class _Beam(NamedTuple):
    score: float
    token_ids: tuple[int, ...]
    is_finished: bool


@dataclass(slots=True)
class Oracle:
    """Answers for one executor's key and vocabulary, and the windows of its groups of layers."""

    key: int
    vocab_size: int
    windows: tuple[int | None, ...] = (None,)
    _logits: dict[tuple[int, ...], NDArray[np.float64]] = field(default_factory=dict)

    def logits(self, token_ids: tuple[int, ...]) -> NDArray[np.float64]:
        """After `token_ids`: float64 [vocab_size]."""
        known = self._logits.get(token_ids)
        if known is None:
            known = self._logits[token_ids] = null_logits(
                self.key, token_ids, self.vocab_size, self.windows
            )
        return known

    def sample(self, spec: RequestSpec, index: int, max_tokens: int) -> ExpectedOutput:
        """Sequence `index` of a sampled request."""
        sampling, seed = spec.sampling, derive_seed(spec.sampling.seed, index)
        tokens, records = list(spec.prompt_token_ids), []
        reason = FinishReason.LENGTH
        for num_output in range(1, max_tokens + 1):
            logits = self.logits(tuple(tokens))
            token_id = null_sample(logits, sampling, seed, len(tokens))
            tokens.append(token_id)
            if sampling.num_logprobs is not None:
                records.append(null_logprobs(logits, token_id, sampling.num_logprobs))
            if token_id in spec.stop_token_ids and num_output > sampling.min_tokens:
                reason = FinishReason.STOP
                break
        return ExpectedOutput(tokens[len(spec.prompt_token_ids) :], reason, records)

    def score_prompt(self, spec: RequestSpec) -> list[TokenLogprobs | None]:
        """Prompt log-probabilities, the first None."""
        tokens, num_alternatives = spec.prompt_token_ids, spec.sampling.num_prompt_logprobs
        assert num_alternatives is not None
        scored = [
            null_logprobs(self.logits(tokens[:target]), tokens[target], num_alternatives)
            for target in range(1, len(tokens))
        ]
        return [None, *scored]

    def search(self, spec: RequestSpec) -> list[BeamAnswer]:
        """Beam search, best first."""
        settings, stops, prompt = spec.beam, spec.stop_token_ids, spec.prompt_token_ids
        assert settings is not None
        width = settings.beam_width
        running = [_Beam(0.0 if place == 0 else _NEVER, (), False) for place in range(width)]
        finished = [_Beam(_NEVER, (), False) for _ in range(width)]
        num_kept = max(2, 1 + len(stops)) * width
        for num_tokens in range(1, spec.max_tokens + 1):
            grown = sorted(self._grow(prompt, running), key=lambda beam: -beam.score)[:num_kept]
            ends = [num_tokens == spec.max_tokens or beam.token_ids[-1] in stops for beam in grown]
            alive = [
                beam._replace(score=beam.score + _NEVER * is_end)
                for beam, is_end in zip(grown, ends, strict=True)
            ]
            running = sorted(alive, key=lambda beam: -beam.score)[:width]
            is_full = settings.early_stopping is True and all(beam.is_finished for beam in finished)
            for beam, is_end in list(zip(grown, ends, strict=True))[:width]:
                if is_end and not is_full:
                    score = beam.score / num_tokens**settings.length_penalty
                    finished.append(_Beam(score, beam.token_ids, True))
            finished = sorted(finished, key=lambda beam: -beam.score)[:width]
            if all(ends) or not _has_hope(spec, running, finished, num_tokens):
                break
        return [
            BeamAnswer(list(beam.token_ids), beam.score) for beam in finished if beam.is_finished
        ]

    def _grow(self, prompt: tuple[int, ...], running: list[_Beam]) -> list[_Beam]:
        grown = []
        for beam in running:
            logits = self.logits(prompt + beam.token_ids)
            logprobs = logits - np.log(np.exp(logits).sum())
            for token_id, logprob in enumerate(logprobs):
                grown.append(_Beam(beam.score + float(logprob), (*beam.token_ids, token_id), False))
        return grown


def _has_hope(
    spec: RequestSpec, running: list[_Beam], finished: list[_Beam], num_tokens: int
) -> bool:
    """Return whether a running beam might still beat a finished one,
    by the heuristic that the settings name."""
    settings = spec.beam
    assert settings is not None
    if not all(beam.is_finished for beam in finished):
        return True
    if settings.early_stopping is True:
        return False
    is_optimistic = settings.early_stopping == "never" and settings.length_penalty > 0.0
    length = float(spec.max_tokens if is_optimistic else num_tokens)
    best: float = running[0].score / length**settings.length_penalty
    return best > finished[-1].score
