"""Bodies that work, mutated: truncated, nested, repeated, of other types, with bytes changed.

QUIRE_FUZZ_SECONDS asks for more than the suite's few seconds of each test, QUIRE_FUZZ_BODIES for a
number of bodies, QUIRE_FUZZ_SEED for others.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from plain_http import Answer, PlainClient

Body = tuple[str, dict[str, Any]]
"""A route, and what is sent to it."""
SECONDS = float(os.environ.get("QUIRE_FUZZ_SECONDS", "3"))
BODIES = int(os.environ.get("QUIRE_FUZZ_BODIES", "0"))
SEED = int(os.environ.get("QUIRE_FUZZ_SEED", "1"))
MAX_FAILURES = 5
MAX_ANSWER_S = 2.0
MAX_WAIT_S = 30.0
"""A machine that does other things besides may hold any answer up, once."""
NAMES = ("x", "n", "", " ", "x ", "a, b", "\r\nx: y", "\x00", "\u0416" * 2000)
JUNK: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1.5,
    2**63,
    -(2**63),
    10**40,
    1e99,
    "",
    "x" * 5000,
    "\x00",
    "\u202e",
    "\U0010ffff",
    [],
    {},
    [[]],
    [{}],
    [None] * 50,
    {"type": []},
    {"": None},
    {"$ref": "#"},
    "NaN",
    "0x10",
    [1, "a", None],
    "../../etc/passwd",
)


def send_mutated(
    http: PlainClient, draw: Callable[[random.Random], Body], wanted: set[int]
) -> None:
    """Send mutated bodies, until the time is over and all statuses of `wanted` were seen:
    each answer comes in time, is no 5xx, and every error has the one shape."""
    rng = random.Random(SEED)
    deadline_s = time.monotonic() + SECONDS
    statuses: Counter[int] = Counter()
    failures: list[str] = []
    for number in itertools.count():
        # a busy machine needs longer for as many
        is_enough = wanted <= statuses.keys() or number > 2000
        if time.monotonic() > deadline_s and is_enough and number >= BODIES:
            break
        path, body = draw(rng)
        content = _spoilt(rng, json.dumps(_mutated(rng, body)).encode())
        answer = http.post(path, content)
        if not _is_in_time(answer):
            answer = min(
                (http.post(path, content) for _ in range(3)), key=lambda each: each.elapsed_s
            )
        statuses[answer.status] += 1
        if number % 1000 == 999:
            print(f"{number + 1} bodies: {dict(sorted(statuses.items()))}", flush=True)
        try:
            _check(answer, (path, content[:2000]))
        except AssertionError as error:  # a long run should find more than one
            failures.append(str(error))
            if len(failures) == MAX_FAILURES:
                break
    print(f"{statuses.total()} bodies: {dict(sorted(statuses.items()))}")
    assert not failures, "\n".join(failures)
    assert wanted <= statuses.keys()


def _is_in_time(answer: Answer) -> bool:
    """A body that lost its limit of tokens is answered with as many as the context holds,
    each of which may take a while."""
    num_tokens = answer.content.count(b"data:")
    if answer.status == 200 and answer.kind == "application/json":
        usage = answer.json().get("usage") or {}
        num_tokens = usage.get("completion_tokens", 0) + usage.get("output_tokens", 0)
    return answer.elapsed_s < MAX_ANSWER_S * (1 + num_tokens / 50)


def _check(answer: Answer, sent: object) -> None:
    assert _is_in_time(answer), (answer.elapsed_s, sent)
    assert answer.status < 500, (sent, answer.content)
    if answer.status >= 400:
        assert {"message", "type", "param", "code"} == set(answer.json()["error"]), (
            sent,
            answer.content,
        )
        assert len(answer.content) < 2000, "an error quotes only a little of what it complains of"


def _mutated(rng: random.Random, value: Any) -> Any:
    if rng.random() < 0.08:
        return rng.choice(JUNK)
    if isinstance(value, dict):
        items = [
            (rng.choice([key, *NAMES]) if rng.random() < 0.03 else key, _mutated(rng, each))
            for key, each in value.items()
        ]
        return dict(items)
    if isinstance(value, list):
        return [_mutated(rng, each) for each in value] * (
            rng.randrange(40) if rng.random() < 0.03 else 1
        )
    return value


def _spoilt(rng: random.Random, content: bytes) -> bytes:
    """Most are left as they are; some lose or gain bytes, or are wrapped many times."""
    kind = rng.random()
    if kind < 0.15:
        cut = rng.randrange(len(content))
        return content[:cut] + bytes([rng.randrange(256)]) + content[cut + rng.randrange(3) :]
    if kind < 0.2:
        return content[: rng.randrange(len(content))]
    if kind < 0.22:
        depth = rng.choice([10, 1000, 100_000])
        return b'{"messages":' * depth + content + b"}" * depth
    return content
