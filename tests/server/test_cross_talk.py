"""Crowds of clients, some of whom misbehave: each answer is to the byte what the same request gets
alone.

Every prompt and every request's id hold a word of their own, so that a mix-up is seen whichever way
it goes. QUIRE_TEST_REQUESTS asks for more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
from typing import Any

import httpx
import pytest
from served import DEADLINE_S, Served

pytestmark = pytest.mark.slow

NUM_REQUESTS = int(os.environ.get("QUIRE_TEST_REQUESTS", "160"))
NUM_CLIENTS = 64
NUM_KINDS = 32
_JUNK = (
    b"{",
    b'{"prompt": 7.5}',
    b'{"prompt": "x", "n": -1}',
    b'{"prompt": "x", "max_tokens": 99999}',
)

Answer = dict[int, tuple[str, str]]
"""Text and finish reason of each choice."""


def _kind(number: int) -> dict[str, Any]:
    rng = random.Random(number)
    body: dict[str, Any] = {
        "prompt": f"Tale {number:03} of the {rng.choice(['fox', 'king', 'moon', 'hen'])}: "
        + "on and " * rng.randrange(20),
        "max_tokens": rng.randrange(1, 30),
        "temperature": rng.choice([0.0, 0.7, 1.3]),
        "seed": number,
        "n": rng.choice([1, 1, 1, 2, 3]),
        "echo": True,  # the prompt comes back, with its word
    }
    return {
        **body,
        **rng.choice(
            [{}, {"stop": ["e"]}, {"presence_penalty": 1.0}, {"top_p": 0.8}, {"min_tokens": 1}]
        ),
    }


async def _ask(http: httpx.AsyncClient, kind: int, word: str, *, is_streamed: bool) -> Answer:
    headers = {"x-request-id": word}
    async with http.stream(
        "POST", "/v1/completions", json={**_kind(kind), "stream": is_streamed}, headers=headers
    ) as response:
        assert response.status_code == 200 and response.headers["x-request-id"] == word
        if not is_streamed:
            choices = json.loads(await response.aread())["choices"]
            return {
                choice["index"]: (choice["text"], choice["finish_reason"]) for choice in choices
            }
        texts: dict[int, str] = {}
        reasons: dict[int, str] = {}
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
                    reasons[choice["index"]] = choice["finish_reason"] or reasons.get(
                        choice["index"], ""
                    )
        return {index: (text, reasons[index]) for index, text in texts.items()}


async def _misbehave(http: httpx.AsyncClient, rng: random.Random) -> None:
    """Ask for nonsense, or leave in the middle of an answer."""
    if rng.random() < 0.5:
        assert (await http.post("/v1/completions", content=rng.choice(_JUNK))).status_code == 400
        return
    body = {**_kind(rng.randrange(NUM_KINDS)), "stream": True, "max_tokens": 100}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(rng.uniform(0.0, 0.2)):
                await response.aread()


async def _client(
    http: httpx.AsyncClient, numbers: asyncio.Queue[int], alone: dict[int, Answer]
) -> None:
    while not numbers.empty():
        number = numbers.get_nowait()
        rng = random.Random(number)
        if rng.random() < 0.2:
            await _misbehave(http, rng)
        kind = rng.randrange(NUM_KINDS)
        answer = await _ask(http, kind, f"canary-{number}", is_streamed=rng.random() < 0.5)
        assert answer == alone[kind], (number, kind)


async def _crowd(served: Served) -> None:
    limits = httpx.Limits(max_connections=NUM_CLIENTS)
    async with httpx.AsyncClient(
        base_url=served.url, headers=served.headers, timeout=DEADLINE_S, limits=limits
    ) as http:
        alone = {
            kind: await _ask(http, kind, f"alone-{kind}", is_streamed=False)
            for kind in range(NUM_KINDS)
        }
        assert all(
            text.startswith(_kind(kind)["prompt"])
            for kind in alone
            for text, _ in alone[kind].values()
        )
        numbers: asyncio.Queue[int] = asyncio.Queue()
        for number in range(NUM_REQUESTS):
            numbers.put_nowait(number)
        async with asyncio.TaskGroup() as clients:
            for _ in range(NUM_CLIENTS):
                clients.create_task(_client(http, numbers, alone))


def test_t30_each_gets_its_own_answer_in_a_crowd(served: Served) -> None:
    served.await_idle()
    asyncio.run(_crowd(served))
    served.await_idle()
