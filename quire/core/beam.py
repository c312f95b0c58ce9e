"""Beam search as a strategy: beams are sequences, their branching is forks on shared blocks.

Semantics are those of Hugging Face Transformers' `generate(num_beams=...)`: candidates are ranked
by the sum of log-probabilities, finished hypotheses by that sum over `length ** length_penalty`,
only candidates among the best `beam_width` may finish, and `early_stopping` decides when no better
hypothesis is to be hoped for. Nothing of a beam is told before the end: then the hypotheses take
the place of the request's sequences.

Beams of one request may be computed in different steps (one may have been preempted); the search
moves on when all have reported.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from quire.core.plan import Candidates, Task, TokenLogprobs, WorkResult
from quire.core.request import Conclusion, FinishReason, Sequence, SequenceOps
from quire.core.request_spec import RequestSpec


class Hypothesis(NamedTuple):
    """A finished beam: its output tokens, their summed log-probability,
    and the score it is ranked by."""

    token_ids: tuple[int, ...]
    cumulative_logprob: float
    score: float
    finish_reason: FinishReason


class _Candidate(NamedTuple):
    logprob: float
    """Of the whole output, this token included."""
    beam: Sequence
    token_id: int
    ends: bool


class BeamSearch:
    """The state of one search. `hypotheses` holds the outcome, best first,
    once the request is finished."""

    is_plain = False
    early_tasks: tuple[Task, ...] = ()

    def __init__(self, spec: RequestSpec) -> None:
        assert spec.beam is not None
        self._spec, self.settings = spec, spec.beam
        self.hypotheses: list[Hypothesis] = []
        self._beams: list[Sequence] = []
        self._reports: dict[Sequence, TokenLogprobs] = {}
        self._num_forks = 0
        self._num_candidates = max(2, 1 + len(spec.stop_token_ids)) * self.settings.beam_width
        self._tasks: tuple[Task, ...] = (Candidates(self._num_candidates),)

    def tasks(self, sequence: Sequence) -> tuple[Task, ...]:
        return self._tasks

    def absorb(self, ops: SequenceOps, sequence: Sequence, result: WorkResult) -> None:
        if not self._beams:
            self._beams = [sequence]
        self._reports[sequence] = result.logprobs[0]
        if len(self._reports) < len(self._beams):
            return
        candidates = self._best_candidates()
        self._reports.clear()
        num_tokens = self._beams[0].num_output_tokens + 1
        self._collect_finished(candidates, num_tokens)
        survivors = [candidate for candidate in candidates if not candidate.ends][
            : self.settings.beam_width
        ]
        if not survivors or not self._can_improve(survivors[0].logprob, num_tokens):
            self._end(ops)
        else:
            self._advance(ops, survivors)

    def _best_candidates(self) -> list[_Candidate]:
        stops = self._spec.stop_token_ids
        is_last = self._beams[0].num_output_tokens + 1 >= self._spec.max_tokens
        candidates = [
            _Candidate(
                beam.cumulative_logprob + logprob,
                beam,
                token_id,
                is_last or token_id in stops,
            )
            for beam in self._beams
            for token_id, logprob in zip(
                self._reports[beam].top_ids, self._reports[beam].top_logprobs, strict=True
            )
        ]
        candidates.sort(key=lambda candidate: -candidate.logprob)
        return candidates[: self._num_candidates]

    def _collect_finished(self, candidates: list[_Candidate], num_tokens: int) -> None:
        settings = self.settings
        if settings.early_stopping is True and len(self.hypotheses) == settings.beam_width:
            return
        for candidate in candidates[: settings.beam_width]:
            if candidate.ends:
                is_stop = candidate.token_id in self._spec.stop_token_ids
                self.hypotheses.append(
                    Hypothesis(
                        (*candidate.beam.output_token_ids, candidate.token_id),
                        candidate.logprob,
                        score(candidate.logprob, num_tokens, settings.length_penalty),
                        FinishReason.STOP if is_stop else FinishReason.LENGTH,
                    )
                )
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[settings.beam_width :]

    def _can_improve(self, best_running: float, num_tokens: int) -> bool:
        settings = self.settings
        if len(self.hypotheses) < settings.beam_width:
            return True
        if settings.early_stopping is True:
            return False
        is_optimistic = settings.early_stopping == "never" and settings.length_penalty > 0.0
        attainable_len = self._spec.max_tokens if is_optimistic else num_tokens
        attainable = score(best_running, attainable_len, settings.length_penalty)
        return attainable > self.hypotheses[-1].score

    def _advance(self, ops: SequenceOps, survivors: list[_Candidate]) -> None:
        """Continue each survivor's beam; the first of a beam takes the sequence over, the others
        fork from it."""
        heirs: dict[Sequence, Sequence] = {}
        beams = []
        for candidate in survivors:
            if candidate.beam in heirs:
                self._num_forks += 1
                beams.append(ops.fork(candidate.beam, self._num_forks))
            else:
                heirs[candidate.beam] = candidate.beam
                beams.append(candidate.beam)
        for beam in self._beams:
            if beam not in heirs:
                ops.finish(beam, FinishReason.STOP)
        self._beams = beams
        for beam, candidate in zip(beams, survivors, strict=True):
            ops.append(beam, candidate.token_id, None, is_on_worker=False)
            beam.cumulative_logprob = candidate.logprob

    def _end(self, ops: SequenceOps) -> None:
        request = self._beams[0].request
        for beam in self._beams:
            ops.finish(beam, FinishReason.STOP)
        self._beams = []
        ops.conclude(
            request,
            [
                Conclusion(each.token_ids, each.cumulative_logprob, each.finish_reason)
                for each in self.hypotheses
            ],
        )


def score(logprob: float, num_tokens: int, length_penalty: float) -> float:
    """Return what a hypothesis of that length is ranked by."""
    return logprob / math.pow(num_tokens, length_penalty)
