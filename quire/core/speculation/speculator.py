"""Speculation: how many tokens each row of a step may draft, and what came of it.

Implements `LookAhead`. The rule for a draft: a token that is computed on top of a step costs what
the step-cost model says of one more token, and brings the chance that it is right, which was
measured. It is taken where that raises the step's tokens per second:

    chance / cost > (rows that sample + chances taken) / (duration of the step so far)

So nothing is drafted where a step is bound by arithmetic rather than by reading weights, nor where
drafts are rejected. Chances are learned of every draft token, verified or not. Whether all of it
pays is measured as well (`account.py`), and ends it where it does not. A step's results depend on
none of this.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from operator import mul
from typing import TYPE_CHECKING

from quire.core.plan import ONE_SAMPLE, Record, StepPlan, StepResult, Verify
from quire.core.request import Sequence
from quire.core.scheduler.look_ahead import OpenStep
from quire.core.speculation.acceptance import Acceptance
from quire.core.speculation.account import NO_DRAFTING, NO_GAIN, DraftAccount, Gain, taken
from quire.core.speculation.drafters import NO_DRAFT, Draft, Drafter
from quire.core.speculation.standing import StandingOrders
from quire.core.step_cost import StepCostModel, StepWork, UnitCosts

if TYPE_CHECKING:
    from quire.core.speculation.mixture import ModelWorth

logger = logging.getLogger(__name__)

_LEAST_CHANCE = 0.02
"""A draft ends where the chance that all of it is accepted falls below this."""
_BEST_CHANCE = 0.98
"""Where not even a token of this chance pays, no drafter is called."""
_LOOK_S = 0.002
"""Of a step, for each row: in longer ones a call of the drafter (10 us) does not matter."""
_MAX_NAPS = 5
"""The drafter is called in every 32nd step for a sequence whose drafts do not pay."""
_LEAST_SPEEDUP = 1.05
"""Less is not worth the risk that the estimates are wrong."""
_NEVER = 1 << 62
_GAIN_RATE = 1 / 16
_LEAST_FIXED_SHARE = 0.75
"""Of a step, at least so much is taken not to depend on the number of rows, when it is judged what
was saved by rows that end sooner than others."""
_PEEK_EVERY, _MAX_PEEK_EVERY = 64, 4096
"""While the account sleeps, drafts are looked at this seldom, and twice as seldom after each time
that they tempted in vain: a look takes up to a third of the shortest steps."""
_TEMPTING = 2.0
"""Tokens that each row may expect to gain, on average, for drafts to be tried before it is time."""
_NAP_RATE = 1 / 4
_READ_SHARE, _READ_COST, _USUAL_LEN = 1 / 64, 0.2, 256
"""A draft model catches up with a prompt where that takes no more than so much of what the answer
takes, the prompt included, or what the account holds beside it. Before it was measured, a token
counts as this share of the target's; an answer may end before so many tokens."""
_LEARNING_RATE, _FORGETTING_RATE = 1 / 8, 1 / 64


class _Trail:
    """A sequence's last draft, to be compared with what came."""

    __slots__ = (
        "_gain", "_weight", "acceptance", "draft", "num_known", "num_naps", "wakes",
    )  # fmt: skip

    def __init__(self, acceptance: Acceptance) -> None:
        self.acceptance = acceptance
        self.draft = NO_DRAFT
        self._gain = self._weight = 0.0
        self.num_known = 0
        """Tokens known when it was made."""
        self.wakes = 0
        """The step in which the sequence is looked at again: later each time that nothing came of
        it."""
        self.num_naps = 0

    def learn(self, token_ids: list[int]) -> None:
        """Count the draft tokens that can be judged by now: up to the first that was wrong."""
        tokens = self.draft.token_ids
        came = token_ids[self.num_known : self.num_known + len(tokens)]
        for place, token_id in enumerate(came):
            is_right = tokens[place] == token_id
            self.acceptance.count(self.draft.strength_of(place), is_right)
            if not is_right:
                break
        self.draft = NO_DRAFT

    def gained(self, count: int) -> float:
        """A step brought so many tokens beyond one; returns how many, lately."""
        self._gain += _GAIN_RATE * (count - self._gain)
        self._weight += _GAIN_RATE * (1.0 - self._weight)
        return self._gain / self._weight

    def rest(self, step_id: int) -> None:
        """Nothing was worth its time now. Sequences wake in the same steps, since a look at
        several takes little longer than at one."""
        self.num_naps = min(self.num_naps + 1, _MAX_NAPS)
        self.wakes = ((step_id >> self.num_naps) + 1) << self.num_naps


class _Budget:
    """What a step yields and takes so far, in tokens and seconds: of its decodes. Prompts beside
    them are no reason to draft more, since what they take is not lost."""

    def __init__(self, step: OpenStep, costs: StepCostModel, overhead: _Overhead) -> None:
        ends = [work.start + work.num_tokens for work in step.work if work.tasks]
        count, num_context = len(ends), sum(ends)
        self.work = StepWork(1, 1, count, count, num_context, float(num_context))
        self._units: UnitCosts = costs.units()
        self._plain_s = costs.seconds(self.work)
        self._seconds = self._plain_s + overhead.step_s
        self._run_s = overhead.run_s
        self._num_plain, self._num_tokens = count, float(count)
        self.added_s = 0.0
        """What the tokens taken are expected to take, without what any draft costs."""

    @property
    def may_pay(self) -> bool:
        """Whether draft tokens can pay at all, if all of them are right."""
        least_s = self._units.token_s + self._units.output_s
        return _BEST_CHANCE * self._plain_s > least_s * self._num_plain

    @property
    def fixed_share(self) -> float:
        """Of the step without draft tokens, what does not depend on the number of rows."""
        share = (self._units.step_s + self._units.head_s) / self._plain_s
        return max(_LEAST_FIXED_SHARE, min(share, 1.0))

    def reading_share(self, num_known: int, num_left: int, token_s: float) -> float:
        """What it takes a draft model to catch up with a sequence, in such steps, beyond what its
        answer allows; at least 0."""
        cost_s = num_known * (token_s or _READ_COST * self._units.token_s)
        own_s = num_known * self._units.token_s
        own_s += min(num_left, _USUAL_LEN) * self._plain_s / self._num_plain
        return max(0.0, cost_s - _READ_SHARE * own_s) / self._plain_s

    @property
    def is_short(self) -> bool:
        """Whether looking for draft tokens takes a share of the step that is worth saving."""
        return self._plain_s < _LOOK_S * self._num_plain

    @property
    def pays(self) -> bool:
        """Whether those taken pay together, with what any draft costs a step."""
        return self._num_tokens * self._plain_s > _LEAST_SPEEDUP * self._num_plain * self._seconds

    def take(self, chances: Iterable[float], first: int) -> int:
        """Add tokens from a position on that count with these chances, as far as that pays;
        returns how many."""
        seconds, num_tokens, count = self._seconds + self._run_s, self._num_tokens, 0
        token_s, pair_s = self._units.token_s + self._units.output_s, self._units.pair_s
        added_s = 0.0
        for chance in chances:
            cost_s = token_s + pair_s * (first + count)
            if chance * seconds <= _LEAST_SPEEDUP * cost_s * num_tokens:
                break
            seconds += cost_s
            added_s += cost_s
            num_tokens += chance
            count += 1
        if num_tokens * self._seconds <= self._num_tokens * seconds:
            return 0  # less than what any draft costs its row
        self._seconds, self._num_tokens = seconds, num_tokens
        self.added_s += added_s
        return count


class Speculator:
    """Draft tokens for all rows of one scheduler. Without `costs` it takes whatever is drafted.

    `forced` knows tokens that grammars leave no choice of; they go before those of `drafter`.
    `modelled` orders a model's drafts, where `drafter` has them from there; `worth` says whether
    they are to be ordered, where `drafter` has others as well.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        max_tokens: int,
        *,
        costs: StepCostModel | None = None,
        least_chance: float = 0.0,
        forced: StandingOrders | None = None,
        modelled: StandingOrders | None = None,
        worth: ModelWorth | None = None,
    ) -> None:
        self._drafter = drafter
        self._forced, self._modelled, self._worth = forced, modelled, worth
        self._standing = [each for each in (forced, modelled) if each is not None]
        self._max_tokens = max_tokens
        self._costs = costs
        self._least_chance = max(least_chance, _LEAST_CHANCE)
        self._acceptance = Acceptance()
        self._trails: dict[Sequence, _Trail] = {}
        self._overhead = _Overhead()
        self._account = DraftAccount()
        self._runs: dict[int, list[Sequence]] = {}
        """Of the steps in flight that have draft tokens and decodes alone: the sequences."""
        self._peeks, self._peek_every = 0, _PEEK_EVERY
        """The next step in which drafts are looked at though the account sleeps, and how often."""
        self._usual_naps = 0.0
        """With which a sequence begins, after its first look."""
        self._has_told = False
        self._held = 0
        """Before this step, plain steps are being measured."""
        self.wakes = 0
        self.needs_tokens = False

    def extend(self, step: OpenStep) -> None:
        """See `LookAhead.extend`."""
        self.needs_tokens, self.wakes = False, 0
        self._account.forget(step.step_id)
        has_forms = self._order(step)
        if self._drafter is None and not has_forms:
            self.wakes = _NEVER
            return
        if self._costs is None:
            self._extend(step, list(self._choose(step, None)))
            self._order_modelled(step, None)
            return
        if step.step_id < self._account.wakes:
            self._cancel()
            if not self._is_tempting(step):
                self.wakes = min(self._account.wakes, max(self._peeks, step.step_id + 1))
                return
            self._account.wake(step.step_id)
        if not (step.has_decodes_alone or has_forms or self._account.has_earned):
            self._lapse(step)  # what it takes could not be told from the prompt's share
            return
        budget = _Budget(step, self._costs, self._overhead)
        num_rows = budget.work.num_outputs
        if not num_rows or not budget.may_pay:
            if self._modelled is not None:
                self._modelled.cancel()
            self.wakes = step.step_id + (1 << _MAX_NAPS)
            return
        estimate_s = 0.0
        if step.has_decodes_alone:
            estimate_s = sum(map(mul, self._costs.estimate, budget.work))
            self._held = self._account.hold(step.step_id, num_rows, has_forms, estimate_s)
            if self._held > step.step_id:
                self._cancel()
                self.wakes = self._held
                return
        chosen = list(self._choose(step, budget))
        if not budget.pays:
            chosen, self.needs_tokens = [], False
        num_runs = self._extend(step, chosen)
        if step.has_decodes_alone:
            self._account.look(step.step_id, num_rows, has_forms, estimate_s, budget.fixed_share)
            self._overhead.began(step.step_id, num_runs, budget.added_s)
            if num_runs:
                self._runs[step.step_id] = list(step.sequences)
        self._order_modelled(step, budget)

    def taken_in(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """See `LookAhead.taken_in`."""
        if result.news or self._modelled is not None:
            for standing in self._standing:
                self._wake(standing.take(result.news), plan.step_id)
        took = NO_DRAFTING if self._modelled is None else self._modelled.took
        if not self._account.is_watching and took is NO_DRAFTING:
            self._account.pass_by(plan.step_id, now)
            return
        sequences = taken(self._runs, plan.step_id)
        gain = NO_GAIN if sequences is None else self._gain(sequences, result)
        if self._account.has_earned:
            self._peek_every = _PEEK_EVERY
        extra_s = self._account.settle(plan.step_id, len(plan.work), gain, now, took)
        if sequences is not None:
            self._overhead.measured(plan.step_id, extra_s)
        if self._worth is not None and plan.work and self._account.step_s:
            num_taken = took.seconds / self._account.step_s
            self._worth.count(plan.step_id, len(plan.work), num_taken)

    def _gain(self, sequences: Iterable[Sequence], result: StepResult) -> Gain:
        num_tokens, least = 0, math.inf
        for sequence, outcome in zip(sequences, result.results, strict=True):
            gained = max(0, len(outcome.token_ids) - 1)
            num_tokens += gained
            trail = self._trails.get(sequence)
            least = 0.0 if trail is None else min(least, trail.gained(gained))
        # alone, a sequence saves whole steps from the first token on
        return Gain(num_tokens, num_tokens if len(result.results) == 1 else least)

    def take_orders(self) -> dict[str, tuple[Record, ...]]:
        """See `LookAhead.take_orders`."""
        orders: dict[str, tuple[Record, ...]] = {}
        for standing in self._standing:
            orders |= standing.take_orders()
        return orders

    def end(self, sequence: Sequence) -> None:
        """See `LookAhead.end`."""
        trail = self._trails.pop(sequence, None)
        if trail is not None:
            trail.learn(sequence.token_ids)
            if self._drafter is not None:
                self._drafter.end(sequence)
        for standing in self._standing:
            standing.end(sequence)

    def _order(self, step: OpenStep) -> bool:
        """Have tokens found that grammars force; whether any row has a grammar."""
        if self._forced is None:
            return False
        entering, has_forms = step.entering_rows, False
        for sequence in step.sequences:
            if sequence.sampling.grammar is not None and _is_drafted(sequence):
                self._forced.order(sequence, is_entering=sequence.row in entering)
                has_forms = True
        return has_forms

    def _lapse(self, step: OpenStep) -> None:
        if self._modelled is not None:
            self._modelled.lapse(step.entering_rows)

    def _order_modelled(self, step: OpenStep, budget: _Budget | None) -> None:
        """Have a model draft for the rows that sample. A row's first order goes with a step of
        decodes alone, whose duration tells what it costs; so prompts wait for no draft model. It
        goes where the model has caught up with the row at a cost that the answer can bear."""
        self._lapse(step)
        modelled, credit = self._modelled, self._account.credit
        if modelled is None or (budget is not None and not step.has_decodes_alone):
            return
        if self._worth is not None and not self._worth.may_draft(step.step_id):
            modelled.cancel()
            return
        for sequence, work in zip(step.sequences, step.work, strict=True):
            if not work.tasks or sequence.request.beam is not None or not _is_drafted(sequence):
                continue
            if budget is not None and not modelled.has_ordered(sequence):
                num_left = sequence.request.max_tokens - sequence.num_output_tokens
                num_known = len(sequence.token_ids)
                share = budget.reading_share(num_known, num_left, modelled.read_token_s)
                if share > credit:
                    continue
                credit -= share
            modelled.order(sequence, is_entering=False)
            self.needs_tokens, self.wakes = True, 0

    def _cancel(self) -> None:
        """Have nothing done for drafts beside the steps."""
        for standing in self._standing:
            standing.cancel()

    def _wake(self, sequences: Iterable[Sequence], step_id: int) -> None:
        """These have a draft."""
        for sequence in sequences:
            trail = self._trails.get(sequence)
            if trail is not None:
                trail.wakes = 0
            if step_id + 1 >= max(self._held, self._account.wakes):
                self.wakes = 0

    def _extend(self, step: OpenStep, chosen: list[tuple[int, list[int]]]) -> int:
        """Add the draft tokens to the step, as far as there is room; returns to how many rows."""
        num_runs = 0
        for place, tokens in chosen:
            count = min(len(tokens), step.room(step.sequences[place]))
            if count > 0:
                step.extend(place, (Verify(tuple(tokens[:count])),), count)
                num_runs += 1
        self.needs_tokens |= num_runs > 0
        return num_runs

    def _choose(self, step: OpenStep, budget: _Budget | None) -> Iterator[tuple[int, list[int]]]:
        """The draft tokens that are worth their time, and the place of their work."""
        wakes = step.step_id + (1 << _MAX_NAPS)
        for place, (sequence, work) in enumerate(zip(step.sequences, step.work, strict=True)):
            if sequence.request.beam is not None or not _is_drafted(sequence):
                self._note_beams(sequence)
                continue
            if self._drafter is None and sequence.sampling.grammar is None:
                continue
            if work.tasks != ONE_SAMPLE:  # not yet: its prompt is being computed or scored
                wakes = min(wakes, step.step_id + 1)
                continue
            trail = self._trail(sequence)
            if step.step_id < trail.wakes:
                wakes = min(wakes, trail.wakes)
                continue
            num_known, end = len(sequence.token_ids), work.start + work.num_tokens
            most = min(self._max_tokens, step.room(sequence))
            if most <= 0:
                continue
            trail.learn(sequence.token_ids)
            draft = trail.draft = self._draft(sequence, most + end - num_known)
            trail.num_known = num_known
            count = self._worthwhile(draft, trail.acceptance, budget, num_known)
            if not count and budget is not None and budget.is_short:
                trail.rest(step.step_id)
                self._usual_naps += _NAP_RATE * (trail.num_naps - self._usual_naps)
                wakes = min(wakes, trail.wakes)
                continue
            wakes = trail.num_naps = 0
            self._usual_naps -= _NAP_RATE * self._usual_naps
            if not count:
                continue
            if end == num_known:
                yield place, list(draft.token_ids[:count])
            else:  # its last token is not known before the step in flight is
                self.needs_tokens |= count > 1
        self.wakes = wakes

    def _is_tempting(self, step: OpenStep) -> bool:
        """Whether drafts promise so much that they are tried though they did not pay lately: a text
        that is answered again, after others that were new."""
        if step.step_id < self._peeks or not step.has_decodes_alone or self._drafter is None:
            return False
        self._peeks = step.step_id + self._peek_every
        promise = 0.0
        for sequence, work in zip(step.sequences, step.work, strict=True):
            if work.tasks == ONE_SAMPLE and _is_drafted(sequence):
                trail = self._trail(sequence)
                trail.learn(sequence.token_ids)
                trail.draft = self._drafter.draft(sequence, self._max_tokens)
                trail.num_known = len(sequence.token_ids)
                chance = 1.0
                for place in range(len(trail.draft.token_ids)):
                    chance *= trail.acceptance.chance(trail.draft.strength_of(place))
                    promise += chance
        if promise < _TEMPTING * len(step.work):
            return False
        self._peek_every = min(2 * self._peek_every, _MAX_PEEK_EVERY)
        return True

    def _trail(self, sequence: Sequence) -> _Trail:
        trail = self._trails.get(sequence)
        if trail is None:
            trail = self._trails[sequence] = _Trail(Acceptance(self._acceptance))
            trail.num_naps = int(self._usual_naps)
        return trail

    def _draft(self, sequence: Sequence, most: int) -> Draft:
        draft = NO_DRAFT
        if self._forced is not None and sequence.sampling.grammar is not None:
            draft = self._forced.draft(sequence, most)
        if not draft.token_ids and self._drafter is not None:
            draft = self._drafter.draft(sequence, most)
        return draft

    def _note_beams(self, sequence: Sequence) -> None:
        if sequence.request.beam is not None and not self._has_told:
            self._has_told = True
            logger.warning("beam search goes without drafts: its tokens are no samples")

    def _worthwhile(
        self, draft: Draft, acceptance: Acceptance, budget: _Budget | None, first: int
    ) -> int:
        """How many of the draft tokens are worth their time."""
        if budget is None or not draft.token_ids:
            return len(draft.token_ids)
        chances: list[float] = []
        chance = 1.0
        for place in range(len(draft.token_ids)):
            chance *= acceptance.chance(draft.strength_of(place))
            if chance < self._least_chance:
                break
            chances.append(chance)
        return budget.take(chances, first)


def _is_drafted(sequence: Sequence) -> bool:
    """A processor may remember what it was shown."""
    return not sequence.sampling.processors


class _Overhead:
    """What a step takes longer for having draft tokens, beyond their number: for having any, since
    the kernels for one token of each sequence do not serve it, and for each row that has some.

    Both are followed by normalized least mean squares (Widrow and Hoff, 1960), and fade while
    nothing is drafted, so that a wrong one does not last.
    """

    def __init__(self) -> None:
        self.step_s = self.run_s = 0.0
        self._runs: dict[int, tuple[int, float]] = {}

    def began(self, step_id: int, num_runs: int, added_s: float) -> None:
        """A step has so many rows with draft tokens, which should take so long."""
        if num_runs:
            self._runs[step_id] = (num_runs, added_s)
        else:
            self.step_s -= _FORGETTING_RATE * self.step_s
            self.run_s -= _FORGETTING_RATE * self.run_s

    def measured(self, step_id: int, extra_s: float | None) -> None:
        """A step was taken in, and took so much longer than without draft tokens."""
        num_runs, added_s = taken(self._runs, step_id) or (0, 0.0)
        if num_runs and extra_s is not None:
            off_s = extra_s - added_s - self.step_s - self.run_s * num_runs
            step_s = _LEARNING_RATE * off_s / (1.0 + num_runs)
            self.step_s = max(0.0, self.step_s + step_s)
            self.run_s = max(0.0, self.run_s + step_s)
