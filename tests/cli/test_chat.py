"""`quire chat` with piped input, and Ctrl-C during an answer on a pseudo-terminal."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from stuck_output import stuck_output

from quire.cli.main import main

Chat = Callable[..., tuple[int, str, str]]

OPTIONS = (
    "--temperature",
    "0",
    "--max-tokens",
    "20",
    "--num-threads",
    "1",
    "--kv-cache-memory",
    "4MiB",
)


@pytest.fixture
def chat(
    capsys: pytest.CaptureFixture[str],
    tiny: str,
    chat_template: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Chat:
    """Runs a chat with these lines typed; returns (exit code, stdout, stderr)."""

    def run(typed: str | bytes, *options: str) -> tuple[int, str, str]:
        content = typed.encode() if isinstance(typed, str) else typed
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))
        code = main(["chat", tiny, "--chat-template", chat_template, *OPTIONS, *options])
        return code, *capsys.readouterr()

    return run


def cached_tokens(err: str) -> list[int]:
    return [int(number) for number in re.findall(r"(\d+) of them from the cache", err)]


def test_history_is_sent_and_cached(chat: Chat) -> None:
    code, out, err = chat("Once upon a time\nAnd then\n", "--verbose")
    assert code == 0 and len(out.splitlines()) == 2, err
    first, second = cached_tokens(err)
    assert first == 0 and second >= 16


def test_reset_forgets(chat: Chat) -> None:
    _, out, err = chat("Once upon a time\nAnd then\n/reset\nAnd then\n", "--verbose")
    assert "(forgotten)" in err
    with_history, without = out.splitlines()[1:3]
    assert with_history != without


def test_commands(chat: Chat) -> None:
    code, out, err = chat("/help\n/nonsense\n/quit\nnot read\n")
    assert (code, out) == (0, "")
    assert "/reset" in err and "there is no command /nonsense" in err


def test_bytes_that_are_no_text_end_no_chat(chat: Chat) -> None:
    code, out, err = chat(b"Once \xff\n/nonsense\n")
    assert code == 0 and len(out.splitlines()) == 1 and "no command /nonsense" in err


def test_a_message_that_is_too_long_is_taken_back(chat: Chat) -> None:
    code, out, err = chat("word " * 600 + "\nOnce upon a time\n")
    assert code == 0 and "not answered: the prompt has" in err
    assert len(out.splitlines()) == 1


def test_without_a_template_the_chat_is_refused(
    capsys: pytest.CaptureFixture[str], tiny: str
) -> None:
    assert main(["chat", tiny]) == 2
    assert "no chat template" in capsys.readouterr().err


@pytest.mark.slow
def test_interrupt_stops_the_answer_but_not_the_chat(tiny: str, chat_template: str) -> None:
    argv = [
        sys.executable,
        "-u",
        "-m",
        "quire",
        "chat",
        tiny,
        "--chat-template",
        chat_template,
        "--ignore-eos",
    ]
    argv += ["--max-tokens", "450"]
    with stuck_output() as out:
        pipes: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": out.write_end,
            "stderr": subprocess.PIPE,
        }
        process = subprocess.Popen(argv, text=True, **pipes)
        os.close(out.write_end)
        assert process.stdin is not None
        process.stdin.write("Once upon a time\n")
        process.stdin.flush()
        out.await_words()
        process.send_signal(signal.SIGINT)
        assert out.reader.readline().endswith("[stopped]\n")
        _, err = process.communicate("/reset\n/quit\n", timeout=60)
    assert process.returncode == 0 and "(forgotten)" in err and "Traceback" not in err
