"""`quire route` as a process, before real servers: the answers are theirs, a killed one costs at
most the streams that it had begun, and SIGTERM drains."""

from __future__ import annotations

import os
import signal
import threading

import httpx
import pytest
from served import DEADLINE_S, Served, listening, routing, serving

from quire.cli.main import main

BODY = {"prompt": "Once upon a time", "seed": 5, "max_tokens": 24, "ignore_eos": True}


def _ask(url: str, number: int) -> str:
    body = {**BODY, "prompt": f"Story {number}: once upon a time"}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=DEADLINE_S)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


@pytest.mark.slow
def test_real_servers_behind_it() -> None:
    with serving() as one, serving() as two:
        one.await_ready()
        two.await_ready()
        alone = [_ask(one.url, number) for number in range(12)]
        with routing("--backend", one.url, "--backend", two.url) as router:
            router.await_ready()
            assert len(listening(router.process.pid)) == 1
            models = router.get("/v1/models").json()["data"]
            assert [model["id"] for model in models] == ["quire-storyteller"]
            texts: dict[int, str] = {}

            def ask(number: int) -> None:
                texts[number] = _ask(router.url, number)

            threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
            for thread in threads:
                thread.start()
            os.kill(two.process.pid, signal.SIGKILL)
            for thread in threads:
                thread.join(DEADLINE_S)
            assert [texts.get(number) for number in range(12)] == alone
            _drains(router)


def _drains(router: Served) -> None:
    """SIGTERM lets a stream end, and then ends the process."""
    body = {**BODY, "stream": True, "max_tokens": 200}
    lines: list[str] = []
    with httpx.stream(
        "POST", f"{router.url}/v1/completions", json=body, timeout=DEADLINE_S
    ) as response:
        for line in filter(None, response.iter_lines()):
            if not lines:
                router.process.send_signal(signal.SIGTERM)
            lines.append(line)
    assert lines[-1] == "data: [DONE]" and len(lines) > 50
    assert router.process.wait(DEADLINE_S) == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "no back end is given"),
        (["--backend", "ftp://x"], "is not a URL"),
        (["--backend", "http://x", "--policy", "best"], "invalid choice"),
        (["--backend", "http://x", "--load-factor", "0.5"], "load_factor"),
    ],
)
def test_mistakes_are_one_line(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["route", "--port", "0", *options]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
