"""Where requests go among replicas, and what is known of these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire.core.content import Content
from quire.core.params import SamplingParams
from quire.core.request_spec import RequestSpec
from quire.engine.front.client import Question, Seen
from quire.engine.front.digest import Digest
from quire.engine.front.outputs import CompletionOutput, RequestOutput
from quire.engine.front.requests import PreparedRequest
from quire.engine.front.status import EngineState, EngineStatus
from quire.engine.front.streams import Caller, OutputSink
from quire.engine.replicas.link import CHUNK_TOKENS, Replicas, ask_of
from quire.engine.replicas.status import joined
from quire.errors import EngineError


class FakeLink:
    """An engine that notes what it is given."""

    def __init__(self) -> None:
        self.sinks: dict[str, OutputSink] = {}
        self.aborted: list[str] = []
        self.questions: list[Question] = []
        self.state: EngineState = "ready"
        self.num_restarts = 0
        self.show: Callable[[Seen], None] = lambda answer: None
        self.is_closed = False

    def start(self) -> None:
        pass

    def add(self, prepared: PreparedRequest, stream: OutputSink) -> None:
        if self.is_closed:
            raise EngineError("closed")
        self.sinks[prepared.spec.request_id] = stream

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def ask(self, question: Question, replica: int = 0) -> None:
        self.questions.append(question)

    def end_all(self, message: str) -> None:
        for sink in self.sinks.values():
            sink.fail(EngineError(message))

    def close(self, timeout_s: float = 15.0) -> None:
        self.is_closed = True

    def status(self, num_requests: int, num_prompt_tokens: int) -> EngineStatus:
        return EngineStatus(
            state=self.state,
            num_requests=num_requests,
            num_prompt_tokens=num_prompt_tokens,
            num_restarts=self.num_restarts,
            kv_usage=0.5,
            num_steps_by_size=(1, 2),
        )


class Sink:
    """A request's own sink."""

    def __init__(self) -> None:
        self.items: list[RequestOutput | BaseException] = []

    @property
    def loop(self) -> Caller:
        raise AssertionError("nothing is delivered")

    def put(self, output: RequestOutput) -> None:
        self.items.append(output)

    def fail(self, error: BaseException) -> None:
        self.items.append(error)


@pytest.fixture
def links() -> list[FakeLink]:
    return [FakeLink(), FakeLink(), FakeLink()]


@pytest.fixture
def replicas(links: list[FakeLink]) -> Replicas:
    return Replicas(links, num_kv_slots=1 << 16)


def _spec(request_id: str, prompt: range, **fields: Any) -> RequestSpec:
    return RequestSpec(
        request_id=request_id, prompt_token_ids=tuple(prompt), max_tokens=8, **fields
    )


def _prepared(request_id: str, prompt: range) -> PreparedRequest:
    spec = _spec(request_id, prompt)
    return PreparedRequest(spec, Digest(SamplingParams(), spec), None)


def _add(replicas: Replicas, request_id: str, prompt: range) -> Sink:
    sink = Sink()
    replicas.add(_prepared(request_id, prompt), sink)
    return sink


def _output(request_id: str, *, finished: bool) -> RequestOutput:
    return RequestOutput(request_id, None, [1], [CompletionOutput(0, "", [1])], finished=finished)


def _place(links: list[FakeLink], request_id: str) -> int:
    [place] = [number for number, link in enumerate(links) if request_id in link.sinks]
    return place


def test_different_prompts_go_to_different_replicas_and_a_beginning_to_its_own(
    replicas: Replicas, links: list[FakeLink]
) -> None:
    prompts = [range(first, first + 4 * CHUNK_TOKENS) for first in (0, 5000, 9000)]
    for number, prompt in enumerate(prompts):
        _add(replicas, f"r{number}", prompt)
    places = [_place(links, f"r{number}") for number in range(3)]
    assert sorted(places) == [0, 1, 2]
    for number, place in enumerate(places):
        links[place].sinks[f"r{number}"].put(_output(f"r{number}", finished=True))
    for number, prompt in enumerate(prompts):
        _add(replicas, f"again{number}", range(prompt.start, prompt.stop + 20))
        assert _place(links, f"again{number}") == places[number]


def test_one_beginning_does_not_fill_one_replica_alone(
    replicas: Replicas, links: list[FakeLink]
) -> None:
    for number in range(12):
        _add(replicas, f"r{number}", range(4 * CHUNK_TOKENS))
    assert max(len(link.sinks) for link in links) <= 6


def test_what_is_in_flight_is_counted_until_the_last_output(
    replicas: Replicas, links: list[FakeLink]
) -> None:
    sink = _add(replicas, "a", range(100))
    place = _place(links, "a")
    each = replicas.status(1, 100).replicas[place]
    assert (each.num_requests, each.num_prompt_tokens) == (1, 100)
    links[place].sinks["a"].put(_output("a", finished=False))
    replicas.abort("a")
    assert links[place].aborted == ["a"]
    links[place].sinks["a"].put(_output("a", finished=True))
    replicas.abort("a")
    assert links[place].aborted == ["a"] and len(sink.items) == 2
    assert all(
        (each.num_requests, each.num_prompt_tokens) == (0, 0)
        for each in replicas.status(0, 0).replicas
    )


def test_an_error_ends_a_request_as_its_last_output_does(
    replicas: Replicas, links: list[FakeLink]
) -> None:
    sink = _add(replicas, "a", range(9))
    replicas.end_all("over")
    assert [str(each) for each in sink.items] == ["over"]
    assert [each.num_requests for each in replicas.status(0, 0).replicas] == [0, 0, 0]


def test_replicas_that_are_not_ready_get_requests_only_where_none_is(
    replicas: Replicas, links: list[FakeLink]
) -> None:
    links[0].state, links[1].state = "restarting", "failed"
    for number in range(6):
        _add(replicas, f"r{number}", range(number * 999, number * 999 + 99))
    assert [len(link.sinks) for link in links] == [0, 0, 6]
    links[2].state = "loading"
    for number in range(6, 12):
        _add(replicas, f"r{number}", range(number * 999, number * 999 + 99))
    assert len(links[0].sinks) > 0 and len(links[1].sinks) == 0
    assert replicas.status(12, 0).state == "restarting"
    links[0].state = links[2].state = "failed"
    assert replicas.status(12, 0).state == "failed"


def test_a_new_process_is_not_thought_to_have_what_the_old_one_had(
    replicas: Replicas, links: list[FakeLink]
) -> None:
    prompt = range(8 * CHUNK_TOKENS)
    _add(replicas, "a", prompt)
    first = _place(links, "a")
    links[first].sinks["a"].put(_output("a", finished=True))
    _add(replicas, "in flight", prompt)
    assert _place(links, "in flight") == first
    links[first].num_restarts += 1
    _add(replicas, "b", prompt)
    assert _place(links, "b") != first


def test_a_request_that_its_replica_refuses_is_not_counted(
    replicas: Replicas, links: list[FakeLink]
) -> None:
    replicas.close()
    with pytest.raises(EngineError, match="closed"):
        _add(replicas, "a", range(9))
    assert [each.num_requests for each in replicas.status(0, 0).replicas] == [0, 0, 0]


def test_counts_are_sums_and_shares_are_means(replicas: Replicas, links: list[FakeLink]) -> None:
    links[1].num_restarts = 2
    status = replicas.status(5, 50)
    assert status.kv_usage == 0.5 and status.num_steps_by_size == (3, 6)
    assert (status.num_requests, status.num_prompt_tokens, status.num_restarts) == (5, 50, 2)
    assert status.is_ready and len(status.replicas) == 3


def test_histograms_of_a_new_process_are_counted_too() -> None:
    new, old = EngineStatus(state="loading"), EngineStatus(state="ready", num_steps_by_size=(4, 1))
    assert joined([new, old], 0, 0).num_steps_by_size == (4, 1)


def test_salts_and_images_tell_beginnings_apart() -> None:
    plain, salted = _spec("a", range(200)), _spec("a", range(200), namespace=("salt", "x"))
    shown = _spec("a", range(200), contents=(Content(0, 200, bytes(32)),))
    assert len({ask_of(each).chunks for each in (plain, salted, shown)}) == 3
    assert len(ask_of(plain).chunks) == 200 // CHUNK_TOKENS
