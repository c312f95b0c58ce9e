"""The application on Ray Serve: a real cluster, whose nodes are processes of this machine."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from ray_clusters import ray_cluster

from quire import LLM, SamplingParams

pytestmark = [
    pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("default"),
]  # fmt: skip
MODEL = "quire-storyteller"
PROMPT = "Once upon a time there was a"
LONG = "The knight went into the forest and the fox was there. " * 12


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_cluster(num_nodes=3) as found:
        yield found


class Served:
    """The application behind a proxy of Serve's."""

    def __init__(self, port: int, prefix: str) -> None:
        self._port, self._prefix = port, prefix

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        try:
            content = None if body is None else json.dumps(body).encode()
            connection.request(
                method, self._prefix + path, content, {"content-type": "application/json"}
            )
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def complete(self, **body: Any) -> Any:
        status, content = self.ask("POST", "/v1/completions", {"model": MODEL, **body})
        assert status == 200, content
        return json.loads(content)


@pytest.fixture(scope="module")
def port(cluster: Any) -> Iterator[int]:
    from ray import serve

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        free: int = sock.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": free}, proxy_location="HeadOnly")
    yield free
    serve.shutdown()


def deploy(port: int, prefix: str = "", **args: Any) -> Served:
    from ray import serve

    from quire.ray import build_app

    engine = {"kv_cache_memory": "16MiB", **args.pop("engine", {})}
    app = build_app({"model": MODEL, "engine": engine, **args})
    serve.run(app, name="quire", route_prefix=prefix or "/")
    return Served(port, prefix)


def num_running(name: str = "EngineReplica") -> int:
    from ray import serve

    deployment = serve.status().applications["quire"].deployments[name]
    return int(deployment.replica_states.get("RUNNING", 0))


def test_a_replica_on_two_nodes_answers_as_one_process_does(port: int) -> None:
    params = SamplingParams(max_tokens=16, temperature=0)
    with LLM(MODEL, kv_cache_memory="16MiB", num_threads=1) as llm:
        expected = llm.generate(PROMPT, params)[0].outputs[0].text
    served = deploy(
        port, "/stories", engine={"tensor_parallel_size": 2}, replicas={"num_replicas": 1}
    )
    answer = served.complete(prompt=PROMPT, max_tokens=16, temperature=0)
    assert answer["choices"][0]["text"] == expected
    status, content = served.ask(
        "POST", "/v1/completions",
        {"model": MODEL, "prompt": PROMPT, "max_tokens": 16, "temperature": 0, "stream": True},
    )  # fmt: skip
    events = [line[6:] for line in content.decode().split("\n\n") if line.startswith("data: ")]
    assert status == 200 and events[-1] == "[DONE]" and len(events) > 8
    assert "".join(json.loads(each)["choices"][0]["text"] for each in events[:-1]) == expected
    assert served.ask("GET", "/readyz")[0] == 200
    status, content = served.ask("POST", "/v1/completions", {"model": MODEL, "prompt": 7.5})
    assert status in (400, 422) and b'"error"' in content


def test_requests_go_where_their_beginning_is_cached_and_replicas_follow_what_waits(
    port: int,
) -> None:
    scaling = {
        "min_replicas": 1, "max_replicas": 2, "initial_replicas": 2, "target_waiting_tokens": 64,
        "upscale_delay_s": 0.2, "downscale_delay_s": 5.0, "metrics_interval_s": 0.2,
        "look_back_period_s": 1.0,
    }  # fmt: skip
    served = deploy(port, engine={"max_num_seqs": 1}, replicas=scaling)
    prompts = [f"Story {number}: {LONG}" for number in range(4)]
    for prompt in prompts * 2:
        answer = served.complete(prompt=prompt, max_tokens=1, temperature=0)
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0.8 * answer["usage"]["prompt_tokens"], "another replica has computed it"
    assert until(lambda: num_running() == 1), "nothing waits, and no replica has ended"
    crowd = [
        threading.Thread(
            target=served.complete,
            kwargs={"prompt": f"{number} {LONG}", "max_tokens": 100, "ignore_eos": True},
        )
        for number in range(24)
    ]
    for each in crowd:
        each.start()
    assert until(lambda: num_running() == 2), "many tokens wait, and no replica has begun"
    for each in crowd:
        each.join(240)
        assert not each.is_alive()


def until(condition: Any, seconds: float = 120.0) -> bool:
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s:
        if condition():
            return True
        time.sleep(0.2)
    return False
