"""Prompts that other back ends compute: handed over once, and computed where they are answered
whenever that fails."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fake_backend import FakeBackend, answer_text, backends
from ports import reserved_port
from routed import Routed, routed, words
from served import DEADLINE_S, Served, routing, serving
from stopped import has_ended

from quire.common.http_client import HttpRequest
from quire.config.route import RouteConfig
from quire.errors import ConfigError
from quire.router.prefill import PrefillStage

FOUND = {"do_remote_prefill": True, "remote_request_id": "lease", "remote_host": "h"}
PULLED, PREFILLS = "quire:kv_transfer_prompts_pulled_total", "quire:router_prefills_total"
BODY = {"model": "m", "prompt": "once " * 200, "max_tokens": 6, "seed": 7}


class Prefiller:
    """A server that says that it has computed prompts."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []
        self.answer: dict[str, Any] = {"kv_transfer_params": FOUND}
        self.status, self.is_silent, self.url = 200, False, ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := (await reader.readuntil(b"\r\n\r\n")).decode().lower():
            length = int(head.split("content-length: ")[1].split("\r\n")[0])
            self.bodies.append(json.loads(await reader.readexactly(length)))
            while self.is_silent:
                await asyncio.sleep(0.01)
            data = json.dumps(self.answer).encode()
            start = f"HTTP/1.1 {self.status} X\r\ncontent-length: {len(data)}\r\n\r\n"
            writer.write(start.encode() + data)


@asynccontextmanager
async def prefilling() -> AsyncIterator[Prefiller]:
    made = Prefiller()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await made.serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield made
    made.is_silent = False
    server.close()


def play(scene: Any, **options: Any) -> None:
    async def run() -> None:
        async with prefilling() as prefiller, backends("a") as made:
            urls = [each.url for each in made]
            settings = {"prefill_backend": (prefiller.url,), **options}
            async with routed(*urls, **settings) as up, asyncio.timeout(30):
                await scene(up, prefiller, made[0])

    asyncio.run(run())


def test_a_prompt_is_computed_elsewhere_and_its_place_goes_with_the_request() -> None:
    async def scene(up: Routed, prefiller: Prefiller, backend: FakeBackend) -> None:
        assert words(await up.stream({**BODY, "n": 2, "stop": ["x"]})) == answer_text(BODY)
        (asked,) = prefiller.bodies
        assert asked["max_tokens"] == 1 and asked["stream"] is False and "n" not in asked
        assert asked["kv_transfer_params"]["do_remote_decode"] is True
        (seen,) = backend.bodies
        assert seen["kv_transfer_params"] == FOUND
        assert (seen["max_tokens"], seen["n"], seen["stream"]) == (6, 2, True)
        page = (await up.get("/metrics")).body.decode()
        assert 'quire:router_prefills_total{outcome="handed_over"} 1.0' in page

    play(scene)


@pytest.mark.parametrize(
    "body",
    [
        {**BODY, "prompt": "short"},
        {**BODY, "prompt": ["one " * 200, "two " * 200]},
        {**BODY, "kv_transfer_params": {"do_remote_prefill": False}},
    ],
    ids=["short", "several", "a proxy's own"],
)
def test_what_is_not_to_be_divided_goes_as_it_is(body: Any) -> None:
    async def scene(up: Routed, prefiller: Prefiller, backend: FakeBackend) -> None:
        assert (await up.post("/v1/completions", body)).status == 200
        assert prefiller.bodies == [] and backend.bodies == [body]

    play(scene)


@pytest.mark.parametrize("failure", ["status", "no params", "silent", "gone"])
def test_a_prefill_back_end_that_fails_costs_no_request(failure: str) -> None:
    async def scene(up: Routed, prefiller: Prefiller, backend: FakeBackend) -> None:
        prefiller.status = 503 if failure == "status" else 200
        prefiller.answer = {} if failure == "no params" else prefiller.answer
        prefiller.is_silent = failure == "silent"
        for _ in range(2):
            assert words(await up.stream(BODY)) == answer_text(BODY)
        assert all("kv_transfer_params" not in each for each in backend.bodies)
        page = (await up.get("/metrics")).body.decode()
        assert 'quire:router_prefills_total{outcome="failed"} 2.0' in page

    options: dict[str, Any] = {"prefill_timeout_s": 0.2}
    if failure == "gone":
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # and does not listen
            options["prefill_backend"] = (f"http://127.0.0.1:{taken.getsockname()[1]}",)
            play(scene, **options)
    else:
        play(scene, **options)


@pytest.mark.parametrize(("status", "is_failure"), [(400, False), (429, False), (404, True)])
def test_a_refusal_of_one_request_is_no_failure_of_the_back_end(
    status: int, is_failure: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(up: Routed, prefiller: Prefiller, backend: FakeBackend) -> None:
        prefiller.status, prefiller.answer = status, {"error": {"message": "no"}}
        for _ in range(2):
            assert words(await up.stream(BODY)) == answer_text(BODY)
        assert len(prefiller.bodies) == 2
        assert ("does not compute prompts" in caplog.text) == is_failure

    play(scene)


def test_half_of_a_surrogate_pair_is_handed_on_as_it_came() -> None:
    async def scene(up: Routed, prefiller: Prefiller, backend: FakeBackend) -> None:
        body = {**BODY, "prompt": "once " * 200 + "\ud83d", "user": "\udc00"}
        assert (await up.post("/v1/completions", body)).status == 200
        assert prefiller.bodies[0]["prompt"] == backend.bodies[0]["prompt"] == body["prompt"]

    play(scene)


def test_a_number_that_overflows_is_handed_on_as_it_came() -> None:
    async def scene(up: Routed, prefiller: Prefiller, backend: FakeBackend) -> None:
        data = json.dumps(BODY).replace('"seed": 7', '"seed": 1e999').encode()
        asked = HttpRequest("POST", "/v1/completions", data)
        assert (await up.client.request(asked)).status == 200
        assert prefiller.bodies == [] and backend.bodies == [json.loads(data)]

    play(scene)


def test_a_wrong_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not a URL"):
        PrefillStage(RouteConfig(backend=("http://a:1",), prefill_backend=("ftp://x",)))


def _options(role: str, port: int) -> tuple[str, ...]:
    extra = {"pull_timeout_s": 2.0}
    config = {"kv_connector": "TcpConnector", "kv_role": role, "kv_port": port}
    return "--kv-transfer-config", json.dumps(config | {"kv_connector_extra_config": extra})


def _ask(url: str, number: int) -> str:
    prompt = f"Story {number}. " + "Once upon a time there was a little fox in a wood. " * 12
    body = {"prompt": prompt, "seed": number, "max_tokens": 12, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=DEADLINE_S)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def _counted(server: Served, name: str, label: str = "") -> float:
    """The sum of a metric's series that have a label."""
    lines = server.get("/metrics").text.splitlines()
    named = [line for line in lines if line.startswith(f"{name}{{") and label in line]
    assert named, f"there is no {name}"
    return sum(float(line.split()[-1]) for line in named)


def _clear_cache(server: Served) -> None:
    answer = httpx.delete(f"{server.url}/v1/cache", timeout=DEADLINE_S)
    assert answer.status_code == 200 and answer.json()["num_blocks"] > 0, answer.text


@pytest.mark.slow
def test_real_servers_whose_producer_is_stopped_and_killed_answer_every_request() -> None:
    port = reserved_port()
    with (
        serving(*_options("kv_producer", port)) as producer,
        serving(*_options("kv_consumer", port)) as consumer,
    ):
        producer.await_ready()
        consumer.await_ready()
        alone = {number: _ask(producer.url, number) for number in range(24)}
        _clear_cache(producer)  # so that it computes what it hands over
        options = ("--prefill-timeout-s", "3")
        with routing(
            "--backend", consumer.url, "--prefill-backend", producer.url, *options
        ) as router:
            router.await_ready()
            for number in range(8):
                assert _ask(router.url, number) == alone[number]
            num_pulled = _counted(consumer, PULLED)
            assert num_pulled >= 4 and _counted(router, PREFILLS, '"handed_over"') >= num_pulled
            texts: dict[int, str] = {}

            def ask(number: int) -> None:
                texts[number] = _ask(router.url, number)

            asking = [threading.Thread(target=ask, args=(number,)) for number in range(8, 24)]
            rng, pids = random.Random(3), (producer.engine_pid, producer.process.pid)
            for number, thread in enumerate(asking):
                thread.start()
                threading.Event().wait(rng.random() / 10)
                for at, how in ((5, signal.SIGSTOP), (11, signal.SIGKILL)):
                    for pid in pids if number == at else ():
                        os.kill(pid, how)
            for thread in asking:
                thread.join(DEADLINE_S)
            assert texts == {number: alone[number] for number in range(8, 24)}
            # ten came when it was stopped or gone
            assert _counted(router, PREFILLS, '"failed"') >= 10
            assert _counted(router, PREFILLS) == 24 and all(map(has_ended, pids))
            consumer.await_idle()
            assert consumer.progress()["num_restarts"] == 0
