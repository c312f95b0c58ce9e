"""Waiting for grammars: nobody runs before its form is ready, nobody else waits,
and nobody waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from quire.core.grammars import GRAMMARS, Grammar, GrammarVerdict
from quire.core.plan import Record, RowSampling, StepPlan, StepResult
from quire.core.request import FinishReason, Request
from quire.core.scheduler import grammars
from quire.core.scheduler.grammars import CompiledGrammars

WORD, NUMBER = Grammar("regex", "[a-z]+"), Grammar("regex", "[0-9]+")
Spoil = Callable[[StepPlan, StepResult], StepResult]


class Silent:
    """A companion that takes orders and answers none:
    what becomes of grammars is each test's to say."""

    name = GRAMMARS

    def begin(self, plan: StepPlan) -> None:
        pass

    def take_news(self, wait_s: float) -> tuple[Record, ...]:
        return ()

    def close(self) -> None:
        pass


@pytest.fixture
def run(harness: Any) -> Any:
    return harness(prerequisites=[CompiledGrammars()], companions=[Silent()])


def ordered(plan: StepPlan) -> tuple[Record, ...]:
    return plan.orders.get(GRAMMARS, ())


def formed(grammar: Grammar, **changes: Any) -> RowSampling:
    return RowSampling(temperature=0.0, grammar=grammar, **changes)


def verdicts(*given: GrammarVerdict) -> Spoil:
    """Steps whose result says this of grammars."""
    return lambda plan, result: replace(result, news={GRAMMARS: given})


def names(plan: StepPlan) -> set[str]:
    return {row.name for row in plan.new_rows}


def test_a_grammar_is_asked_for_once_and_others_go_first(run: Any) -> None:
    for name in ("a", "b"):
        run.add(name, 5, sampling=formed(WORD))
    run.add("plain", 5)
    plan = run.step(verdicts())
    assert ordered(plan) == (WORD,) and names(plan) == {"plain"} and run.scheduler.num_waiting == 2
    plan = run.step(verdicts())
    assert ordered(plan) == () and names(plan) == set()
    run.step(verdicts(GrammarVerdict(WORD)))
    assert names(run.step(verdicts())) == {"a", "b"}
    run.add("c", 5, sampling=formed(WORD))
    plan = run.step(verdicts())
    assert names(plan) == {"c"} and ordered(plan) == ()
    run.run()


def test_a_step_without_work_is_one_that_waits(run: Any) -> None:
    run.add("a", 5, sampling=formed(WORD))
    for _ in range(3):
        assert run.step(verdicts()).work == ()
    run.step(verdicts(GrammarVerdict(WORD)))
    assert names(run.step()) == {"a"}
    run.run()


def test_what_lost_steps_have_ordered_is_ordered_again(run: Any) -> None:
    run.add("a", 5, sampling=formed(WORD))
    assert ordered(run.scheduler.schedule(0.0)) == (WORD,)
    run.scheduler.lose_flights()
    assert ordered(run.step(verdicts())) == (WORD,)
    run.step(verdicts(GrammarVerdict(WORD)))
    assert names(run.step(verdicts())) == {"a"}


def _error(request: Request) -> str:
    (sequence,) = request.sequences
    assert sequence.finish_reason is FinishReason.ERROR and request.error is not None
    return request.error


def test_a_grammar_that_cannot_be_compiled_ends_who_waits_for_it(run: Any) -> None:
    bad = [run.add(name, 5, sampling=formed(WORD)) for name in ("a", "b")]
    good = run.add("c", 5, sampling=formed(NUMBER))
    run.step(verdicts())
    run.step(verdicts(GrammarVerdict(WORD, "no good"), GrammarVerdict(NUMBER)))
    assert all("no good" in _error(request) for request in bad)
    assert {each.sequence.request.request_id for each in run.progress if each.token_id is None} == {
        "a",
        "b",
    }
    run.run()
    run.check(good)
    again = run.add("d", 5, sampling=formed(WORD))
    assert ordered(run.step(verdicts())) == (WORD,)
    run.step(verdicts(GrammarVerdict(WORD, "still no good")))
    assert "still no good" in _error(again)


def test_nobody_waits_for_ever(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_WAIT_S", 5.0)
    request = run.add("a", 5, sampling=formed(WORD))
    for _ in range(7):
        run.step(verdicts())
    assert "not compiled within" in _error(request) and not run.scheduler.has_work
    run.step(verdicts(GrammarVerdict(WORD)))  # too late, and harmless


def test_who_waits_can_be_aborted(run: Any) -> None:
    run.add("a", 5, sampling=formed(WORD))
    run.add("b", 5, sampling=formed(WORD))
    run.step(verdicts())
    run.scheduler.abort("a")
    assert run.scheduler.num_waiting == 1
    run.step(verdicts(GrammarVerdict(WORD)))
    run.run()


def test_sequences_that_fork_or_are_preempted_need_not_wait_again(run: Any) -> None:
    request = run.add("a", 5, max_tokens=12, sampling=formed(WORD, seed=4), num_sequences=3)
    run.step(verdicts(GrammarVerdict(WORD)))
    for _ in range(3):
        run.step(verdicts())
    run.scheduler.preempt_all()
    assert len(names(run.step(verdicts()))) == 3
    run.run()
    run.check(request)


def test_what_counts_as_ready_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_READY", 4)
    compiled = CompiledGrammars()
    for number in range(50):
        compiled.take_news((GrammarVerdict(Grammar("regex", str(number))),), 0.0)
    assert len(compiled._ready) == 4 and not compiled.parked()
