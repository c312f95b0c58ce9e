"""How many guesses are taken, and what drafters that look back guess."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from quire.config.limits import SchedulerLimits
from quire.core.drafts import FORCED, MODELLED, Drafted, DraftOrder
from quire.core.grammars import Grammar
from quire.core.plan import Record, RowSampling, StepPlan, Verify
from quire.core.request import Sequence
from quire.core.request_spec import BeamSettings, RequestSpec
from quire.core.scheduler.audit import audit, audit_plan
from quire.core.scheduler.scheduler import Scheduler
from quire.core.speculation import lookup
from quire.core.speculation.acceptance import Acceptance
from quire.core.speculation.account import NO_DRAFTING, Drafting
from quire.core.speculation.drafters import NO_DRAFT, Draft
from quire.core.speculation.lookup import LookupDrafter, OutputMemory
from quire.core.speculation.speculator import Speculator
from quire.core.speculation.standing import StandingOrders
from quire.core.step_cost import StepCostModel, UnitCosts
from quire.executor.null import NullExecutor

WEIGHTS_BOUND = UnitCosts(10e-3, 1e-3, 0.2e-3, 0.01e-3, 1e-9, 1e-9)
ARITHMETIC_BOUND = UnitCosts(1e-6, 1e-6, 2e-3, 0.01e-3, 1e-9, 1e-9)


class Fixed:
    """Guesses the same token again and again."""

    def __init__(self, token_id: int, count: int = 8) -> None:
        self._draft = Draft([token_id] * count, 1)
        self.num_asked = 0

    def draft(self, sequence: Sequence, most: int) -> Draft:
        self.num_asked += 1
        return self._draft._replace(token_ids=self._draft.token_ids[:most])

    def end(self, sequence: Sequence) -> None:
        pass


class Clock:
    """What steps take: a time, and more for each row with guesses and for each guessed token."""

    def __init__(self, plain_s: float, run_s: float, token_s: float) -> None:
        self._plain_s, self._run_s, self._token_s = plain_s, run_s, token_s
        self.now = 0.0
        """What all steps took."""

    @property
    def wall_s(self) -> float:
        """What a clock on the wall shows."""
        return self.now

    def take(self, sizes: list[int]) -> None:
        self.now += self._plain_s + self._run_s * sum(map(bool, sizes))
        self.now += self._token_s * sum(sizes)


def _run(
    look_ahead: Speculator,
    sampled: Callable[[int], int],
    num_requests: int = 1,
    clock: Clock | None = None,
    **spec: object,
) -> list[list[int]]:
    """Sizes of all guesses, step by step, where the model samples what `sampled` says by position."""
    num_blocks = 256 if clock is None else 20_000
    limits = SchedulerLimits(
        num_blocks=num_blocks, block_size=4, max_num_seqs=64, max_model_len=4200
    )
    scheduler = Scheduler(limits, look_ahead=look_ahead)
    executor = NullExecutor(64, num_blocks, 4, script=lambda name, position: sampled(position))
    for number in range(num_requests):
        given = {"prompt_token_ids": (1, 2, 3), "max_tokens": 60, **spec}
        scheduler.add(RequestSpec(request_id=f"r{number}", **given))  # type: ignore[arg-type]
    sizes = []
    while scheduler.has_work:
        plan = scheduler.schedule(0.0)
        if clock is None:
            audit_plan(scheduler, plan)
        sizes.append([work.num_ahead for work in plan.work])
        if clock is not None:
            clock.take(sizes[-1])
        scheduler.update(plan, executor.execute(plan), 0.0 if clock is None else clock.wall_s)
        if clock is None:
            audit(scheduler)
    return sizes


def _sizes(costs: UnitCosts, token_id: int, num_requests: int = 1) -> list[list[int]]:
    speculator = Speculator(Fixed(token_id), 8, costs=StepCostModel(costs))
    clock = Clock(costs.step_s + costs.head_s + num_requests * costs.token_s, 0.0, costs.token_s)
    return _run(speculator, lambda position: 7, num_requests, clock)


def test_guesses_that_are_right_grow_longer() -> None:
    sizes = [size for step in _sizes(WEIGHTS_BOUND, 7) for size in step]
    assert max(sizes[-4:-1]) >= 6 and sizes[0] < 6
    assert len(sizes) < 25, "60 tokens"


def test_guesses_that_are_wrong_end() -> None:
    sizes = [size for step in _sizes(WEIGHTS_BOUND, 8) for size in step]
    assert sizes[0] == 0, "what it costs cannot be told from the prompt's share of the step"
    assert any(sizes)
    assert sum(sizes[25:]) == 0 and sum(sizes) < 40


def test_no_drafter_is_called_where_a_step_is_bound_by_arithmetic() -> None:
    drafter = Fixed(7)
    speculator = Speculator(drafter, 8, costs=StepCostModel(ARITHMETIC_BOUND))
    sizes = _run(speculator, lambda position: 7, 32)
    assert drafter.num_asked == 0
    assert not any(map(sum, sizes))


SHORT = UnitCosts(2e-4, 2e-5, 1e-5, 1e-5, 1e-9, 1e-9)


@pytest.mark.slow_except("0.3-1", "1.0-4")
@pytest.mark.parametrize("num_requests", [1, 4, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("chance", [0.0, 0.3, 1.0])
def test_guesses_that_cost_more_than_estimated_cost_next_to_nothing(
    num_requests: int, chance: float
) -> None:
    """Estimates say that they pay, steps say that they do not."""
    speculator = Speculator(Fixed(7), 4, costs=StepCostModel(SHORT))
    rng, clock = random.Random(num_requests), Clock(3e-4, 2e-3 / num_requests, 0.0)
    right = [7 if rng.random() < chance else 8 for _ in range(4010)]
    sizes = _run(speculator, right.__getitem__, num_requests, clock, max_tokens=4000)
    num_lost = clock.now / 3e-4 - 4000
    assert any(map(sum, sizes)) or chance < 1.0
    assert num_lost < 0.02 * 4000


@pytest.mark.parametrize("num_requests", [1, 4, 16])
def test_a_first_answer_that_is_short_pays_next_to_nothing_for_trying(num_requests: int) -> None:
    """Of an engine that has learned nothing yet, where drafts are wrong and cost a step each."""
    speculator = Speculator(Fixed(7), 4, costs=StepCostModel(SHORT))
    clock = Clock(3e-4, 3e-4 / num_requests, 0.0)
    sizes = _run(speculator, lambda position: 8, num_requests, clock, max_tokens=160)
    assert any(map(sum, sizes)) or num_requests > 1
    assert clock.now / 3e-4 - 160 <= 0.02 * 160


def test_a_text_that_is_known_is_drafted_though_others_were_not() -> None:
    """What speaks for a draft is known by itself: little for those that were wrong, much for those
    that come now."""

    class Known(Fixed):
        def draft(self, sequence: Sequence, most: int) -> Draft:
            found = super().draft(sequence, most)
            return found._replace(strength=40 if len(sequence.token_ids) > 330 else 1)

    def run(end: int) -> tuple[int, float]:
        speculator = Speculator(Known(7), 8, costs=StepCostModel(SHORT))
        clock = Clock(3e-4, 6e-4, 1e-5)
        sizes = _run(speculator, lambda at: 7 if at > 330 else 8, 1, clock, max_tokens=end)
        return len(sizes), clock.now / 3e-4

    num_steps, lost = run(320)
    assert num_steps >= 315 and lost < 1.02 * 320, "they did not pay"
    assert run(920)[0] - num_steps < 260, "600 tokens that are known"


def test_guesses_that_pay_go_on() -> None:
    speculator = Speculator(Fixed(7), 4, costs=StepCostModel(SHORT))
    clock = Clock(3e-4, 5e-5, 1e-5)
    _run(speculator, lambda position: 7, 4, clock, max_tokens=4000)
    assert clock.now < 0.5 * 4000 * 3e-4


def test_nothing_is_kept_of_steps_that_were_lost() -> None:
    speculator = Speculator(Fixed(7), 8, costs=StepCostModel(WEIGHTS_BOUND))
    scheduler = Scheduler(SchedulerLimits(num_blocks=256, block_size=4), look_ahead=speculator)
    executor = NullExecutor(64, 256, 4, script=lambda name, position: 7)
    clock, num_lost = Clock(12e-3, 0.0, 1e-3), 0
    for number in range(20):
        spec = RequestSpec(request_id=f"r{number}", prompt_token_ids=(1, 2, 3), max_tokens=40)
        scheduler.add(spec)
        while scheduler.has_work:
            plan = scheduler.schedule(clock.wall_s)
            sizes = [work.num_ahead for work in plan.work]
            is_decode = all(work.start > 3 for work in plan.work)
            if any(sizes) and is_decode and num_lost <= number:
                scheduler.lose_flights()
                num_lost += 1
                continue
            clock.take(sizes)
            scheduler.update(plan, executor.execute(plan), clock.wall_s)
    assert num_lost == 20
    held = (speculator._runs, speculator._overhead._runs, speculator._account._open)
    assert all(len(each) <= 8 for each in held)


@pytest.mark.slow
@pytest.mark.parametrize("every", [100, 193, 7])
def test_pauses_cost_next_to_nothing(every: int) -> None:
    """Of a machine that sleeps, or an engine that is paused, for an hour amid requests."""

    class Sleepy(Clock):
        num_steps, slept_s = 0, 0.0

        def take(self, sizes: list[int]) -> None:
            super().take(sizes)
            self.num_steps += 1
            self.slept_s += 3600.0 * (self.num_steps % every == 0)

        @property
        def wall_s(self) -> float:
            return self.now + self.slept_s

    speculator = Speculator(Fixed(7), 4, costs=StepCostModel(SHORT))
    clock = Sleepy(3e-4, 5e-4, 0.0)
    _run(speculator, lambda position: 8, 4, clock, max_tokens=4000)
    assert clock.now / 3e-4 - 4000 < 0.02 * 4000, "drafts that are wrong end"
    paying = Sleepy(3e-4, 5e-5, 1e-5)
    speculator = Speculator(Fixed(7), 4, costs=StepCostModel(SHORT))
    _run(speculator, lambda position: 7, 4, paying, max_tokens=4000)
    assert paying.now < 0.5 * 4000 * 3e-4, "and those that are right go on"


def test_a_sequence_without_a_guess_is_looked_at_now_and_then() -> None:
    drafter = Fixed(7, 0)
    speculator = Speculator(drafter, 8, costs=StepCostModel(SHORT))
    _run(speculator, lambda position: 7, 1, Clock(3e-4, 0.0, 0.0), max_tokens=600)
    assert 0 < drafter.num_asked < 600 / 24


def test_a_guess_ends_where_the_answer_has_to() -> None:
    """The last token is sampled and never computed: so many guesses are of no use."""
    sizes = _run(Speculator(Fixed(7), 8), lambda position: 7, max_tokens=6)
    assert sizes == [[5]]


def test_beams_and_processors_go_without_guesses(caplog: pytest.LogCaptureFixture) -> None:
    sampling = RowSampling(processors=("p",))
    assert not any(map(sum, _run(Speculator(Fixed(7), 8), lambda place: 7, sampling=sampling)))
    scheduler = Scheduler(SchedulerLimits(64), look_ahead=Speculator(Fixed(7), 8))
    executor = NullExecutor(256, 64, 16)
    for name in ("a", "b"):
        beam = BeamSettings(2)
        scheduler.add(
            RequestSpec(request_id=name, prompt_token_ids=(1, 2), max_tokens=5, beam=beam)
        )
    while scheduler.has_work:
        plan = scheduler.schedule(0.0)
        assert not any(work.num_ahead for work in plan.work)
        scheduler.update(plan, executor.execute(plan), 0.0)
    assert caplog.text.count("beam search") == 1


class Silent:
    """Takes orders, and drafts nothing."""

    name = FORCED

    def begin(self, plan: StepPlan) -> None:
        pass

    def take_news(self, wait_s: float) -> tuple[Record, ...]:
        return ()

    def close(self) -> None:
        pass


def test_what_is_ordered_for_a_sequence_ends_with_it() -> None:
    """Also where it ends before its first token is sampled."""
    orders = StandingOrders(FORCED, 4)
    limits = SchedulerLimits(64, max_num_seqs=4, max_num_batched_tokens=16)
    scheduler = Scheduler(limits, look_ahead=Speculator(None, 4, forced=orders))
    sampling = RowSampling(grammar=Grammar("regex", "a+"))
    executor = NullExecutor(256, 64, 16, companions=[Silent()])
    scheduler.add(
        RequestSpec(request_id="long", prompt_token_ids=(1,) * 40, max_tokens=4, sampling=sampling)
    )
    plan = scheduler.schedule(0.0)
    row = plan.new_rows[0].row
    assert plan.orders == {FORCED: (DraftOrder(row, 4),)}
    scheduler.update(plan, executor.execute(plan), 0.0)
    scheduler.abort("long")
    assert not orders.take({FORCED: (Drafted(row, 41, (7,), (1,)),)})


def test_chances_follow_what_was_counted() -> None:
    everyone = Acceptance()
    one, other = Acceptance(everyone), Acceptance(everyone)
    before, of_others = one.chance(4), one.chance(1)
    for _ in range(40):
        one.count(4, True)
    assert before < other.chance(4) < one.chance(4) < 1.0
    assert one.chance(1) == of_others, "other strengths are counted apart"
    for _ in range(40):
        one.count(4, False)
    assert 0.0 < one.chance(4) < 0.3


def _sequence(scheduler: Scheduler, prompt: tuple[int, ...], tenant: str = "") -> Sequence:
    name = f"r{len(scheduler.requests)}"
    spec = RequestSpec(request_id=name, prompt_token_ids=prompt, max_tokens=99, tenant=tenant)
    return scheduler.add(spec).sequences[0]


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler(SchedulerLimits(64))


def test_a_text_goes_on_as_it_did_before(scheduler: Scheduler) -> None:
    drafter = LookupDrafter()
    sequence = _sequence(scheduler, (1, 2, 3, 4, 5, 6, 1, 2, 3))
    assert drafter.draft(sequence, 3) == Draft([4, 5, 6], 3)
    sequence.token_ids += [4, 9]
    assert drafter.draft(sequence, 3) == NO_DRAFT
    sequence.token_ids += [8, 9, 8, 9]
    assert drafter.draft(sequence, 6) == Draft([8, 9, 8, 9, 8, 9], 3), "beyond its end"


def test_outputs_are_remembered_for_their_tenant_alone(scheduler: Scheduler) -> None:
    drafter = LookupDrafter(memory=OutputMemory())
    first = _sequence(scheduler, (1, 2), "a")
    drafter.draft(first, 4)
    first.token_ids += [5, 6, 7, 8, 9]
    drafter.end(first)
    for tenant, expected in (("a", Draft([7, 8, 9], 2)), ("b", NO_DRAFT)):
        sequence = _sequence(scheduler, (3, 5, 6), tenant)
        assert drafter.draft(sequence, 4) == expected


def test_memory_is_bounded(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = OutputMemory(max_tokens=100, max_outputs=5)
    for number in range(50):
        for tenant in ("a", "b", "c"):
            memory.add((tenant, ()), [number] * (number % 20))
        held = {tenant: memory.of((tenant, ())) for tenant in ("a", "b", "c")}
        assert sum(len(text) for text in held.values() if text is not None) <= 100 + 26
    monkeypatch.setattr(lookup, "MAX_FOLLOWED_TOKENS", 10)
    drafter = LookupDrafter()
    one, other = _sequence(scheduler, (1,) * 11), _sequence(scheduler, (1,) * 11)
    assert drafter.draft(one, 1).token_ids == [1]
    assert not drafter.draft(other, 1).token_ids, "there is no room to follow it"
    drafter.end(one)
    assert drafter.draft(other, 1).token_ids == [1]


def test_a_long_text_is_read_piece_by_piece(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "MAX_READ", 8)
    monkeypatch.setattr(lookup, "MAX_SEQUENCE_TOKENS", 16)
    drafter = LookupDrafter()
    sequence = _sequence(scheduler, tuple(range(40)) * 2)
    for _ in range(200):  # it begins anew whenever it is full, with the last 16 tokens
        sequence.token_ids.append(sequence.token_ids[-3])
        drafter.draft(sequence, 2)
    assert drafter.draft(sequence, 2).token_ids == sequence.token_ids[-3:-1]


def test_a_verified_run_says_how_many_tokens_it_wants() -> None:
    assert Verify((1, 2, 3)).num_wanted(10) == 4


def test_orders_lapse_with_their_rows_and_drafting_takes_time() -> None:
    scheduler = Scheduler(SchedulerLimits(num_blocks=32))
    request = scheduler.add(RequestSpec(request_id="a", prompt_token_ids=(1, 2), max_tokens=9))
    scheduler.schedule(0.0)
    (sequence,) = request.sequences
    orders, row = StandingOrders(MODELLED, 4), request.sequences[0].row
    orders.order(sequence, is_entering=False)
    assert orders.take_orders() == {MODELLED: (DraftOrder(row, 4),)}
    news = {
        MODELLED: (Drafted(row, 2, (7, 8), (1, 2), 0.5, 0.125, 25), Drafted(row + 1, 2, (), ()))
    }
    assert orders.take(news) == [sequence]
    assert orders.took == Drafting(0.375, 0.125) and orders.read_token_s == 0.125 / 25
    assert list(orders.draft(sequence, 4).token_ids) == [7, 8]
    orders.lapse({row})
    assert not orders.draft(sequence, 4).token_ids
    assert not orders.take(news) and not orders.take({})
    assert orders.took is NO_DRAFTING
    orders.order(sequence, is_entering=False)
    assert orders.take_orders() == {MODELLED: (DraftOrder(row, 4),)}
