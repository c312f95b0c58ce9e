"""Speculation: how many tokens each row of a step may draft, and what came of it.

Implements `LookAhead`. The rule for a draft: a token that is computed on top of a step costs what
the step-cost model says of one more token, and brings the chance that it is right, which was
measured. It is taken where that raises the step's tokens per second:

    chance / cost > (rows that sample + chances taken) / (duration of the step so far)

So nothing is drafted where a step is bound by arithmetic rather than by reading weights, nor where
drafts are rejected. Chances are learned of every draft token, verified or not. A step's results
depend on none of this.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from quire.core.plan import ONE_SAMPLE, Verify
from quire.core.request import Sequence
from quire.core.scheduler.look_ahead import OpenStep
from quire.core.speculation.acceptance import Acceptance
from quire.core.speculation.drafters import NO_DRAFT, Draft, Drafter
from quire.core.step_cost import StepCostModel, StepWork, UnitCosts

logger = logging.getLogger(__name__)

_LEAST_CHANCE = 0.02
"""A draft ends where the chance that all of it is accepted falls below this."""
_BEST_CHANCE = 0.98
"""Where not even a token of this chance pays, no drafter is called."""
_LOOK_S = 0.002
"""Of a step, for each row: in longer ones a call of the drafter (10 us) does not matter."""
_MAX_NAPS = 4
"""The drafter is called in every sixteenth step for a sequence whose drafts do not pay."""
_LEAST_SPEEDUP = 1.05
"""Less is not worth the risk that the estimates are wrong."""
_NEVER = 1 << 62
_FIRST_GAIN, _LEAST_GAIN, _SCOUT_EVERY = 0.06, 0.05, 8
_LEARNING_RATE, _FORGETTING_RATE = 1 / 8, 1 / 128


class _Trail:
    """A sequence's last draft, to be compared with what came."""

    __slots__ = (
        "acceptance", "draft", "num_accepted", "num_drafted", "num_known", "num_naps", "wakes",
    )  # fmt: skip

    def __init__(self, acceptance: Acceptance) -> None:
        self.acceptance = acceptance
        self.draft = NO_DRAFT
        self.num_drafted = 0
        """Tokens of it that are verified."""
        self.num_accepted = 0
        self.num_known = 0
        """Tokens known when it was made."""
        self.wakes = 0
        """The step in which the sequence is looked at again: later each time that nothing came of
        it."""
        self.num_naps = 0

    def learn(self, token_ids: list[int]) -> None:
        """Count the draft tokens that can be judged by now: up to the first that was wrong."""
        tokens, strength = self.draft
        came = token_ids[self.num_known : self.num_known + len(tokens)]
        for place, token_id in enumerate(came):
            is_right = tokens[place] == token_id
            self.num_accepted += is_right and place < self.num_drafted
            self.acceptance.count(strength + place, is_right)
            if not is_right:
                break
        self.draft, self.num_drafted = NO_DRAFT, 0

    def rest(self, step_id: int) -> None:
        """Nothing was worth its time now."""
        self.num_naps = min(self.num_naps + 1, _MAX_NAPS)
        self.wakes = step_id + (1 << self.num_naps)


class _Budget:
    """What a step yields and takes so far, in tokens and seconds: of its decodes. Prompts beside
    them are no reason to draft more, since what they take is not lost."""

    def __init__(self, step: OpenStep, costs: StepCostModel, run_s: float) -> None:
        ends = [work.start + work.num_tokens for work in step.work if work.tasks]
        count, num_context = len(ends), sum(ends)
        work = StepWork(1, 1, count, count, num_context, float(num_context))
        self._units: UnitCosts = costs.units()
        self._plain_s = self._seconds = costs.seconds(work)
        self._num_plain, self._num_tokens = count, float(count)
        self._run_s = run_s

    @property
    def may_pay(self) -> bool:
        """Whether draft tokens can pay at all, if all of them are right."""
        least_s = self._units.token_s + self._units.output_s
        return _BEST_CHANCE * self._plain_s > least_s * self._num_plain

    @property
    def is_short(self) -> bool:
        """Whether looking for draft tokens takes a share of the step that is worth saving."""
        return self._plain_s < _LOOK_S * self._num_plain

    @property
    def pays(self) -> bool:
        """Whether those taken pay together, with what any draft costs a step."""
        rate = self._num_tokens / (self._seconds + self._run_s)
        return rate * self._plain_s > _LEAST_SPEEDUP * self._num_plain

    def take(self, chance: float, position: int) -> bool:
        """Add a token at a position that counts with this chance, if that pays."""
        cost_s = self._units.token_s + self._units.output_s + self._units.pair_s * position
        if chance * self._seconds <= _LEAST_SPEEDUP * cost_s * self._num_tokens:
            return False
        self._seconds += cost_s
        self._num_tokens += chance
        return True


class Speculator:
    """Draft tokens for all rows of one scheduler. Without `costs` it takes whatever is drafted."""

    def __init__(
        self,
        drafter: Drafter,
        max_tokens: int,
        *,
        costs: StepCostModel | None = None,
        least_chance: float = 0.0,
    ) -> None:
        self._drafter = drafter
        self._max_tokens = max_tokens
        self._costs = costs
        self._least_chance = max(least_chance, _LEAST_CHANCE)
        self._acceptance = Acceptance()
        self._trails: dict[Sequence, _Trail] = {}
        self._overhead = _Overhead()
        self._gain, self._num_begun = _FIRST_GAIN, 0
        """Accepted tokens for each output token, of sequences that ended; and how many began."""
        self._has_told = False
        self._wakes = 0
        """Before this step, no sequence is looked at, unless a new one comes."""
        self.needs_tokens = False

    def extend(self, step: OpenStep) -> None:
        """See `LookAhead.extend`."""
        self.needs_tokens = False
        if step.step_id < self._wakes and not step.has_entered:
            return
        self._wakes = 0
        budget = None
        if self._costs is not None:
            budget = _Budget(step, self._costs, self._overhead.seconds)
            if not budget.may_pay:
                self._wakes = step.step_id + (1 << _MAX_NAPS)
                return
        chosen = list(self._choose(step, budget))
        if budget is not None and not budget.pays:
            chosen, self.needs_tokens = [], False
        num_extended = 0
        for place, tokens in chosen:
            count = min(len(tokens), step.room(step.sequences[place]))
            if count > 0:
                self._trails[step.sequences[place]].num_drafted = count
                step.extend(place, (Verify(tuple(tokens[:count])),), count)
                num_extended += 1
        self.needs_tokens |= num_extended > 0
        self._overhead.began(step, has_run=num_extended > 0)

    def measured(self, step_id: int, predicted_s: float, measured_s: float) -> None:
        """See `LookAhead.measured`."""
        self._overhead.measured(step_id, predicted_s, measured_s)

    def end(self, sequence: Sequence) -> None:
        """See `LookAhead.end`."""
        trail = self._trails.pop(sequence, None)
        if trail is not None:
            trail.learn(sequence.token_ids)
            self._drafter.end(sequence)
            if trail.wakes < _NEVER:
                share = trail.num_accepted / max(1, sequence.num_output_tokens)
                self._gain += _LEARNING_RATE * (share - self._gain)

    def _choose(self, step: OpenStep, budget: _Budget | None) -> Iterator[tuple[int, list[int]]]:
        """The draft tokens that are worth their time, and the place of their work."""
        wakes = step.step_id + (1 << _MAX_NAPS)
        for place, (sequence, work) in enumerate(zip(step.sequences, step.work, strict=True)):
            if work.tasks != ONE_SAMPLE or sequence.sampling.processors:
                self._note_beams(sequence)  # and a processor may remember what it was shown
                continue
            trail = self._trails.get(sequence)
            if trail is None:
                trail = self._trails[sequence] = self._begin(budget)
            if step.step_id < trail.wakes:
                wakes = min(wakes, trail.wakes)
                continue
            num_known, end = len(sequence.token_ids), work.start + work.num_tokens
            most = min(self._max_tokens, step.room(sequence))
            if most <= 0:
                continue
            trail.learn(sequence.token_ids)
            draft = trail.draft = self._drafter.draft(sequence, most + end - num_known)
            trail.num_known = num_known
            count = self._worthwhile(draft, trail.acceptance, budget, num_known)
            if not count and budget is not None and budget.is_short:
                trail.rest(step.step_id)
                wakes = min(wakes, trail.wakes)
                continue
            wakes = trail.num_naps = 0
            if not count:
                continue
            if end == num_known:
                yield place, list(draft.token_ids[:count])
            else:  # its last token is not known before the step in flight is
                self.needs_tokens |= count > 1
        self._wakes = wakes

    def _begin(self, budget: _Budget | None) -> _Trail:
        """Follow a sequence, or let it go: where steps are so short that reading its tokens takes a
        share of them, and drafts have saved next to nothing lately, only one of several is
        followed."""
        trail = _Trail(Acceptance(self._acceptance))
        self._num_begun += 1
        is_vain = self._gain < _LEAST_GAIN and self._num_begun % _SCOUT_EVERY != 0
        if is_vain and budget is not None and budget.is_short:
            trail.wakes = _NEVER
        return trail

    def _note_beams(self, sequence: Sequence) -> None:
        if sequence.request.beam is not None and not self._has_told:
            self._has_told = True
            logger.warning("beam search goes without drafts: its tokens are no samples")

    def _worthwhile(
        self, draft: Draft, acceptance: Acceptance, budget: _Budget | None, first: int
    ) -> int:
        """How many of the draft tokens are worth their time."""
        if budget is None:
            return len(draft.token_ids)
        chance = 1.0
        for place in range(len(draft.token_ids)):
            chance *= acceptance.chance(draft.strength + place)
            if chance < self._least_chance or not budget.take(chance, first + place):
                return place
        return len(draft.token_ids)


class _Overhead:
    """What a step takes longer for having draft tokens at all: the kernels for one token of each
    sequence do not serve it. The difference of the cost model's residuals in steps with draft
    tokens and in others."""

    def __init__(self) -> None:
        self._run_off_s = self._plain_off_s = 0.0
        self._last_run = self._last_plain = -1

    @property
    def seconds(self) -> float:
        """At least 0."""
        return max(0.0, self._run_off_s - self._plain_off_s)

    def began(self, step: OpenStep, *, has_run: bool) -> None:
        """A step was offered, and has draft tokens or not."""
        if has_run:
            self._last_run = step.step_id
        elif all(work.num_tokens == 1 for work in step.work):
            self._last_plain = step.step_id

    def measured(self, step_id: int, predicted_s: float, measured_s: float) -> None:
        """A step took so long."""
        off_s = max(-predicted_s, min(predicted_s, measured_s - predicted_s))
        if step_id == self._last_run:
            self._run_off_s += _LEARNING_RATE * (off_s - self._run_off_s)
        elif step_id == self._last_plain:
            self._plain_off_s += _LEARNING_RATE * (off_s - self._plain_off_s)
            self._run_off_s += _FORGETTING_RATE * (self._plain_off_s - self._run_off_s)
