"""Several drafters at once: for each sequence and step the draft that promises most.

Every source's drafts are compared with what came, taken or not, so each is known by how often it is
right, for the sequence and for all. A draft's strengths are then these chances, in equal parts: the
speculator, which counts them once more, need not know whose they are. A model among the sources
takes time whether its drafts are chosen or not; whether those that are chosen are worth it is
counted apart (`ModelWorth`), and ends its drafting alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Several

from quire.core.drafts import NUM_DEGREES, strength_of_degree
from quire.core.request import Sequence
from quire.core.speculation.acceptance import Acceptance
from quire.core.speculation.drafters import NO_DRAFT, Draft, Drafter

_LEAST_CHANCE = 0.02
"""Where all of a draft is right with less, the rest of it counts for nothing."""


class _Contest:
    """What each source drafted last for a sequence, and how often it is right."""

    __slots__ = ("acceptances", "chosen", "drafts", "num_accepted", "num_known")

    def __init__(self, shared: Several[Acceptance]) -> None:
        self.acceptances = [Acceptance(each) for each in shared]
        self.drafts = [NO_DRAFT] * len(shared)
        self.num_known = self.num_accepted = 0
        self.chosen = -1


class BestOf:
    """Implements `Drafter`."""

    def __init__(self, sources: Several[Drafter], counted: int = -1) -> None:
        """Of one of the sources, at the place `counted`, the tokens gained by it are counted."""
        self._sources, self._counted = tuple(sources), counted
        self._shared = [Acceptance() for _ in sources]
        self._contests: dict[Sequence, _Contest] = {}
        self._num_gained = 0

    def draft(self, sequence: Sequence, most: int) -> Draft:
        """See `Drafter.draft`."""
        contest = self._contests.get(sequence)
        if contest is None:
            contest = self._contests[sequence] = _Contest(self._shared)
        self._learn(contest, sequence)
        best, best_chances = NO_DRAFT, list[float]()
        contest.chosen = -1
        for place, source in enumerate(self._sources):
            draft = contest.drafts[place] = source.draft(sequence, most)
            chances = _chances(draft, contest.acceptances[place])
            if _promise(chances) > _promise(best_chances):
                best, best_chances, contest.chosen = draft, chances, place
        contest.num_known = len(sequence.token_ids)
        kept = len(best_chances)
        degrees = (min(int(chance * NUM_DEGREES), NUM_DEGREES - 1) for chance in best_chances)
        return Draft(best.token_ids[:kept], strengths=tuple(map(strength_of_degree, degrees)))

    def end(self, sequence: Sequence) -> None:
        """See `Drafter.end`."""
        contest = self._contests.pop(sequence, None)
        if contest is not None:
            self._learn(contest, sequence)
        for source in self._sources:
            source.end(sequence)

    def take_gained(self) -> int:
        """Return the tokens that the counted source's drafts have saved since the last call."""
        found, self._num_gained = self._num_gained, 0
        return found

    def _learn(self, contest: _Contest, sequence: Sequence) -> None:
        """Compare what was drafted with what came."""
        came = sequence.token_ids[contest.num_known :]
        for place, draft in enumerate(contest.drafts):
            for number, (token_id, other) in enumerate(zip(draft.token_ids, came, strict=False)):
                is_right = token_id == other
                contest.acceptances[place].count(draft.strength_of(number), is_right)
                if not is_right:
                    break
            contest.drafts[place] = NO_DRAFT
        num_accepted = sequence.request.metrics.num_accepted_tokens
        if contest.chosen == self._counted:
            self._num_gained += num_accepted - contest.num_accepted
        contest.num_accepted, contest.chosen = num_accepted, -1


class ModelWorth:
    """Whether a model's drafts are worth what drafting them takes, beside other sources."""

    _STAKE, _FADE = 4.0, 63 / 64
    """Steps that it may be behind; what was gained or lost before the last hundred counts less."""
    _REST, _MAX_REST = 512, 8192
    """Steps without its drafts, twice as many each time."""

    def __init__(self, drafts: BestOf) -> None:
        self._drafts = drafts
        self._balance = 0.0
        self._rest = self._REST
        self._wakes = 0

    def may_draft(self, step_id: int) -> bool:
        """Whether it is to draft in this step."""
        return step_id >= self._wakes

    def count(self, step_id: int, num_rows: int, num_taken: float) -> None:
        """A step of so many rows was taken in, and the model took as long as so many steps."""
        earned = self._drafts.take_gained() / num_rows
        if step_id < self._wakes:
            return
        self._balance = min(self._FADE * self._balance + earned - num_taken, self._STAKE)
        if self._balance >= self._STAKE:
            self._rest = self._REST
        elif self._balance < -self._STAKE:
            self._balance, self._wakes = 0.0, step_id + self._rest
            self._rest = min(2 * self._rest, self._MAX_REST)


def _chances(draft: Draft, acceptance: Acceptance) -> list[float]:
    """Of each token, given those before it, up to where it hardly matters."""
    found, chance = list[float](), 1.0
    for place in range(len(draft.token_ids)):
        found.append(acceptance.chance(draft.strength_of(place)))
        chance *= found[-1]
        if chance < _LEAST_CHANCE:
            break
    return found


def _promise(chances: list[float]) -> float:
    """Tokens that are expected to be right."""
    total, chance = 0.0, 1.0
    for each in chances:
        chance *= each
        total += chance
    return total
