"""Requests through back ends that are killed all the time: none lost, none doubled.

A stream that has begun when its back end dies cannot go on elsewhere without repeating tokens: it
ends with an error event, and that is the one thing that may happen to it. Every other request is
answered as if nothing had happened.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from fake_backend import FakeBackend, answer_text, backends
from routed import Routed, routed, words

pytestmark = pytest.mark.slow

NUM_REQUESTS = int(os.environ.get("QUIRE_TEST_REQUESTS", "2500"))
NUM_CLIENTS = 64


async def _kill_and_start(
    made: list[FakeBackend], chance: random.Random, num_answered: Callable[[], int]
) -> None:
    """Kill one of them again and again; the others are always there.

    Paced by answers instead of seconds: on a slow machine a request would meet more kills than it
    has retries.
    """

    async def pass_by(num_requests: int) -> None:
        until = num_answered() + num_requests
        while num_answered() < until:
            await asyncio.sleep(0.001)

    while True:
        victim = chance.choice(made)
        await victim.kill()
        await pass_by(chance.randint(10, 50))
        await victim.start()
        await pass_by(chance.randint(50, 120))


async def _ask(up: Routed, number: int) -> str:
    """One request; what became of it."""
    body: dict[str, Any] = {
        "model": "m",
        "prompt": f"r{number}",
        "max_tokens": 1 + number % 7,
    }
    if number % 2:
        answer = await up.post("/v1/completions", body)
        assert answer.status == 200, answer.body
        assert json.loads(answer.body)["text"] == answer_text(body)
        return "whole"
    events = await up.stream(body)
    if events[-1] == "[DONE]":
        assert words(events) == answer_text(body)
        return "whole"
    said = [event["word"] for event in events[:-1]]
    assert events[-1]["error"]["code"] == "backend_failed", events[-1]
    assert said and said == answer_text(body).split()[: len(said)]
    return "cut"


def test_thousands_of_requests_through_kills() -> None:
    outcomes = Counter[str]()

    async def client(up: Routed, numbers: list[int]) -> None:
        while numbers:
            outcomes[await _ask(up, numbers.pop())] += 1

    async def run() -> None:
        async with (
            backends("a", "b", "c", "d") as made,
            routed(
                *(each.url for each in made),
                policy="least-load",
                health_interval_s=0.02,
                max_retries=3,
            ) as up,
        ):
            for each in made:
                each.gap_s = 0.001
            killing = asyncio.create_task(_kill_and_start(made, random.Random(5), outcomes.total))
            numbers = list(range(NUM_REQUESTS))
            await asyncio.gather(*(client(up, numbers) for _ in range(NUM_CLIENTS)))
            killing.cancel()
            loads = [replica.load for replica in up.app.fleet.replicas]
            assert [(load.num_requests, load.tokens) for load in loads] == [(0, 0)] * 4
            failed = sum(
                replica.num_by_outcome.get("failed", 0) for replica in up.app.fleet.replicas
            )
            assert failed > NUM_REQUESTS // 100, "the kills have hit nothing"

    asyncio.run(run())
    assert sum(outcomes.values()) == NUM_REQUESTS and outcomes["whole"] > 0.9 * NUM_REQUESTS
