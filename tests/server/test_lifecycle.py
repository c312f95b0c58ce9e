"""`quire serve` as a process: where it listens (T02), how it ends (T38), that nothing outlives it,
what it does about an engine that freezes (T19), and that a bad configuration is one line, soon
(T39).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import DEADLINE_S, MODEL, OPTIONS, Served, frozen, is_alive, listening, serving, until
from timing import timed

pytestmark = [timed, pytest.mark.slow]

BODY = {"prompt": "Once upon a time", "stream": True, "ignore_eos": True, "seed": 5}


class Stream:
    """A stream that is read in a thread of its own. With `has_begun`, its first event is there."""

    def __init__(self, served: Served, *, has_begun: bool = True, **fields: Any) -> None:
        self.lines: list[str] = []
        self._url, self._headers, self._body = served.url, served.headers, {**BODY, **fields}
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        if has_begun:
            until(lambda: self.lines or not self._thread.is_alive(), DEADLINE_S)

    def _read(self) -> None:
        client = httpx.Client(base_url=self._url, headers=self._headers, timeout=DEADLINE_S)
        with client, client.stream("POST", "/v1/completions", json=self._body) as response:
            self.lines.extend(line for line in response.iter_lines() if line)

    def events(self) -> list[dict[str, Any]]:
        """All events but `[DONE]`, once the stream has ended."""
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        return [json.loads(line[6:]) for line in self.lines if line.startswith("data: {")]

    def texts(self) -> dict[int, str]:
        """The text of each choice; how the choices take turns is a matter of time."""
        texts: dict[int, str] = {}
        for choice in (choice for event in self.events() for choice in event["choices"]):
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        return texts


def _is_draining(served: Served) -> bool:
    answer = served.get("/readyz")
    return answer.status_code == 503 and answer.json()["error"]["code"] == "draining"


def test_t02_t38_it_answers_while_it_loads_listens_once_and_drains_when_told() -> None:
    with serving("--silence-timeout", "300") as served:
        assert served.get("/livez").status_code == 200
        served.await_ready()
        engine = served.engine_pid
        assert len(listening(served.process.pid)) == 1
        assert listening(engine) == []
        with frozen(engine):  # so that the stream does not end before all has been seen
            stream = Stream(served, has_begun=False, max_tokens=100)
            until(lambda: served.progress()["num_requests"] == 1)
            served.process.send_signal(signal.SIGTERM)
            until(lambda: _is_draining(served))
            refused = httpx.post(f"{served.url}/v1/completions", json={"prompt": "a"}, timeout=60)
        events = stream.events()
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        assert stream.lines[-1] == "data: [DONE]" and not any("error" in event for event in events)
        assert served.process.wait(DEADLINE_S) == 0
        assert not is_alive(engine)


@contextmanager
def _stuck_client(served: Served) -> Iterator[None]:
    """A client that asks for much and takes ten bytes of it."""
    with socket.create_connection(("127.0.0.1", served.port)) as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = json.dumps({**BODY, "max_tokens": 450, "n": 16, "logprobs": 5}).encode()
        stuck.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s"
            % (len(body), body)
        )
        assert stuck.recv(10)
        yield


def test_t38_a_second_sigterm_ends_everything_at_once_also_with_a_client_that_is_stuck() -> None:
    with serving(
        "--drain-timeout", "300", "--write-timeout-s", "300", "--silence-timeout", "300"
    ) as served:
        served.await_ready()
        engine = served.engine_pid
        with _stuck_client(served):
            os.kill(engine, signal.SIGSTOP)  # nor does the engine do anything any more
            served.process.send_signal(signal.SIGTERM)
            until(lambda: _is_draining(served))
            time.sleep(0.3)
            assert served.process.poll() is None
            served.process.send_signal(signal.SIGTERM)
            assert served.process.wait(DEADLINE_S) == 1  # neither timeout is over by then
        until(lambda: not is_alive(engine))


def test_t38_a_drain_that_is_too_short_ends_streams_with_an_error_and_waits_for_nobody_who_takes_nothing() -> (
    None
):
    with serving("--drain-timeout", "0", "--write-timeout-s", "300") as served:
        served.await_ready()
        with _stuck_client(served):
            stream = Stream(served, max_tokens=450, n=24)
            os.kill(served.engine_pid, signal.SIGSTOP)  # seconds before its natural end
            served.process.send_signal(signal.SIGTERM)
            assert any("error" in event for event in stream.events())
            assert served.process.wait(DEADLINE_S) == 0  # the timeout of writes is not over by then


def test_t19_an_engine_that_freezes_is_replaced_and_costs_no_answer() -> None:
    with serving("--silence-timeout", "4") as served:
        served.await_ready()
        calm = Stream(served, max_tokens=300, n=2).texts()
        stream = Stream(served, max_tokens=300, n=2)
        lost = served.engine_pid
        os.kill(lost, signal.SIGSTOP)
        until(lambda: served.get("/readyz").status_code == 503)
        assert served.get("/livez").status_code == 200
        assert stream.texts() == calm
        served.await_ready()
        assert not is_alive(lost) and served.progress()["num_restarts"] == 1
        last = served.engine_pid
        served.process.kill()  # and none outlives its server
        until(lambda: not is_alive(last))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "70000"], "port=70000"),
        (["--drain-timeout", "-1"], "drain_timeout=-1.0"),
        (["--max-model-len", "100000000"], "max_model_len"),
        (["--prot", "1"], "did you mean --port"),
        (["--api-keys-file", "/nowhere/keys.toml"], "api_keys_file='/nowhere/keys.toml'"),
        (["--data-folder", "/proc/nowhere"], "data_folder"),
        (["--chat-template", "/nowhere"], "chat_template"),
        (["--chat-template", "/dev/null"], "chat_template='/dev/null' reads no `messages`"),
        (["--kv-cache-memory", "1KiB"], "kv_cache_memory"),
        (["--kv-cache-memory", "lots"], "lots"),
    ],
)
def test_t39_wrong_options_are_one_line_and_exit_2(options: list[str], message: str) -> None:
    done = _failed_start(*OPTIONS[:-2], *options)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1, (
        done.stderr
    )


def test_t39_a_model_or_a_port_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Perceptron"]}')
    for model in (str(tmp_path), str(tmp_path / "none")):
        done = _failed_start(model)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = _failed_start(MODEL, "--port", str(taken.getsockname()[1]))
        assert (
            done.returncode == 2
            and "cannot listen" in done.stderr
            and len(done.stderr.splitlines()) == 1
        ), done.stderr


def _failed_start(*options: str) -> subprocess.CompletedProcess[str]:
    """A start that fails, in time: computing is all it does,
    so that it takes its processor time where the machine is idle."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "quire", "serve", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.0
    return done


def test_t13_more_connections_than_files_are_refused_and_the_rest_is_served() -> None:
    """A server that may open few files: those who come when all are taken are told so,
    and nobody else notices."""
    with serving("--header-timeout-s", "300", few_files=200) as served:
        assert served.process.stderr is not None
        served.await_ready()
        burst = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(150)]
        try:
            refused: set[socket.socket] = set()

            def are_refused() -> bool:
                refused.update(connection for connection in burst if _says(connection, b" 503 "))
                return len(refused) >= 60

            until(are_refused)
            stream = burst[0]
            stream.sendall(b"GET /readyz HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b" 200 " in _received(stream, b'"ready"}')
            are_refused()
            assert len(refused) <= 100
            os.kill(served.engine_pid, signal.SIGKILL)  # there must be files left for the next one
            stream.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 29\r\n\r\n"
            )
            stream.sendall(b'{"prompt":"a","max_tokens":2}')
            stream.settimeout(DEADLINE_S)
            assert b" 200 " in _received(stream, b'"usage"')
        finally:
            for connection in burst:
                connection.close()
        until(lambda: _is_live(served))


def _is_live(served: Served) -> bool:
    with contextlib.suppress(httpx.TransportError):  # refused before it has said all
        return served.get("/livez").status_code == 200
    return False


def _received(connection: socket.socket, end: bytes) -> bytes:
    """What arrives up to `end`, in however many pieces."""
    received = b""
    while end not in received and (piece := connection.recv(10_000)):
        received += piece
    return received


def _says(connection: socket.socket, wanted: bytes) -> bool:
    connection.setblocking(False)
    try:
        return wanted in connection.recv(1000)
    except BlockingIOError:
        return False
    finally:
        connection.settimeout(DEADLINE_S)


def test_t02_no_socket_has_a_name_that_others_could_open(served: Served) -> None:
    """The engine's connection is an inherited pair:
    nothing that is bound to a path or to the abstract names."""
    for pid in (served.process.pid, served.engine_pid):
        inodes = {
            os.readlink(fd)[8:-1]
            for fd in Path(f"/proc/{pid}/fd").iterdir()
            if "socket:" in _target(fd)
        }
        named = [
            line.split() for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]
        ]
        assert not [line for line in named if line[6] in inodes and len(line) > 7]


def _target(fd: Path) -> str:
    try:
        return os.readlink(fd)
    except FileNotFoundError:
        return ""


def test_t18_the_data_folder_is_nobody_elses(tmp_path: Path) -> None:
    from quire.server.api.openai.data_folder import DataFolder
    from quire.server.api.openai.file_store import FileStore

    folder = DataFolder(tmp_path / "data")
    FileStore(folder).add_file("a", "x", io.BytesIO(b"x"))
    folder.close()
    folders = [path for path in (tmp_path / "data").rglob("*") if path.is_dir()]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o700 for path in (tmp_path / "data", *folders))


def test_t19_readiness_follows_a_frozen_engine_and_comes_back(served: Served) -> None:
    """A freeze that is shorter than the limit costs nothing but the time."""
    engine = served.engine_pid
    with frozen(engine):
        time.sleep(0.5)
        assert served.get("/livez").status_code == 200
    served.await_ready()
    assert served.engine_pid == engine
