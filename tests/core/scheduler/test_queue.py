"""The waiting queue against a sorted list."""

from __future__ import annotations

from random import Random
from typing import Any

from quire.core.request import Request, Sequence
from quire.core.request_spec import RequestSpec
from quire.core.scheduler.queue import WaitingQueue
from quire.core.strategies import SamplingStrategy


def _sequence(rank: tuple[int, int, int]) -> Sequence:
    request = Request(RequestSpec(prompt_token_ids=(1,)), SamplingStrategy())
    table: Any = None
    return Sequence(request, 0, [1], table, None, request.sampling, rank=rank)


def test_order_is_that_of_rank_whatever_is_pushed_and_removed() -> None:
    random, queue, model = Random(0), WaitingQueue(), list[Sequence]()
    for arrival in range(3000):
        if model and random.random() < 0.45:
            leaver = random.choice(model)
            queue.remove(leaver)
            model.remove(leaver)
        else:
            sequence = _sequence((random.randint(0, 2), arrival, 0))
            queue.push(sequence)
            model.append(sequence)
        head = min(model, key=lambda s: s.rank, default=None)
        assert queue.head() is head and len(queue) == len(model)
    assert queue.sequences() == sorted(model, key=lambda s: s.rank)
    assert len(queue._heap) <= 2 * len(model) + 64


def test_a_sequence_may_come_back() -> None:
    queue, sequence, other = WaitingQueue(), _sequence((0, 1, 0)), _sequence((0, 2, 0))
    queue.push(sequence)
    queue.push(other)
    queue.remove(sequence)
    assert sequence not in queue and queue.head() is other
    queue.push(sequence)
    assert sequence in queue and queue.head() is sequence
    queue.remove(sequence)
    queue.remove(other)
    assert queue.head() is None and len(queue) == 0


def test_what_left_from_the_middle_does_not_stay_in_memory() -> None:
    queue, first = WaitingQueue(), _sequence((0, 0, 0))
    queue.push(first)
    for arrival in range(1, 5000):
        sequence = _sequence((0, arrival, 0))
        queue.push(sequence)
        queue.remove(sequence)
        assert len(queue._heap) <= 68
    assert queue.head() is first
