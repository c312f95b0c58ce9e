"""The router over HTTP: requests reach back ends and come back as they are, whatever fails on the
way. Back ends are small servers in the same event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from fake_backend import FakeBackend, answer_text, backends
from routed import Routed, routed, words

from quire.common.http_client import HttpClient, HttpError, HttpRequest
from quire.config.route import RouteConfig
from quire.errors import ConfigError
from quire.server.quota.tenants import Tenant, key_ring

Scene = Callable[[Routed, list[FakeBackend]], Coroutine[Any, Any, None]]
BODY = {"model": "m", "prompt": "once", "max_tokens": 6}


def play(scene: Scene, *names: str, **options: Any) -> None:
    """Run a scene with these back ends and a router over them."""

    async def run() -> None:
        async with backends(*names) as made, routed(*(each.url for each in made), **options) as up:
            async with asyncio.timeout(30):
                await scene(up, made)

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    """Wait for it."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def _error(answer: Any) -> tuple[int, str]:
    return answer.status, json.loads(answer.body)["error"]["code"]


def test_requests_pass_as_they_are() -> None:
    async def scene(up: Routed, made: list[FakeBackend]) -> None:
        assert words(await up.stream(BODY)) == answer_text(BODY)
        odd = {**BODY, "unknown": [1, {"a": "\u00e9"}]}
        answer = await up.post("/v1/completions", odd, x_custom="kept", authorization="Bearer mine")
        assert json.loads(answer.body)["text"] == answer_text(BODY)
        (seen,) = [each for each in made if odd in each.bodies]
        assert seen.headers[-1]["x-custom"] == "kept"
        assert seen.headers[-1]["authorization"] == "Bearer mine"
        assert seen.headers[-1]["x-request-id"] == answer.headers["x-request-id"]
        for path in ("/v1/../metrics", "/v1/%2e%2e/x", "/v1//x", "/inspect/steps", "/v1/a/./b",
                     "/v1/x%2f..%2f..%2fadmin/drain", "/v1/a%2f/b", "/v1/..%5cadmin"):  # fmt: skip
            assert _error(await up.get(path)) == (404, "unknown_url")

    play(scene, "a", "b")


def test_what_is_said_of_one_connection_stays_there() -> None:
    async def odd(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(
            b"HTTP/1.1 200 OK\r\nconnection: close\r\nx-hop: 1\r\nx-end: 2\r\n"
            b"set-cookie: a=1, b\r\nvary: a\r\nconnection: x-hop\r\nset-cookie: c=2\r\nvary: b\r\n"
            b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
        )
        writer.close()

    heads: list[bytes] = []

    async def run() -> None:
        server = await asyncio.start_server(odd, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, routed(url, health_interval_s=60) as up:
            await up.app.prober.probe_all()
            heads.clear()
            asked = {"connection": "keep-alive, x-hop", "x-hop": "1", "x-end": "2"}
            got = await up.client.request(HttpRequest("GET", "/v1/files/x", headers=asked))
            assert got.body == b"hello"
            assert "content-length" not in got.headers  # of two lengths, the other one counted
            assert "x-hop" not in got.headers and got.headers["x-end"] == "2"
            assert b"x-hop" not in heads[0] and b"x-end: 2" in heads[0]
            assert got.headers["vary"] == "a, b"
            assert got.headers["set-cookie"].split("\n") == ["a=1, b", "c=2"]  # two headers
            reader, writer = await asyncio.open_connection(
                *up.url.removeprefix("http://").split(":")
            )
            writer.write(
                b"GET /v1/files/x HTTP/1.1\r\nhost: x\r\nconnection: x-hop\r\nx-hop: 1\r\n"
                b"x-end: 2\r\nconnection: close\r\nx-end: 3\r\ncookie: a=1\r\ncookie: b=2\r\n\r\n"
            )
            assert (await reader.read()).endswith(b"hello\r\n0\r\n\r\n")
            writer.close()
            assert b"x-hop" not in heads[1] and b"x-end: 2, 3\r\n" in heads[1]
            assert b"cookie: a=1; b=2\r\n" in heads[1]
            assert _error(await up.client.request(HttpRequest("TRACE", "/v1/files/x"))) == (
                405, "method_not_allowed",
            )  # fmt: skip

    asyncio.run(run())


def test_a_back_end_that_is_gone_costs_a_client_nothing() -> None:
    async def scene(up: Routed, made: list[FakeBackend]) -> None:
        await up.stream(BODY)
        await made[0].kill()
        for number in range(12):
            body = {**BODY, "prompt": f"p{number}"}
            assert words(await up.stream(body)) == answer_text(body)
        assert up.app.fleet.replicas[0].num_by_outcome.get("failed", 0) <= 2
        await until(lambda: up.app.fleet.state(up.app.fleet.replicas[0]).value == "down")
        await made[0].start()
        await until(
            lambda: up.app.fleet.replicas[0].breaker.may_send(asyncio.get_running_loop().time())
        )
        seen = len(made[0].bodies)
        await asyncio.gather(*(up.stream({**BODY, "prompt": f"q{n}"}) for n in range(8)))
        assert len(made[0].bodies) > seen

    play(scene, "a", "b", policy="round-robin")


def test_a_stream_that_breaks_off_ends_with_an_error_and_no_token_comes_twice() -> None:
    async def scene(up: Routed, made: list[FakeBackend]) -> None:
        made[0].cut_after = made[1].cut_after = 3
        events = await up.stream(BODY)
        assert [event["word"] for event in events[:-1]] == answer_text(BODY).split()[:3]
        assert events[-1]["error"]["code"] == "backend_failed"
        assert len(made[0].bodies) + len(made[1].bodies) == 1

    play(scene, "a", "b")


def test_what_breaks_off_before_its_first_byte_is_asked_for_again() -> None:
    async def scene(up: Routed, made: list[FakeBackend]) -> None:
        made[0].cut_after = 0
        for number in range(4):
            body = {**BODY, "prompt": f"p{number}"}
            events = await up.stream(body)
            # the head of an answer may have come, no event has
            assert words(events) == answer_text(body)

    play(scene, "a", "b", policy="round-robin")


@pytest.mark.parametrize(
    ("status", "body", "is_retried"),
    [
        (503, b'{"error": {"code": "draining"}}', True),
        (429, b'{"error": {"code": "queue_full"}}', True),
        (429, b'{"error": {"code": "tenant_rate"}}', False),
        (400, b'{"error": {"message": "bad"}}', False),
        (500, b'{"error": {"message": "bug"}}', False),
    ],
)
def test_refusals(status: int, body: bytes, is_retried: bool) -> None:
    async def scene(up: Routed, made: list[FakeBackend]) -> None:
        made[0].status, made[0].body = status, body
        answer = await up.post("/v1/completions", BODY)
        assert answer.status == (200 if is_retried else status)
        made[1].status, made[1].body = status, body
        answer = await up.post("/v1/completions", BODY)
        assert answer.status == status and answer.body == body

    play(scene, "a", "b", policy="round-robin", health_interval_s=60)


@pytest.mark.parametrize(
    "answer",
    [
        b"200 OK\r\ncontent-length: \xb2",
        b"200 OK\r\ncontent-length: 2\r\nx-a: b\nset-cookie: c=d",
        b"000 None\r\ncontent-length: 2",
    ],
)
def test_an_answer_that_is_none_is_asked_for_elsewhere(answer: bytes) -> None:
    async def odd(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 " + answer + b"\r\n\r\n{}")
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(odd, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with (
            server,
            backends("a") as made,
            routed(url, made[0].url, health_interval_s=60, policy="round-robin") as up,
        ):
            for _ in range(3):
                assert (await up.post("/v1/completions", BODY)).status == 200
            assert up.app.fleet.replicas[0].num_by_outcome["failed"] > 0

    asyncio.run(run())


def test_what_stores_something_is_sent_once() -> None:
    async def scene(up: Routed, made: list[FakeBackend]) -> None:
        for each in made:
            each.is_silent = True
        asking = asyncio.create_task(up.post("/v1/batches", {"input_file_id": "f"}))
        await until(lambda: sum(len(each.trips) for each in up.app.fleet.replicas) == 1)
        (replica,) = [each for each in up.app.fleet.replicas if each.trips]
        up.app.fleet.give_up(replica)
        assert _error(await asking) == (502, "backend_failed")

    play(scene, "a", "b", health_interval_s=60)


def test_a_stored_answer_is_found_wherever_it_is() -> None:
    async def scene(up: Routed, made: list[FakeBackend]) -> None:
        made[2].stored.add("/v1/responses/resp_1")
        for _ in range(4):
            answer = await up.get("/v1/responses/resp_1")
            assert json.loads(answer.body) == {"of": "c"}
        assert (await up.get("/v1/responses/resp_2")).status == 404

    play(scene, "a", "b", "c", policy="round-robin")


def test_a_client_that_leaves_takes_its_request_back() -> None:
    async def scene(up: Routed, made: list[FakeBackend]) -> None:
        made[0].gap_s = 0.01
        for is_begun in (False, True):
            made[0].is_silent = not is_begun
            asking = asyncio.create_task(up.stream({**BODY, "max_tokens": 10**6}))
            await until(lambda: up.app.fleet.num_in_flight == 1)
            await asyncio.sleep(0.05)
            asking.cancel()
            await until(lambda: up.app.fleet.num_in_flight == 0 == up.app.num_in_flight)
            made[0].is_silent = False
        await until(lambda: made[0].num_cancelled >= 2)
        load = up.app.fleet.replicas[0].load
        assert (load.num_requests, load.tokens) == (0, 0)

    play(scene, "a", health_interval_s=60)


def test_a_back_end_that_says_nothing_is_given_up_and_its_requests_go_elsewhere() -> None:
    async def scene(up: Routed, made: list[FakeBackend]) -> None:
        made[0].is_silent = True
        bodies = [{**BODY, "prompt": f"p{number}"} for number in range(4)]
        answers = await asyncio.gather(*map(up.stream, bodies))
        assert [words(events) for events in answers] == [answer_text(body) for body in bodies]

    play(scene, "a", "b", policy="round-robin", health_interval_s=0.05, health_timeout_s=0.1)


def test_a_probe_that_trickles_keeps_no_other_waiting() -> None:
    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while not writer.transport.is_closing():
                writer.write(b"x")
                await asyncio.sleep(0.02)

    async def run() -> None:
        server = await asyncio.start_server(trickle, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        limits: dict[str, Any] = {
            "health_timeout_s": 0.1, "connect_timeout_s": 0.1, "health_interval_s": 60
        }  # fmt: skip
        async with server, routed(url, **limits) as up:
            async with asyncio.timeout(5):
                await up.app.prober.probe_all()
            assert not up.app.fleet.is_ready

    asyncio.run(run())


def test_silence_has_a_limit() -> None:
    async def scene(up: Routed, made: list[FakeBackend]) -> None:
        made[0].is_silent = True
        assert _error(await up.post("/v1/completions", BODY)) == (504, "backend_timeout")

    play(scene, "a", silence_timeout_s=0.2, health_interval_s=60)


def test_without_a_back_end_requests_wait_a_while_and_are_told_when_to_come_back() -> None:
    async def scene(up: Routed, made: list[FakeBackend]) -> None:
        await made[0].kill()
        answer = await up.post("/v1/completions", BODY)
        assert _error(answer) in ((503, "no_backend"), (502, "backend_failed"))
        answer = await up.post("/v1/completions", BODY)
        assert _error(answer) == (503, "no_backend") and int(answer.headers["retry-after"]) >= 1
        assert (await up.get("/readyz")).status == 503 and (await up.get("/livez")).status == 200
        asking = asyncio.create_task(up.stream(BODY, x_request_timeout_s="9"))
        await made[0].start()
        up.app.fleet.replicas[0].breaker.succeed()
        assert words(await asking) == answer_text(BODY)

    play(scene, "a", wait_timeout_s=0.4, health_interval_s=60)


def test_models_are_merged_and_requests_go_to_those_that_serve_theirs() -> None:
    async def scene(up: Routed, made: list[FakeBackend]) -> None:
        await until(lambda: all(each.models for each in up.app.fleet.replicas))
        made[0].models, made[1].models = ("m", "x"), ("m", "y")
        for replica in up.app.fleet.replicas:
            replica.models = None
        await up.app.prober.probe_all()
        listed = json.loads((await up.get("/v1/models")).body)
        assert [model["id"] for model in listed["data"]] == ["m", "x", "y"]
        for _ in range(4):
            await up.post("/v1/completions", {**BODY, "model": "y"})
        assert [len(each.bodies) for each in made] == [0, 4]
        assert (await up.post("/v1/completions", {**BODY, "model": "adapter"})).status == 200

    play(scene, "a", "b", policy="round-robin", health_interval_s=60)


def test_an_answer_that_has_no_body_has_no_length() -> None:
    async def scene(up: Routed, made: list[FakeBackend]) -> None:
        made[0].status, made[0].body = 204, b""
        for _ in range(2):  # on one connection
            answer = await up.post("/v1/completions", BODY)
            assert (answer.status, answer.body) == (204, b"")
            assert not {"content-length", "transfer-encoding"} & answer.headers.keys()

    play(scene, "a")


def test_back_ends_come_and_go_by_admin_calls() -> None:
    async def scene(up: Routed, made: list[FakeBackend]) -> None:
        async with backends("c") as (third,):
            answer = await up.post("/admin/backends", {"url": third.url})
            assert [each["url"] for each in json.loads(answer.body)["data"]][-1] == third.url
            await up.post("/admin/backends/drain", {"url": made[0].url})
            await up.delete(made[1].url)
            await asyncio.gather(*(up.stream({**BODY, "prompt": f"p{n}"}) for n in range(6)))
            assert [len(each.bodies) for each in (*made, third)] == [0, 0, 6]
            await up.post("/admin/backends", {"url": made[0].url})  # taken back
            made[0].gap_s = third.gap_s = 0.05
            streaming = asyncio.create_task(up.stream(BODY))
            await until(lambda: up.app.fleet.num_in_flight == 1)
            busy = next(each for each in up.app.fleet.replicas if each.trips)
            await up.delete(busy.name)
            assert busy in up.app.fleet.replicas
            assert words(await streaming) == answer_text(BODY)
            await until(lambda: busy not in up.app.fleet.replicas)
            assert _error(await up.post("/admin/backends", {"url": "ftp://x"})) == (
                400,
                "invalid_value",
            )
            assert (await up.delete("http://x")).status == 404
            wrong = await up.client.request(HttpRequest("PUT", "/admin/backends"))
            assert (wrong.status, wrong.headers["allow"]) == (405, "DELETE, GET, HEAD, POST")
            assert (await up.post("/admin/drain", {})).status == 200 and up.told == ["end"]

    play(scene, "a", "b", health_interval_s=60)


def test_what_all_back_ends_must_do_is_sent_to_each_and_refusals_are_named() -> None:
    async def scene(up: Routed, made: list[FakeBackend]) -> None:
        asked = {"lora_name": "sql", "lora_path": "sql"}
        answer = await up.post("/v1/load_lora_adapter", asked)
        assert answer.status == 200 and all(each.bodies == [asked] for each in made)
        made[0].status, made[0].body = 400, b'{"error": {"message": "no folder", "code": "c"}}'
        answer = await up.post("/v1/load_lora_adapter", asked)
        assert _error(answer) == (400, "c")
        said = f"1 of 3 back ends refused, {made[0].url}: no folder"
        assert json.loads(answer.body)["error"]["message"] == said
        assert all(len(each.bodies) == 2 for each in made)  # those behind it are asked, too
        made[0].body = b"<html>"
        await made[1].kill()
        answer = await up.post("/v1/unload_lora_adapter", {"lora_name": "sql"})
        assert b"2 of 3 back ends refused, " in answer.body and len(made[2].bodies) == 3

    play(scene, "a", "b", "c")


def test_what_back_ends_serve_is_known_as_soon_as_adapters_have_changed() -> None:
    """No probe comes meanwhile."""

    async def scene(up: Routed, made: list[FakeBackend]) -> None:
        def known() -> list[set[str] | None]:
            found = [each.models for each in up.app.fleet.replicas]
            return [None if each is None else set(each) for each in found]

        await up.app.prober.probe_all()
        assert known() == [{"m"}, {"m"}, {"m"}]
        made[0].status = 400
        made[1].models = made[2].models = ("m", "sql")
        asked = {"lora_name": "sql", "lora_path": "sql"}
        key = {"authorization": "Bearer mine"}
        assert (
            b"1 of 3 back ends refused"
            in (await up.post("/v1/load_lora_adapter", asked, **key)).body
        )
        assert known() == [{"m"}, {"m", "sql"}, {"m", "sql"}]
        assert all(each.headers[-1].get("authorization") == "Bearer mine" for each in made)
        made[0].status = 200
        body = {**BODY, "model": "sql"}
        await asyncio.gather(*(up.stream({**body, "prompt": f"p{n}"}) for n in range(8)))
        assert sum(each.get("model") == "sql" for each in made[0].bodies) == 0
        await made[1].kill()
        made[2].models = ("m",)
        await up.post("/v1/unload_lora_adapter", {"lora_name": "sql"})
        assert known() == [{"m"}, None, {"m"}], "one that does not say may serve anything"

    play(scene, "a", "b", "c", health_interval_s=60)


def test_an_earlier_list_of_models_does_not_replace_a_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene(up: Routed, made: list[FakeBackend]) -> None:
        prober, (replica,) = up.app.prober, up.app.fleet.replicas
        await prober.probe_all()
        get, may_go_on, is_held = prober._get, asyncio.Event(), asyncio.Event()

        async def held(*args: Any) -> tuple[int, bytes]:
            found = await get(*args)
            is_held.set()
            await may_go_on.wait()
            return found

        with monkeypatch.context() as patch:
            patch.setattr(prober, "_get", held)
            early = asyncio.create_task(prober._learn_models(replica, {}))
            await is_held.wait()
        made[0].models = ("m", "sql")
        await up.post("/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": "sql"})
        assert replica.models == frozenset({"m", "sql"})
        may_go_on.set()
        await early
        assert replica.models == frozenset({"m", "sql"})

    play(scene, "a", health_interval_s=60)


def test_draining_refuses_what_is_new_and_ends_what_is_not() -> None:
    async def scene(up: Routed, made: list[FakeBackend]) -> None:
        made[0].gap_s = 0.02
        streaming = asyncio.create_task(up.stream(BODY))
        await until(lambda: up.app.fleet.num_in_flight == 1)
        up.app.drain()
        assert _error(await up.post("/v1/completions", BODY)) == (503, "draining")
        assert (await up.get("/readyz")).status == 503
        assert words(await streaming) == answer_text(BODY)

    play(scene, "a")


def test_keys_limits_and_admins() -> None:
    ring = key_ring(
        [
            (Tenant("one", max_concurrency=1, requests_per_minute=3), ["sk-key-of-one"]),
            (Tenant("boss", is_admin=True), ["sk-key-of-boss"]),
        ]
    )

    async def scene(up: Routed, made: list[FakeBackend]) -> None:
        one, boss = "Bearer sk-key-of-one", "Bearer sk-key-of-boss"
        assert _error(await up.post("/v1/completions", BODY)) == (401, "invalid_api_key")
        made[0].gap_s = 0.02
        streaming = asyncio.create_task(up.stream(BODY, authorization=one))
        await until(lambda: up.app.num_in_flight == 1)
        refused = await up.post("/v1/completions", BODY, authorization=one)
        assert _error(refused) == (429, "tenant_concurrency")
        assert words(await streaming) == answer_text(BODY)
        # the router's keys are its own; back ends see the one for them
        assert {each.get("authorization") for each in made[0].headers} == {"Bearer sk-of-backends"}
        for _ in range(2):
            answer = await up.post("/v1/completions", BODY, authorization=one)
            assert answer.status == 200 and "x-ratelimit-remaining-requests" in answer.headers
        refused = await up.post("/v1/completions", BODY, authorization=one)
        assert _error(refused) == (429, "tenant_rate")
        assert _error(await up.get("/admin/backends", authorization=one)) == (403, "admin_needed")
        assert (await up.get("/admin/backends", authorization=boss)).status == 200

    play(scene, "a", keys=ring, backend_api_key="sk-of-backends", health_interval_s=60)


def test_without_keys_admin_calls_are_for_this_machine_alone() -> None:
    async def scene(up: Routed, made: list[FakeBackend]) -> None:
        assert _error(await up.get("/admin/backends")) == (403, "admin_needed")

    play(scene, "a", host="0.0.0.0")


def test_without_keys_a_page_in_a_browser_makes_no_admin_calls() -> None:
    async def scene(up: Routed, made: list[FakeBackend]) -> None:
        body = {"url": "http://127.0.0.1:9"}
        refused = await up.post("/admin/backends", body, origin="http://a.page")
        assert _error(refused) == (403, "admin_needed") and len(up.app.fleet.replicas) == 1
        assert (await up.post("/admin/drain", {}, origin="null")).status == 403 and not up.told
        assert (await up.get("/admin/backends")).status == 200

    play(scene, "a")


def test_limits_of_bodies_and_of_requests_in_flight() -> None:
    async def scene(up: Routed, made: list[FakeBackend]) -> None:
        big = {**BODY, "prompt": "x" * 5000}
        assert _error(await up.post("/v1/completions", big)) == (413, "request_too_large")
        made[0].gap_s = 0.05
        streams = [asyncio.create_task(up.stream(BODY)) for _ in range(2)]
        await until(lambda: up.app.num_in_flight == 2)
        assert _error(await up.post("/v1/completions", BODY)) == (429, "queue_full")
        await asyncio.gather(*streams)

    play(scene, "a", max_body_bytes=4000, max_in_flight=2)


@pytest.mark.slow
def test_a_client_that_reads_slowly_stops_the_back_end_and_loses_nothing() -> None:
    async def scene(up: Routed, made: list[FakeBackend]) -> None:
        body = {**BODY, "prompt": "p" * 20_000, "max_tokens": 2000, "stream": True}
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", up.client.address.port, limit=1 << 16
        )
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(data), data)
        )
        await asyncio.sleep(0.3)
        assert made[0].num_completed == 0  # 40 MB do not fit anywhere on the way
        text = (await reader.read(-1)).decode()
        assert text.count("data: {") == 2000 and "[DONE]" in text
        positions = [text.index(f'-{number}"') for number in range(0, 2000, 97)]
        assert positions == sorted(positions)
        writer.close()

    play(scene, "a")


def test_a_name_stands_for_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with backends("a") as (back,):
            addresses = ["127.0.0.1", "127.0.0.9"]

            def resolve(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
                return [(0, 0, 0, "", (address, port)) for address in addresses]

            monkeypatch.setattr(socket, "getaddrinfo", resolve)
            async with routed(f"dns+http://replicas:{back.port}", dns_interval_s=60) as up:
                await until(lambda: len(up.app.fleet.replicas) == 2)
                addresses.pop()
                await up.app.prober.resolve_all()
                (replica,) = up.app.fleet.replicas
                await up.post("/admin/backends/drain", {"url": back.url})
                await up.app.prober.resolve_all()
                assert replica.is_draining  # until it is added again
                await up.post("/admin/backends", {"url": back.url})
                assert replica.name == back.url
                await up.post("/v1/completions", BODY)
                assert back.headers[-1]["host"] == f"replicas:{back.port}"
                addresses.clear()
                up.app.prober.remove(f"dns+http://replicas:{back.port}")
                assert up.app.fleet.replicas == ()

    asyncio.run(run())


def test_metrics_tell_of_each_back_end() -> None:
    async def scene(up: Routed, made: list[FakeBackend]) -> None:
        await up.stream(BODY)
        text = (await up.get("/metrics")).body.decode()
        assert f'quire:router_backend_up{{backend="{made[0].url}"}} 1.0' in text
        assert 'outcome="answered"} 1.0' in text
        assert 'handler="/v1/completions"' in text

    play(scene, "a")


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "best"},
        {"load_factor": 0.5},
        {"port": 70000},
        {"health_path": "x"},
        {"health_path": "/a b"},
        {"health_path": "/\r\nx: y"},
        {"session_header": ""},
        {"session_header": "x session"},
        {"silence_timeout_s": 0},
        {"silence_timeout_s": float("inf")},
        {"health_interval_s": float("nan")},
        {"load_factor": float("nan")},
        {"load_factor": float("inf")},
        {"chunk_bytes": 512.5},
        {"memory_chunks": True},
        {"max_in_flight": "9"},
        {"port": -1},
        {"max_retries": -1},
    ],
)
def test_options_that_cannot_work_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(options))}="):
        RouteConfig(**options)


@pytest.mark.parametrize("name", ["port", "max_retries", "drain_timeout", "prefill_min_bytes"])
def test_options_that_may_be_nothing(name: str) -> None:
    assert getattr(RouteConfig(**{name: 0}), name) == 0  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"^{name}=-1 must be a.* of at least 0$"):
        RouteConfig(**{name: -1})  # type: ignore[arg-type]


def test_the_test_client_can_tell_a_broken_answer() -> None:
    async def run() -> None:
        async with backends("a") as (back,), HttpClient(back.url) as client:
            back.cut_after = 1
            data = json.dumps({**BODY, "stream": True}).encode()
            with pytest.raises(HttpError):
                await client.request(HttpRequest("POST", "/v1/completions", data))

    asyncio.run(run())


def test_a_back_end_that_takes_no_connections_may_finish_what_it_has_begun() -> None:
    async def scene(up: Routed, made: list[FakeBackend]) -> None:
        made[0].gap_s = 0.03
        streaming = asyncio.create_task(up.stream(BODY))
        await until(lambda: len(made[0].bodies) == 1)
        await made[0].close()
        await up.app.prober.probe_all()
        replica = up.app.fleet.replicas[0]
        assert up.app.fleet.state(replica).value == "down"
        assert words(await streaming) == answer_text(BODY)

    play(scene, "a", health_interval_s=60)
