"""What the application for Ray Serve consists of, without a cluster: settings, the exchange of one
request, the ingress, and when there are to be more replicas."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from quire.config.api import ApiConfig
from quire.errors import ConfigError
from quire.ray.autoscaling import METRIC, WaitingTokens
from quire.ray.exchange import Message, Receive, Send, request_of, run
from quire.ray.ingress import Ingress
from quire.ray.settings import RaySettings


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "needs a model"),
        ({"model": "m", "modle": 1}, "unknown key 'modle'"),
        ({"model": "m", "engine": {"max_num_seq": 1}}, "did you mean 'max_num_seqs'"),
        ({"model": "m", "engine": 3}, "engine=3 must be a mapping"),
        ({"model": "m", "api": {"max_body": 1}}, "api: unknown key 'max_body'"),
        ({"model": "m", "replicas": {"count": 2}}, "replicas: unknown key 'count'"),
        ({"model": "m", "routing": {"policy": "best"}}, "no routing policy 'best'"),
        ("m", "needs a mapping of arguments"),
        ({"model": "m", "num_ingresses": "2"}, "num_ingresses='2' must be a whole number"),
        ({"model": "m", "routing": {"chunk_bytes": 0}}, "chunk_bytes=0 must be a whole number"),
        ({"model": "m", "routing": {"session_header": 5}}, "session_header=5 must be the name"),
        ({"model": "m", "replicas": {"target_waiting_tokens": 0}}, "=0 must be a number above 0"),
        ({"model": "m", "replicas": {"num_replicas": 2, "max_replicas": 4}},
         "max_replicas say how the number .* num_replicas=2 fixes it"),
        ({"model": "m", "replicas": {"placement_group_strategy": "SPREAD"}}, "is one process"),
        (
            {"model": "m", "engine": {"tensor_parallel_size": 2,
                                      "distributed_executor_backend": "mp"}},
            "placed by Ray here",
        ),
    ],
)  # fmt: skip
def test_a_mistake_is_said_before_anything_is_deployed(args: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RaySettings.of(args)


def test_processes_of_one_replica_are_placed_by_ray() -> None:
    settings = RaySettings.of({"model": "m", "engine": {"tensor_parallel_size": 2}})
    config = settings.engine_config(ray_placement_group="id:00")
    assert config.distributed_executor_backend == "ray"
    assert (config.ray_placement_group, config.num_threads) == ("id:00", 1)
    assert RaySettings.of({"model": "m"}).engine_config().distributed_executor_backend is None


@pytest.mark.parametrize(
    ("waiting", "num_requests", "current", "wanted"),
    [
        ([0], 4, 1, 1),
        ([100], 4, 1, 1),
        ([101], 4, 1, 2),
        ([450], 4, 1, 5),
        ([5000], 4, 1, 8),
        ([120, 90], 9, 2, 3),
        ([90, 90], 9, 2, 2),
        ([0, 0, 0], 3, 3, 2),
        ([0, 0, 0], 0, 3, 1),
        ([], 3, 0, 1),
    ],
)
def test_there_are_more_replicas_where_prompts_wait_and_fewer_where_none_do(
    waiting: list[float], num_requests: int, current: int, wanted: int
) -> None:
    context = SimpleNamespace(
        target_num_replicas=current,
        aggregated_metrics={METRIC: dict(enumerate(waiting))},
        total_num_requests=num_requests,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=8,
        config=SimpleNamespace(get_target_ongoing_requests=lambda: 2),
    )
    assert WaitingTokens(target_tokens=100)(context) == (wanted, {})


# ---- one request ----

SCOPE: Message = {
    "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"a=1",
    "headers": [(b"x-request-id", b"7")], "client": ("10.0.0.1", 5),
}  # fmt: skip


async def echo(scope: Message, receive: Receive, send: Send) -> None:
    message = await receive()
    head = f"{scope['method']} {scope['path']}?{scope['query_string'].decode()} "
    await send({"type": "http.response.start", "status": 201, "headers": scope["headers"]})
    await send({"type": "http.response.body", "body": head.encode(), "more_body": True})
    await send({"type": "http.response.body", "body": message["body"], "more_body": False})


def test_an_answer_comes_back_in_pieces() -> None:
    async def ask() -> list[Any]:
        return [piece async for piece in run(echo, request_of(SCOPE, b"body"))]

    head, *pieces = asyncio.run(ask())
    assert head == (201, [(b"x-request-id", b"7")])
    assert pieces == [b"POST /v1/completions?a=1 ", b"body"]


@pytest.mark.parametrize(
    ("root_path", "path", "seen"),
    [
        ("", "/v1/models/a%2Fb", "/v1/models/a%2Fb"),
        ("/llm", "/llm/v1/models/a%2Fb", "/v1/models/a%2Fb"),
        ("/llm", "/llm", "/"),
        ("/llm", "/llmx", "/llmx"),
    ],
)
def test_a_replica_sees_the_path_behind_the_prefix_of_its_application(
    root_path: str, path: str, seen: str
) -> None:
    path_and_prefix = {"path": path.replace("%2F", "/"), "root_path": root_path}
    scope: Message = {**SCOPE, **path_and_prefix, "raw_path": path.encode()}
    assert request_of(scope, b"")["path"] == seen


def test_an_application_is_told_that_its_client_has_left() -> None:
    heard: list[str] = []

    async def endless(scope: Message, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        leaving = asyncio.ensure_future(receive())
        while not leaving.done():
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            await asyncio.sleep(0)
        heard.append(leaving.result()["type"])

    async def ask() -> None:
        answer = run(endless, request_of(SCOPE, b""))
        assert (await anext(answer))[0] == 200
        assert await anext(answer) == b"x"
        await answer.aclose()

    asyncio.run(asyncio.wait_for(ask(), 30))
    assert heard == ["http.disconnect"]


def test_what_an_application_raises_is_raised() -> None:
    async def broken(scope: Message, receive: Receive, send: Send) -> None:
        raise ValueError("broken")

    async def ask() -> None:
        async for _ in run(broken, request_of(SCOPE, b"")):
            pass

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(ask())


# ---- the ingress ----


class Answer:
    """A response of Serve's handle."""

    def __init__(self, pieces: AsyncIterator[Any]) -> None:
        self._pieces, self.is_cancelled = pieces, asyncio.Event()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._pieces

    def cancel(self) -> None:
        self.is_cancelled.set()


class Handle:
    def __init__(self, make: Callable[[dict[str, Any]], Answer]) -> None:
        self.remote = make

    def options(self, *, stream: bool, method_name: str) -> Handle:
        assert stream and method_name == "forward"
        return self


def ingress_of(make: Callable[[dict[str, Any]], Answer], **api: Any) -> Ingress:
    return Ingress(Handle(make), ApiConfig(**api))


async def exchange(ingress: Ingress, body: bytes, *, leaves: bool = False) -> list[Message]:
    sent: list[Message] = []
    parts = [body[:5], body[5:]]

    async def receive() -> Message:
        if parts:
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}
        if not leaves:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(dict(message))

    await asyncio.wait_for(ingress.answer(SCOPE, receive, send), 30)
    return sent


def test_the_ingress_passes_on_whole_bodies_and_pieces_of_answers() -> None:
    async def ask() -> list[Message]:
        ingress = ingress_of(lambda request: Answer(run(echo, request)))
        return await exchange(ingress, b"0123456789")

    start, *pieces = asyncio.run(ask())
    assert start["status"] == 201 and (b"x-request-id", b"7") in start["headers"]
    assert b"".join(each["body"] for each in pieces).endswith(b"?a=1 0123456789")
    assert [each["more_body"] for each in pieces] == [True, True, False]


def test_a_body_that_is_too_large_never_reaches_a_replica() -> None:
    def never(request: dict[str, Any]) -> Answer:
        raise AssertionError("it was passed on")

    start, end = asyncio.run(exchange(ingress_of(never, max_body_bytes=9), b"0123456789"))
    assert start["status"] == 413 and b"larger than 9 bytes" in end["body"]


def test_a_body_that_does_not_arrive_is_given_up() -> None:
    def never(request: dict[str, Any]) -> Answer:
        raise AssertionError("it was passed on")

    sent: list[Message] = []

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError("nothing comes")

    async def send(message: Message) -> None:
        sent.append(dict(message))

    ingress = ingress_of(never, body_timeout_s=0.1)
    asyncio.run(asyncio.wait_for(ingress.answer(SCOPE, receive, send), 30))
    assert sent[0]["status"] == 408 and b"did not arrive within 0.1 s" in sent[1]["body"]


def test_replicas_that_are_gone_are_an_error_that_says_try_again() -> None:
    async def gone() -> AsyncIterator[Any]:
        raise ConnectionError("the replica is gone")
        yield

    start, end = asyncio.run(exchange(ingress_of(lambda _: Answer(gone())), b"{}"))
    assert start["status"] == 503 and (b"retry-after", b"1") in start["headers"]
    assert json.loads(end["body"])["error"]["message"] == "no replica can answer now; try again"


def test_a_request_whose_client_leaves_is_cancelled() -> None:
    async def ask() -> list[Message]:
        async def pieces() -> AsyncIterator[Any]:
            yield 200, []
            await answer.is_cancelled.wait()
            raise ConnectionError("cancelled")

        answer = Answer(pieces())
        return await exchange(ingress_of(lambda _: answer), b"{}", leaves=True)

    assert [each["type"] for each in asyncio.run(ask())] == ["http.response.start"]


def test_the_ingress_starts_and_ends() -> None:
    async def live() -> list[str]:
        asked = ["lifespan.startup", "lifespan.shutdown"]
        said: list[str] = []

        async def receive() -> Message:
            return {"type": asked.pop(0)}

        async def send(message: Message) -> None:
            said.append(message["type"])

        await ingress_of(lambda _: None).answer({"type": "lifespan"}, receive, send)  # type: ignore[arg-type, return-value]
        return said

    assert asyncio.run(live()) == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


# ---- which replica ----


@pytest.fixture
def prefix_router(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Any]]:
    """The class, over as much of Ray's as it uses."""

    class RequestRouter:
        def update_replicas(self, replicas: list[Any]) -> None:
            pass

    names = ("PendingRequest", "ReplicaID", "ReplicaResult", "RunningReplica")
    stub = ModuleType("ray.serve.request_router")
    vars(stub).update(dict.fromkeys(names, object), RequestRouter=RequestRouter)
    modules = {"ray": ModuleType("ray"), "ray.serve": ModuleType("ray.serve"), stub.__name__: stub}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "quire.ray.prefix_router", raising=False)
    yield importlib.import_module("quire.ray.prefix_router").PrefixRouter
    sys.modules.pop("quire.ray.prefix_router", None)


class Routing:
    """What Serve does with a router."""

    def __init__(self, router: Any, num_replicas: int, **state: Any) -> None:
        self.router, self._num_sent = router, 0
        self.router.initialize_state(**state)
        self.replicas = [
            SimpleNamespace(replica_id=SimpleNamespace(unique_id=f"r{number}"))
            for number in range(num_replicas)
        ]
        router.update_replicas(self.replicas)

    def send(self, prompt: str, *, refuses: str = "", ends_early: bool = False) -> tuple[str, str]:
        """Return the replica that takes it, and the request's number; one may refuse it."""
        self._num_sent += 1
        number = str(self._num_sent)
        body = json.dumps({"prompt": prompt, "max_tokens": 1}).encode()
        pending = SimpleNamespace(
            args=[{"headers": [], "body": body}],
            metadata=SimpleNamespace(internal_request_id=number),
        )
        ranks = asyncio.run(self.router.choose_replicas(self.replicas, pending))
        taken = next(each for rank in ranks for each in rank if name_of(each) != refuses)
        if ends_early:
            self.router.on_request_completed(taken.replica_id, number)
        self.router.on_request_routed(pending, taken.replica_id, None)
        return name_of(taken), number

    def num_prefill(self, name: str) -> int:
        found: int = self.router._load(name).num_prefill_tokens
        return found


def name_of(replica: Any) -> str:
    return str(replica.replica_id.unique_id)


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_replicas_take_turns(prefix_router: type[Any], num_replicas: int) -> None:
    routing = Routing(prefix_router(), num_replicas, policy="round-robin")
    chosen = [routing.send("a")[0] for _ in range(2 * num_replicas)]
    assert chosen == [f"r{number}" for number in range(num_replicas)] * 2


def test_a_prompt_in_flight_counts_until_it_is_answered(prefix_router: type[Any]) -> None:
    routing = Routing(prefix_router(), 2, policy="least-load")
    name, number = routing.send("long " * 4000)
    assert routing.num_prefill(name) >= 5000
    assert {routing.send(f"{place}")[0] for place in range(4)} == {"r0", "r1"} - {name}
    routing.router.on_request_completed(SimpleNamespace(unique_id=name), number)
    assert routing.num_prefill(name) == 0


def test_an_end_that_comes_first_is_an_end(prefix_router: type[Any]) -> None:
    routing = Routing(prefix_router(), 2)
    for place in range(200):
        name, _ = routing.send(f"{place} " * 400, ends_early=place % 2 == 0)
        assert routing.num_prefill(name) == 0 or place % 2
        if place % 2:
            routing.router.on_request_completed(SimpleNamespace(unique_id=name), f"{place + 1}")
    assert routing.num_prefill("r0") == routing.num_prefill("r1") == 0
    assert not routing.router._shares and not routing.router._early
    for place in range(3000):  # of requests that were refused
        routing.router.on_request_completed(SimpleNamespace(unique_id="r0"), f"x{place}")
    assert len(routing.router._early) == 1024


def test_a_beginning_is_known_of_the_replica_that_took_it(prefix_router: type[Any]) -> None:
    routing = Routing(prefix_router(), 2)
    prompt = "The knight went into the forest. " * 100
    refused, _ = Routing(prefix_router(), 2).send(prompt)
    taken, number = routing.send(prompt, refuses=refused)
    assert taken != refused
    # heard of later than of the one that took it
    routing.router.on_request_completed(SimpleNamespace(unique_id=refused), number)
    assert routing.num_prefill(taken) > 0
    assert routing.num_prefill(refused) == 0
    routing.router.on_request_completed(SimpleNamespace(unique_id=taken), number)
    for _ in range(3):
        again, number = routing.send(prompt)
        routing.router.on_request_completed(SimpleNamespace(unique_id=again), number)
        assert again == taken
