"""`quire chat --url`: turns, streams, errors and Ctrl-C,
against a server with known answers and against the real one."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from fake_server import FakeServer, Plan, fake_server
from servers import serve_model

from quire.cli.main import main

Chat = Callable[..., tuple[int, str, str]]


@pytest.fixture
def chat(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Chat:
    """Runs a chat with these lines typed; returns (exit code, stdout, stderr)."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def run(typed: str, url: str, *options: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        code = main(["chat", "--url", url, *options])
        return code, *capsys.readouterr()

    return run


def asked(server: FakeServer) -> list[list[dict[str, Any]]]:
    return [post.body["messages"] for post in server.posts]


def test_turns_send_the_history_and_options(chat: Chat) -> None:
    with fake_server(lambda seen: Plan(pieces=["Hel", "lo\x1b[31m"])) as server:
        options = [
            "--system",
            "Be kind.",
            "--temperature",
            "0.5",
            "--max-tokens",
            "9",
            "--api-key",
            "k",
            "--verbose",
        ]
        code, out, err = chat("one\ntwo\n/reset\nthree\n", f"{server.url}/v1/", *options)
        first, second, third = asked(server)
        post = server.posts[0]
    # what a server says cannot steer the terminal
    assert code == 0 and out == "Hello\ufffd[31m\n" * 3
    system, one = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "one"}
    assert first == [system, one]
    assert second == [
        *first,
        {"role": "assistant", "content": "Hello\x1b[31m"},
        {"role": "user", "content": "two"},
    ]
    assert third == [system, {"role": "user", "content": "three"}]
    assert (
        post.body["temperature"] == 0.5
        and post.body["max_tokens"] == 9
        and post.body["model"] == "fake"
    )
    assert "top_p" not in post.body and post.headers["authorization"] == "Bearer k"
    assert "11 prompt tokens; 2 in the answer; first after" in err


def test_what_cannot_be_answered_is_said_and_taken_back(chat: Chat) -> None:
    plans = iter([Plan(status=429), Plan(error="no luck", pieces=[]), Plan(pieces=["yes"])])
    with fake_server(lambda seen: next(plans)) as server:
        code, out, err = chat("one\ntwo\nthree\n", server.url, "--model-name", "own")
        assert [len(messages) for messages in asked(server)] == [1, 1, 1]
        assert server.seen[0].method == "POST"  # a name that is given is not asked for
    assert code == 0 and out == "yes\n"
    assert "not answered: the server answers 429: no" in err and "not answered: no luck" in err


def test_an_answer_that_breaks_off_counts_as_far_as_it_got(chat: Chat) -> None:
    plans = iter([Plan(pieces=["half"], is_cut=True), Plan(pieces=["x"])])
    with fake_server(lambda seen: next(plans)) as server:
        _, out, err = chat("one\ntwo\n", server.url)
        assert asked(server)[1][1] == {"role": "assistant", "content": "half"}
    assert out.startswith("half [stopped]\n") and "broken off: the server broke off" in err


def test_the_real_server_remembers(chat: Chat) -> None:
    with serve_model() as server:
        code, out, err = chat(
            "Tell me a story about a fox.\nAnd a cat.\n",
            server.url,
            "--max-tokens",
            "12",
            "--verbose",
        )
    assert code == 0 and len(out.splitlines()) == 2, err
    assert (
        "12 in the answer" in err
        and "0 of them from the cache" in err
        and err.count("prompt tokens") == 2
    )


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--url", "http://127.0.0.1:1"], "cannot connect to 127.0.0.1:1: Connection refused"),
        (["--url", "ftp://x"], "not a URL"),
        (
            ["--url", "x", "--max-model-len", "9"],
            "--max-model-len is for a model that is loaded here",
        ),
        (["--url", "x", "--chat-template", "f"], "--chat-template is for a model"),
        (["model", "--url", "x"], "either a MODEL"),
        ([], "give a MODEL to load, or --url"),
        (["model", "--api-key", "k"], "are for a server"),
    ],
)
def test_wrong_options_are_one_line(
    options: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", *options]) == 2
    err = capsys.readouterr().err
    assert part in err and err.count("\n") == 1


def test_interrupt_stops_the_answer_but_not_the_chat() -> None:
    with fake_server(lambda seen: Plan(pieces=["word "] * 4000, gap_s=0.1)) as server:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "quire", "chat", "--url", server.url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("hello\n")
        process.stdin.flush()
        process.stdout.read(10)
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline().endswith(" [stopped]\n")  # not after minutes, by itself
        _, err = process.communicate("/reset\n/quit\n", timeout=60)
    assert process.returncode == 0 and "(forgotten)" in err and "Traceback" not in err
