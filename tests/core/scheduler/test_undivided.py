"""Spans of a prompt whose tokens see one another both ways: each is computed in one step, but for
what the cache has, in every mixture of decodes, chunks, short prompts and preemption."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from quire.core.plan import RowWork
from quire.core.request_spec import RequestSpec
from quire.core.scheduler.pace import StepPace
from quire.core.step_cost import StepCostModel, UnitCosts

SPAN = 12
COSTS = UnitCosts(0.001, 1e-9, 0.001, 1e-9, 1e-12, 1e-12)
SLOTS = 8
"""Rows, of which each may take a token of a step before a span is considered."""


def _spans(rng: random.Random, length: int) -> tuple[tuple[int, int], ...]:
    found, at = [], 0
    while at + SPAN <= length:
        first = at + rng.randrange(8)
        end = first + rng.randint(1, SPAN)
        if end <= length:
            found.append((first, end))
        at = end
    return tuple(found)


def _check(specs: dict[str, RequestSpec], names: dict[int, str], work: RowWork) -> None:
    end = work.start + work.num_tokens
    for first, last in specs[names[work.row]].undivided:
        assert not first < end < last, (work, first, last)


@pytest.mark.slow_combinations
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("is_paced", [False, True])
def test_no_step_ends_within_a_span(seed: int, is_paced: bool, harness: Callable[..., Any]) -> None:
    rng = random.Random(seed)
    h = harness(
        max_num_batched_tokens=2 * SPAN + SLOTS,
        max_num_seqs=SLOTS,
        num_blocks=rng.choice([34, 48, 96]),
        max_num_partial_prefills=rng.choice([1, 3]),
        pace=StepPace(StepCostModel(COSTS), 0.008, quantum=4) if is_paced else None,
    )
    prefix = [rng.randrange(16) for _ in range(40)]
    requests = []
    for number in range(10):
        length = rng.randint(2, 90)
        prompt = [*prefix[: rng.randrange(40)], *(rng.randrange(16) for _ in range(length))]
        spans = _spans(rng, len(prompt))
        requests.append(h.add(f"r{number}", prompt, rng.randint(1, 20), undivided=spans))
    names: dict[int, str] = {}
    for _ in range(600):
        if not h.scheduler.has_work:
            break
        plan = h.step()
        names |= {new.row: new.name.partition("#")[0] for new in plan.new_rows}
        for work in plan.work:
            _check(h.specs, names, work)
    assert not h.scheduler.has_work
    for request in requests:
        h.check(request)


def test_a_chunk_ends_before_a_span_or_takes_all_of_it(harness: Callable[..., Any]) -> None:
    h = harness(max_num_batched_tokens=10, max_num_seqs=2)
    h.add("a", 40, undivided=((4, 8), (8, 12), (15, 19), (25, 33)))
    lengths: list[int] = []
    while h.scheduler.has_work and len(lengths) < 5:
        lengths.append(h.step().work[0].num_tokens)
    assert lengths == [8, 7, 10, 10, 5]
