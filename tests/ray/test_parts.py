"""What the application for Ray Serve consists of, without a cluster: settings, the exchange of one
request, the ingress, and when there are to be more replicas."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

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
        ({"model": "m", "num_ingresses": 0}, "num_ingresses=0 must be at least 1"),
        (
            {"model": "m", "engine": {"tensor_parallel_size": 2,
                                      "distributed_executor_backend": "mp"}},
            "placed by Ray here",
        ),
    ],
)  # fmt: skip
def test_a_mistake_is_said_before_anything_is_deployed(args: dict[str, Any], message: str) -> None:
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
        ingress = Ingress(Handle(lambda request: Answer(run(echo, request))), 100)
        return await exchange(ingress, b"0123456789")

    start, *pieces = asyncio.run(ask())
    assert start["status"] == 201 and (b"x-request-id", b"7") in start["headers"]
    assert b"".join(each["body"] for each in pieces).endswith(b"?a=1 0123456789")
    assert [each["more_body"] for each in pieces] == [True, True, False]


def test_a_body_that_is_too_large_never_reaches_a_replica() -> None:
    def never(request: dict[str, Any]) -> Answer:
        raise AssertionError("it was passed on")

    start, end = asyncio.run(exchange(Ingress(Handle(never), 9), b"0123456789"))
    assert start["status"] == 413 and b"larger than 9 bytes" in end["body"]


def test_replicas_that_are_gone_are_an_error_that_says_try_again() -> None:
    async def gone() -> AsyncIterator[Any]:
        raise ConnectionError("the replica is gone")
        yield

    start, end = asyncio.run(exchange(Ingress(Handle(lambda _: Answer(gone())), 99), b"{}"))
    assert start["status"] == 503 and (b"retry-after", b"1") in start["headers"]
    assert json.loads(end["body"])["error"]["message"] == "no replica can answer now; try again"


def test_a_request_whose_client_leaves_is_cancelled() -> None:
    async def ask() -> list[Message]:
        async def pieces() -> AsyncIterator[Any]:
            yield 200, []
            await answer.is_cancelled.wait()
            raise ConnectionError("cancelled")

        answer = Answer(pieces())
        return await exchange(Ingress(Handle(lambda _: answer), 99), b"{}", leaves=True)

    assert [each["type"] for each in asyncio.run(ask())] == ["http.response.start"]


def test_the_ingress_starts_and_ends() -> None:
    async def live() -> list[str]:
        asked = ["lifespan.startup", "lifespan.shutdown"]
        said: list[str] = []

        async def receive() -> Message:
            return {"type": asked.pop(0)}

        async def send(message: Message) -> None:
            said.append(message["type"])

        await Ingress(Handle(lambda _: None), 9).answer({"type": "lifespan"}, receive, send)  # type: ignore[arg-type, return-value]
        return said

    assert asyncio.run(live()) == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
