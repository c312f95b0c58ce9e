"""Who is given to a new engine, and who is found guilty: without engines, by what they would do."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.config.engine import EngineConfig
from quire.core.params import SamplingParams
from quire.engine.assembly.preparation import prepare_model
from quire.engine.front.prompts import ParsedPrompt
from quire.engine.front.requests import RequestBuilder
from quire.engine.process.journal import JournalEntry
from quire.engine.process.quarantine import MIN_DELIVERED, choose, judge


@pytest.fixture
def entries(tiny_config: Path) -> list[JournalEntry]:
    options = {"load_format": "dummy", "kv_cache_memory": "512KiB"}
    prepared = prepare_model(EngineConfig(model=str(tiny_config), **options))  # type: ignore[arg-type]
    requests = RequestBuilder(prepared.planned.plan, prepared.tokenizer, prepared.eos_token_ids)
    digest = requests.digest(SamplingParams())
    return [
        JournalEntry(number, requests.sampling(str(number), ParsedPrompt(None, [3]), digest))
        for number in range(8)
    ]


def _run_engine(entries: list[JournalEntry], poisonous: set[int]) -> JournalEntry | None:
    """One engine: it takes what is chosen, everyone gains, until a poisonous request is let in;
    then it dies."""
    for _ in range(100):
        chosen = choose(entries)
        if not chosen:
            return None
        for entry in chosen:
            entry.is_sent = True
        if any(entry.number in poisonous for entry in chosen):
            convicted = judge(entries)
            for entry in entries:
                entry.leave_engine()
            return convicted
        for entry in entries:
            if entry.is_sent:
                entry.num_delivered += MIN_DELIVERED
    raise AssertionError("never settled")


@pytest.mark.parametrize("guilty", [{0}, {3}, {7}, {2, 5}])
def test_the_guilty_are_found_and_nobody_else(
    entries: list[JournalEntry], guilty: set[int]
) -> None:
    found: set[int] = set()
    for _ in range(4 * len(guilty) + 2):
        convicted = _run_engine(entries, guilty - found)
        if convicted is not None:
            found.add(convicted.number)
            entries.remove(convicted)
    assert found == guilty
    assert all(entry.is_sent for entry in entries), "everyone else runs"


def test_who_makes_progress_is_never_suspected(entries: list[JournalEntry]) -> None:
    for _ in range(10):
        for entry in choose(entries):
            entry.is_sent = True
            entry.num_delivered = MIN_DELIVERED
        assert judge(entries) is None
        assert all(entry.num_fruitless == 0 for entry in entries)
        for entry in entries:
            entry.leave_engine()


def test_deaths_before_a_request_was_given_are_not_its_own(entries: list[JournalEntry]) -> None:
    for _ in range(10):
        assert judge(entries) is None
    assert len(choose(entries)) == len(entries)
