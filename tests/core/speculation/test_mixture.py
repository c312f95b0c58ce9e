"""Of several drafters, the one that is right most often is taken, and a model that is not worth its
time is left alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.config.limits import SchedulerLimits
from quire.core.request import Sequence
from quire.core.request_spec import RequestSpec
from quire.core.scheduler.scheduler import Scheduler
from quire.core.speculation.drafters import NO_DRAFT, Draft, Drafter
from quire.core.speculation.lookup import OutputMemory, RecallDrafter
from quire.core.speculation.mixture import BestOf, ModelWorth


class Next:
    """Drafts the numbers that follow the last one, or a step further off."""

    def __init__(self, step: int, strength: int = 1) -> None:
        self._step, self._strength, self.ended = step, strength, list[Sequence]()

    def draft(self, sequence: Sequence, most: int) -> Draft:
        last = sequence.token_ids[-1]
        return Draft([last + self._step * (place + 1) for place in range(most)], self._strength)

    def end(self, sequence: Sequence) -> None:
        self.ended.append(sequence)


@pytest.fixture
def sequence() -> Iterator[Sequence]:
    scheduler = Scheduler(SchedulerLimits(64))
    yield _new(scheduler, (1, 2, 3))


def _new(scheduler: Scheduler, prompt: tuple[int, ...], tenant: str = "") -> Sequence:
    name = f"r{len(scheduler.requests)}"
    spec = RequestSpec(request_id=name, prompt_token_ids=prompt, max_tokens=999, tenant=tenant)
    return scheduler.add(spec).sequences[0]


def _follow(drafts: BestOf, sequence: Sequence, step: int, count: int) -> list[int]:
    """Let a text go on in steps of so much; returns the first token of each draft."""
    found = []
    for _ in range(count):
        draft = drafts.draft(sequence, 4)
        found.append(draft.token_ids[0] - sequence.token_ids[-1])
        sequence.token_ids.append(sequence.token_ids[-1] + step)
    return found


def test_the_source_that_is_right_is_taken_and_the_other_once_that_is(sequence: Sequence) -> None:
    drafts = BestOf([Next(1, 16), Next(2, 1)])
    first = _follow(drafts, sequence, 2, 60)
    assert first[0] == 1, "more speaks for it at first"
    assert first[20:] == [2] * 40
    assert _follow(drafts, sequence, 1, 90)[60:] == [1] * 30


def test_a_new_sequence_begins_with_what_the_others_have_shown(sequence: Sequence) -> None:
    drafts = BestOf([Next(1, 16), Next(2, 1)])
    _follow(drafts, sequence, 2, 60)
    other = _new(Scheduler(SchedulerLimits(64)), (4, 5))
    assert _follow(drafts, other, 2, 1) == [2]


def test_sources_without_a_draft_stand_back_and_all_hear_of_ends(sequence: Sequence) -> None:
    class Silent(Next):
        def draft(self, sequence: Sequence, most: int) -> Draft:
            return NO_DRAFT

    sources = [Silent(1), Next(2)]
    drafts: Drafter = BestOf(sources)
    assert drafts.draft(sequence, 3).token_ids[:1] == [5]
    drafts.end(sequence)
    assert [each.ended for each in sources] == [[sequence]] * 2


def test_what_one_source_has_saved_is_counted(sequence: Sequence) -> None:
    drafts = BestOf([Next(1, 16), Next(2, 1)], counted=1)
    _follow(drafts, sequence, 2, 60)
    assert drafts.take_gained() == 0, "nothing was accepted by a step"
    sequence.request.metrics.num_accepted_tokens += 3
    drafts.draft(sequence, 4)
    assert (drafts.take_gained(), drafts.take_gained()) == (3, 0)


@pytest.mark.parametrize("num_gained", [0, 2])
def test_a_model_rests_where_it_takes_more_than_it_brings(
    sequence: Sequence, num_gained: int
) -> None:
    drafts = BestOf([Next(1)], counted=0)
    worth = ModelWorth(drafts)
    num_drafted = 0
    for step_id in range(4000):
        drafts.draft(sequence, 1)
        sequence.request.metrics.num_accepted_tokens += num_gained
        is_drafted = worth.may_draft(step_id)
        worth.count(step_id, 2, 0.5 * is_drafted)
        num_drafted += is_drafted
    assert num_drafted == 4000 if num_gained else 10 < num_drafted < 100


def test_remembered_outputs_are_recalled_by_their_tenant_alone() -> None:
    scheduler = Scheduler(SchedulerLimits(64))
    drafter = RecallDrafter(OutputMemory())
    first = _new(scheduler, (1, 2), "a")
    assert drafter.draft(first, 4) == NO_DRAFT
    first.token_ids += [5, 6, 7, 8, 9, 10, 11]
    assert drafter.draft(first, 4) == NO_DRAFT, "its own text is another drafter's"
    drafter.end(first)
    other, stranger = _new(scheduler, (3, 5, 6), "a"), _new(scheduler, (3, 5, 6), "b")
    assert drafter.draft(other, 2).token_ids == [7, 8]
    assert drafter.draft(stranger, 2) == NO_DRAFT
    other.token_ids += [7, 8]
    assert drafter.draft(other, 3) == Draft([9, 10, 11], 4)
