"""T10 and T20 on a server in earnest: no body of a few bytes, and none of a megabyte, costs memory
or time beyond a bound, nor the others' streams their pace.
"""

from __future__ import annotations

import json
import random
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from served import MODEL, Served, cpu_s, resident_bytes, until
from timing import timed

from quire.config.api import ApiConfig
from quire.core.params import SamplingParams
from quire.server.http.errors import ApiError
from quire.server.quota.cost import Bounds, Piece, room_for_logprobs

pytestmark = pytest.mark.slow

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
MAX_RISE_BYTES = 64 << 20
NUM_GAPS = 300
NUMBERS = [0, -1, 1, 2**31, 2**63 - 1, 2**63, -(2**63), 10**30, 1e308, 1e-320, 0.5]
FIELDS = (
    "n", "best_of", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p",
    "presence_penalty", "seed", "logprobs", "frequency_penalty", "repetition_penalty",
    "top_logprobs", "prompt_logprobs", "truncate_prompt_tokens",
)  # fmt: skip


class Gaps:
    """A stream that is read all the while, and the times between its events."""

    def __init__(self, served: Served) -> None:
        self.gaps_s: list[float] = []
        self._served = served
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with self._served.client() as http:
            while not self._is_over.is_set():
                last_s = time.monotonic()
                with http.stream("POST", COMPLETIONS, json=body) as response:
                    for line in response.iter_lines():
                        if line and self._is_over.is_set():
                            return
                        if line:
                            now = time.monotonic()
                            self.gaps_s.append(now - last_s)
                            last_s = now

    def close(self) -> list[float]:
        """End it; the gaps in order of size."""
        self._is_over.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        return sorted(self.gaps_s)


@contextmanager
def bounded(served: Served) -> Iterator[None]:
    """Neither process is much larger afterwards than it was, at any moment in between."""
    pids = (served.process.pid, served.engine_pid)
    before = [resident_bytes(pid) for pid in pids]
    peaks = list(before)
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.02):
            peaks[:] = [
                max(peak, resident_bytes(pid)) for peak, pid in zip(peaks, pids, strict=True)
            ]

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    rises = [peak - first for peak, first in zip(peaks, before, strict=True)]
    assert max(rises) < MAX_RISE_BYTES, [rise >> 20 for rise in rises]
    served.await_idle()


@pytest.fixture(scope="module")
def warm(served: Served) -> Served:
    """The server, having done some of everything: what is loaded once is no cost of a request."""
    with served.client() as http:
        for body in ({"logprobs": 20, "prompt_logprobs": 20}, {"n": 64, "temperature": 1.5}):
            http.post(
                COMPLETIONS,
                json={"prompt": "Once upon a time", "max_tokens": 60, "ignore_eos": True, **body},
            )
        http.post("/tokenize", json={"prompt": "a" * 100_000})
    return served


def test_t10_numbers_at_their_ends_are_refused_or_bounded(warm: Served) -> None:
    rng = random.Random(3)
    bodies: list[dict[str, Any]] = [{name: value} for name in FIELDS for value in NUMBERS]
    bodies += [
        dict(zip(rng.sample(FIELDS, 2), rng.sample(NUMBERS, 2), strict=True)) for _ in range(60)
    ]
    with bounded(warm), warm.client() as http:
        for number, body in enumerate(bodies):
            path, base = (CHAT, HELLO) if number % 2 else (COMPLETIONS, {"prompt": "x"})
            response = http.post(path, content=json.dumps({**base, "max_tokens": 4, **body}))
            assert response.status_code in (200, 400), (body, response.text)


_WIDE = {str(number): number for number in range(20_000)}


def _tool(number: int, num_words: int) -> dict[str, Any]:
    """A function with its own schema, so that nothing is known of it,
    and as many words on each of its fields."""
    described = {"type": "string", "description": "a " * num_words}
    fields = {f"field {number} {place}": described for place in range(10)}
    return {
        "type": "function",
        "function": {"name": f"f{number}", "parameters": {"type": "object", "properties": fields}},
    }


BOMBS: dict[str, tuple[str, dict[str, Any]]] = {
    "sequences with alternatives": (
        CHAT,
        {**HELLO, "n": 30, "max_tokens": 100, "logprobs": True, "top_logprobs": 20},
    ),
    "scores of many prompts": (
        COMPLETIONS,
        {"prompt": ["a b c d" * 40] * 100, "prompt_logprobs": 20, "max_tokens": 1},
    ),
    "all sequences": (
        COMPLETIONS,
        {"prompt": ["Once"] * 8, "n": 16, "max_tokens": 10, "ignore_eos": True},
    ),
    "the whole vocabulary": (COMPLETIONS, {"prompt": "a", "logprobs": 20, "prompt_logprobs": -1}),
    "many biases": (
        CHAT,
        {**HELLO, "max_tokens": 4, "logit_bias": {str(number): -1 for number in range(2048)}},
    ),
    "many stop tokens": (CHAT, {**HELLO, "max_tokens": 4, "stop_token_ids": list(range(4096))}),
    "long stop strings": (
        CHAT,
        {**HELLO, "max_tokens": 4, "stop": ["a" * 1024, "b" * 1024, "a" * 1023 + "b", "c"]},
    ),
    "many bad words": (
        CHAT,
        {**HELLO, "max_tokens": 4, "bad_words": [f"word {number}" for number in range(256)]},
    ),
    "a million ids": (COMPLETIONS, {"prompt": [5] * 1_000_000, "max_tokens": 1}),
    "a million ids to decode": ("/detokenize", {"tokens": [5] * 1_000_000}),
    "a megabyte of text": (COMPLETIONS, {"prompt": "a b " * 250_000, "max_tokens": 1}),
    "a megabyte of letters": (CHAT, {"messages": [{"role": "user", "content": "a" * 1_000_000}]}),
    "four thousand messages": (CHAT, {"messages": [{"role": "user", "content": "a b c"}] * 4096}),
    "many parts": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 20_000}]},
    ),
    "large arguments": (
        CHAT,
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [
                        {
                            "id": "a",
                            "function": {
                                "name": "f",
                                "arguments": json.dumps({"a": "b " * 400_000}),
                            },
                        }
                    ],
                }
            ]
        },
    ),
    "a megabyte of tools": (CHAT, {**HELLO, "tools": [_tool(number, 800) for number in range(64)]}),
    "tools that must be called": (
        CHAT,
        {**HELLO, "tools": [_tool(n, 1) for n in range(64)], "tool_choice": "required"},
    ),
    "a wide call": (
        CHAT,
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"id": "a", "function": {"name": "f", "arguments": json.dumps(_WIDE)}}
                    ],
                }
            ]
        },
    ),
    "a megabyte to count": (
        "/v1/messages/count_tokens",
        {"model": MODEL, "messages": [{"role": "user", "content": "ab " * 330_000}]},
    ),
}


@timed
@pytest.mark.parametrize("bomb", BOMBS)
def test_t10_t20_what_multiplies_is_bounded_and_the_loop_answers_others(
    warm: Served, bomb: str
) -> None:
    """Refused or served; meanwhile /livez answers,
    after no more work than the machine does in a moment."""
    path, body = BOMBS[bomb]
    content = json.dumps(body).encode()
    answers: list[httpx.Response] = []

    def drop() -> None:
        with warm.client(timeout_s=60) as http:
            answers.append(http.post(path, content=content))

    waits_s = []
    with bounded(warm), httpx.Client(base_url=warm.url, timeout=60) as http:
        http.get("/livez")
        thread = threading.Thread(target=drop)
        thread.start()
        while thread.is_alive():
            before_s = cpu_s(warm.process.pid)
            wait_s = http.get("/livez").elapsed.total_seconds()
            # the server's doing, not the machine's
            waits_s.append(min(wait_s, cpu_s(warm.process.pid) - before_s + 0.02))
            thread.join(0.01)
    assert answers and answers[0].status_code in (200, 400), answers[0].text[:500]
    assert sorted(waits_s)[-2:][0] < 0.3, sorted(waits_s)[-5:]  # but for one hiccup of the machine


@timed
def test_t10_the_others_streams_keep_their_pace(warm: Served) -> None:
    """While bodies are refused and long texts encoded one after another,
    the median gap of a stream less than doubles."""
    usual = _calm_gaps(warm)
    with warm.client() as http:
        busy = Gaps(warm)
        while len(busy.gaps_s) < NUM_GAPS:
            for bomb in (
                "the whole vocabulary",
                "a megabyte of text",
                "large arguments",
                "many stop tokens",
            ):
                path, body = BOMBS[bomb]
                http.post(path, json=body)
        disturbed = busy.close()
    # the machine's pace changes, too
    usual_s = max(statistics.median(usual), statistics.median(_calm_gaps(warm)))
    assert statistics.median(disturbed) < 2 * usual_s + 0.005


def _calm_gaps(served: Served) -> list[float]:
    calm = Gaps(served)
    until(lambda: len(calm.gaps_s) >= NUM_GAPS)
    return calm.close()


def _bounds(**limits: int) -> Bounds:
    return Bounds(ApiConfig(**limits), 1000)  # type: ignore[arg-type]


def test_the_bound_of_log_probabilities_counts_every_factor() -> None:
    bounds = _bounds(max_logprob_entries=2000)
    params = SamplingParams(n=4, max_tokens=100, logprobs=4)
    bounds.check([Piece(10, params)])
    for changed in (
        SamplingParams(n=4, max_tokens=101, logprobs=4),
        SamplingParams(n=5, max_tokens=100, logprobs=4),
        SamplingParams(n=4, max_tokens=100, logprobs=5),
        SamplingParams(n=4, max_tokens=100, logprobs=4, prompt_logprobs=0),
        SamplingParams(n=1, best_of=4, max_tokens=100, logprob_token_ids=[1, 2, 3, 4, 5]),
        SamplingParams(n=1, max_tokens=2, logprobs=-1),
    ):
        with pytest.raises(ApiError, match="log-probabilities"):
            bounds.check([Piece(10, changed)])
    bounds.check([Piece(10**6, SamplingParams(n=100, max_tokens=10**6))])
    assert room_for_logprobs(None, 5, 2000) is None and room_for_logprobs(4, 4, 2000) == 100


def test_a_prompts_log_probabilities_count_as_often_as_the_answer_shows_them() -> None:
    bounds = _bounds(max_logprob_entries=3000)
    params = SamplingParams(n=4, max_tokens=1, prompt_logprobs=0)
    bounds.check([Piece(1000, params, num_shown=3)])
    with pytest.raises(ApiError, match="up to 4000 log-probabilities"):
        bounds.check([Piece(1000, params, num_shown=4)])


def test_the_bound_of_lists_counts_prompts_and_choices_and_names_the_longest() -> None:
    bounds = _bounds(max_list_entries=6000)
    params = SamplingParams(
        n=2, logit_bias=dict.fromkeys(range(100), 1.0), stop_token_ids=list(range(200))
    )
    bounds.check([Piece(1, params)] * 10)
    with pytest.raises(ApiError, match=r"have 6600 entries.*one may have 6000") as caught:
        bounds.check([Piece(1, params)] * 11)
    assert (caught.value.status, caught.value.param) == (400, "stop_token_ids")


def test_the_bound_of_what_an_answer_repeats_counts_all_prompts() -> None:
    bounds = _bounds(max_repeated=1000)
    pieces = [Piece(1, SamplingParams(), num_repeated=500)] * 2
    bounds.check(pieces)
    with pytest.raises(ApiError, match="would repeat 1001 characters"):
        bounds.check([*pieces, Piece(1, SamplingParams(), num_repeated=1)])


def test_the_bound_of_sequences_holds_for_every_api() -> None:
    with pytest.raises(ApiError, match="1 prompts make 3 sequences") as caught:
        _bounds(max_sequences=2).check([Piece(1, SamplingParams(n=3))])
    assert caught.value.param == "n"
