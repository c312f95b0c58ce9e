"""What drafting has earned: the floor under it.

Estimates decide which drafts are taken; whether they pay is measured here, as a whole: everything
between one outcome and the next (planning, looking for drafts, computing, taking in), compared with
what such a step takes without drafts. Gains and losses go to an account, in steps: each step pays
1/192 in, a draft step what it saved or lost. When the account is empty, nothing is drafted, nor
looked for, until what the steps have paid in allows another try. So drafting costs less than one
per cent wherever it does not pay, whatever the estimates are.

What a step takes without drafts is known by its number of rows, relative to a fixed estimate of
its work, and is measured again now and then.
"""

from __future__ import annotations

from collections import deque
from math import log2
from typing import NamedTuple, TypeVar

Note = TypeVar("Note")

_SHARE = 1 / 192
"""Of all steps, in which drafting may lose."""
_FIRST_STAKE, _LEAST_STAKE, _MAX_STAKE = 2.0, 2.0, 4.0
"""Steps that a try may lose: more each time that one has failed, after a wait that is as much
longer. The first one has to fit into the steps of a single short answer."""
_TEMPTED_STAKE = 1.0
_MAX_CREDIT = 48.0
_NUM_PLAIN, _PLAIN_EVERY = 4, 192
"""So many steps in a row leave drafts out, to be measured; again after so many."""
_FEWEST, _MOST_HELD = 4, 2
"""Measured steps of a number of rows, before there are drafts; or so many attempts to measure
them."""
_MOST_OFF, _LEAST_BOUND, _ACTIVE_RATE = 1.5, 3.0, 0.5
"""A step that takes so many times as long as the ones with drafts before it was interrupted; it
counts as so many times as long."""
_PAYBACK_STEPS = 64
"""What a draft model takes to catch up with a prompt is accounted for over so many steps, so that
there is time to earn it back: an answer of ordinary length."""
_NUM_KEPT, _NUM_CUT = 9, 2
"""Durations of plain steps that are averaged, without so many of the shortest and of the longest.
"""


class _Step(NamedTuple):
    """A step of decodes alone."""

    num_rows: int
    kind: int
    """What its plain duration is compared with: rows of other kinds take longer."""
    estimate_s: float
    fixed_share: float = 0.0
    """Of its duration, what does not depend on the number of rows."""
    is_active: bool = False
    """Whether drafts were looked for."""


class Gain(NamedTuple):
    """What drafts brought in a step: tokens beyond one a row."""

    num_tokens: int = 0
    least: float = 0.0
    """In the long run, those of the sequence that gains least: so many steps are saved as a whole.
    Tokens that others gain beyond it leave the steps with fewer rows."""


NO_GAIN = Gain()
"""Of a step without drafts, and of no other."""


class Drafting(NamedTuple):
    """What a model's drafting took of a step, in seconds."""

    pass_s: float = 0.0
    """For the next tokens."""
    read_s: float = 0.0
    """To catch up with what was known before."""

    @property
    def seconds(self) -> float:
        """In all."""
        return self.pass_s + self.read_s


NO_DRAFTING = Drafting()


class _Pace:
    """How long plain steps of a number of rows take, relative to the estimate: the trimmed mean of
    the last ones. Some are interrupted; and where that is every other step, because the machine is
    shared, the median would be either kind's."""

    __slots__ = ("_ratios", "num_held", "ratio")

    def __init__(self) -> None:
        self.num_held = 0
        self.ratio = 0.0
        self._ratios: deque[float] = deque(maxlen=_NUM_KEPT)

    @property
    def num_measured(self) -> int:
        """Those kept."""
        return len(self._ratios)

    def learn(self, ratio: float) -> None:
        """A plain step was measured."""
        self._ratios.append(ratio)
        cut = min(_NUM_CUT, (len(self._ratios) - 1) // 2)
        kept = sorted(self._ratios)[cut : len(self._ratios) - cut]
        self.ratio = sum(kept) / len(kept)


def taken(of_steps: dict[int, Note], step_id: int) -> Note | None:
    """Remove and return what is noted of a step that was taken in. What is noted of earlier ones
    goes, too: they were lost."""
    found = of_steps.pop(step_id, None)
    for lost in [each for each in of_steps if each < step_id]:
        del of_steps[lost]
    return found


class DraftAccount:
    """Decides whether there may be drafts at all. Step ids are those of one scheduler."""

    def __init__(self) -> None:
        self.credit, self._stake = _FIRST_STAKE, _LEAST_STAKE
        """In steps."""
        self.wakes = 0
        """Before this step, there are no drafts."""
        self._next_plain = 0
        self._paces: dict[tuple[int, int], _Pace] = {}
        self._open: dict[int, _Step] = {}
        self._last_id, self._last_s, self._was_active = -2, 0.0, False
        self._active_ratio = 1.0
        self._paid_id = 0
        self.step_s = 0.0
        """What the last settled step should have taken without drafts; 0 before there was one."""
        self._invested_s = 0.0
        """What drafting took in advance, and is yet to be accounted for."""

    def hold(self, step_id: int, num_rows: int, kind: int, estimate_s: float) -> int:
        """The step before which nothing is to be looked for, so that plain steps can be measured:
        this one where none has to be."""
        pace = self._pace(num_rows, kind)
        is_known = pace.num_measured >= _FEWEST or pace.num_held >= _MOST_HELD
        if is_known and step_id < self._next_plain:
            return step_id
        pace.num_held += 1
        self._next_plain = step_id + _PLAIN_EVERY
        end = step_id + 1 + _NUM_PLAIN
        for each in range(step_id + 1, end):
            self._open[each] = _Step(num_rows, kind, estimate_s)
        return end

    def look(
        self, step_id: int, num_rows: int, kind: int, estimate_s: float, fixed_share: float
    ) -> None:
        """Drafts are looked for, for a step of decodes alone."""
        self._open[step_id] = _Step(num_rows, kind, estimate_s, fixed_share, is_active=True)

    def wake(self, step_id: int) -> None:
        """Drafts promise much: they may be tried now, with a smaller stake than in their turn."""
        self.wakes, self.credit, self._paid_id = step_id, _TEMPTED_STAKE, step_id

    def forget(self, step_id: int) -> None:
        """A step turns out to be another one."""
        self._open.pop(step_id, None)

    @property
    def is_watching(self) -> bool:
        """Whether something is to be learned of the next outcomes."""
        return bool(self._open) or self._was_active

    def pass_by(self, step_id: int, now: float) -> None:
        """A step was taken in of which nothing is to be learned."""
        self._last_id, self._last_s = step_id, now

    @property
    def has_earned(self) -> bool:
        """Whether drafts have brought more than they took, beyond what the first try was given."""
        return self.credit > _FIRST_STAKE + _LEAST_STAKE

    def settle(
        self, step_id: int, num_rows: int, gain: Gain, now: float, took: Drafting = NO_DRAFTING
    ) -> float | None:
        """A step was taken in, with what a model's drafting took of it. Returns what the rest took
        longer than without drafts, where those were looked for and that can be told."""
        self._invested_s += took.read_s
        step = taken(self._open, step_id)
        cycle_s = now - self._last_s if self._last_id == step_id - 1 else 0.0
        was_active, self._was_active = self._was_active, step is not None and step.is_active
        self._last_id, self._last_s = step_id, now
        if step is None or cycle_s <= 0.0 or step.num_rows != num_rows:
            self._spend(step_id, took.pass_s)
            return None
        pace = self._pace(num_rows, step.kind)
        if not (step.is_active or was_active):
            pace.learn(cycle_s / step.estimate_s)
            return None
        if not pace.num_measured:
            self._spend(step_id, took.pass_s)
            return None
        expected_s = self.step_s = pace.ratio * step.estimate_s
        bound = _LEAST_BOUND
        if gain is not NO_GAIN:
            bound = max(bound, _MOST_OFF * self._active_ratio)
        # what a model took is known, so none of it is an interruption
        ratio = min(max(cycle_s - took.seconds, 0.0) / expected_s, bound)
        if gain is not NO_GAIN:
            self._active_ratio += _ACTIVE_RATE * (max(1.0, ratio) - self._active_ratio)
        saved = (1.0 - step.fixed_share) * gain.num_tokens / num_rows
        saved += step.fixed_share * gain.least
        due_s = self._invested_s / _PAYBACK_STEPS
        self._invested_s -= due_s
        lost = ratio - 1.0 + (took.pass_s + due_s) / expected_s
        self._account(step_id, saved - lost, has_saved=saved > 0.0)
        return (ratio - 1.0) * expected_s if step.is_active else None

    def _spend(self, step_id: int, seconds: float) -> None:
        """A model drafted in a step that cannot be compared, such as one with a prompt."""
        if seconds and self.step_s:
            self._account(step_id, -seconds / self.step_s, has_saved=False)

    def _account(self, step_id: int, earned: float, *, has_saved: bool) -> None:
        paid = _SHARE * min(step_id - self._paid_id, _PLAIN_EVERY)
        self._paid_id = step_id
        # no step takes less time for the drafts that it does not have: what looks like it is an
        # error of the plain steps' pace, and sums of it must not pay for drafts
        most = _MAX_CREDIT if has_saved else max(self.credit, _FIRST_STAKE)
        self.credit = min(self.credit + paid + earned, most)
        if self.credit >= _MAX_CREDIT:
            self._stake = _LEAST_STAKE
        if self.credit <= 0.0 and step_id >= self.wakes:
            left = self._invested_s / self.step_s if self.step_s else 0.0
            self._invested_s = 0.0  # it will not be earned back
            self.wakes = step_id + 2 + int((self._stake - self.credit + left) / _SHARE)
            self._paces.clear()  # the machine may be another one by then
            self.credit, self._paid_id = self._stake, self.wakes
            self._stake = min(2.0 * self._stake, _MAX_STAKE)

    def _pace(self, num_rows: int, kind: int) -> _Pace:
        key = (int(4.0 * log2(num_rows)), kind)
        found = self._paces.get(key)
        if found is None:
            found = self._paces[key] = _Pace()
        return found
