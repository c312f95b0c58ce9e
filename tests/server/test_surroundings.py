"""A server whose surroundings fail it: its disk is full, its folder is gone, its model's files are
exchanged, and it is told to end in every way there is. Each with real processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from ports import reserved_port
from served import DEADLINE_S, OPTIONS, Served, children, frozen, is_alive, serving, until
from timing import timed

import quire

pytestmark = [timed, pytest.mark.slow]

ASSETS = Path(quire.__file__).parent / "assets" / "quire-storyteller"
SMALL = ("--num-threads", "1", "--kv-cache-memory", "32MiB")


@contextmanager
def _unheard(model: str, folder: Path) -> Iterator[Served]:
    """A server that is started in `folder`, and that can write nowhere."""
    port = reserved_port()
    command = [sys.executable, "-P", "-m", "quire", "serve", model, *SMALL, "--port", str(port)]
    with (
        open("/dev/full", "wb") as full,
        subprocess.Popen(command, cwd=folder, stdout=full, stderr=full, text=True) as process,
    ):
        served = Served(process, f"http://127.0.0.1:{port}")
        try:
            until(lambda: process.poll() is not None or _is_live(served), DEADLINE_S)
            yield served
        finally:
            process.kill()


def _is_live(served: Served) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return served.get("/livez").status_code == 200
    return False


def _completion(served: Served) -> str:
    body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=DEADLINE_S)
    return str(answer.json()["choices"][0]["text"])


def _lose_engine(served: Served) -> None:
    engine = served.engine_pid
    os.kill(engine, signal.SIGKILL)
    until(lambda: not is_alive(engine))


def test_neither_a_full_disk_nor_a_deleted_folder_nor_exchanged_weights_are_passed_over(
    tmp_path: Path,
) -> None:
    gone, model = tmp_path / "gone", tmp_path / "model"
    gone.mkdir()
    shutil.copytree(ASSETS, model)
    with _unheard("../model", gone) as served:
        served.await_ready()  # though nothing could be said of it
        before = _completion(served)
        gone.rmdir()
        _lose_engine(served)
        until(lambda: served.progress()["num_restarts"] == 1)
        served.await_ready()
        assert _completion(served) == before
        os.truncate(model / "model.safetensors", 1 << 20)
        assert _completion(served) == before, "what runs has its weights"
        _lose_engine(served)
        until(lambda: served.get("/readyz").json().get("error", {}).get("code") == "failed")
        answer = httpx.post(
            f"{served.url}/v1/completions", json={"prompt": "a"}, timeout=DEADLINE_S
        )
        assert answer.status_code == 503, answer.text
        assert children(served.process.pid) == [], "none is started of other files"
        assert served.progress()["num_restarts"] == 2, "and none is tried again"
        assert served.get("/livez").status_code == 200


@pytest.mark.parametrize(
    "change", ["config.json", "tokenizer.json", "deleted", "same size and time"]
)
def test_an_engine_is_not_built_of_files_that_the_server_did_not_read(
    tmp_path: Path, change: str
) -> None:
    """As the engine's process has it, without the server."""
    from quire.common.file_states import check_unchanged
    from quire.config.engine import EngineConfig
    from quire.engine.assembly.preparation import prepare_model
    from quire.engine.process.link import start_message
    from quire.errors import CheckpointError

    shutil.copytree(ASSETS, tmp_path / "model")
    planned = prepare_model(
        EngineConfig(model=str(tmp_path / "model"), kv_cache_memory="16MiB"), is_for_here=False
    ).planned
    start = start_message(planned.plan, planned.files)
    assert start.model == str(tmp_path / "model")
    check_unchanged(start.files)
    if change == "deleted":
        (tmp_path / "model" / "model.safetensors").unlink()
    elif change == "same size and time":  # as in archives and images with one time for all
        _exchange(tmp_path / "model" / "model.safetensors")
    else:
        path = tmp_path / "model" / change
        path.write_text(json.dumps(json.loads(path.read_text()), indent=7))
    said = {
        "deleted": "model.safetensors",
        "same size and time": "model.safetensors holds other bytes",
    }
    with pytest.raises(CheckpointError, match=said.get(change, change)):
        check_unchanged(start.files)


def _exchange(path: Path) -> None:
    """Replace weights by others of the same size and time."""
    status, data = path.stat(), bytearray(path.read_bytes())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    path.unlink()
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_packed_weights_are_not_taken_for_those_of_other_files_of_the_same_size_and_time(
    tmp_path: Path,
) -> None:
    from quire.config.engine import EngineConfig
    from quire.engine.assembly.fingerprint import cache_name
    from quire.engine.assembly.preparation import prepare_model

    shutil.copytree(ASSETS, tmp_path / "model")

    def name() -> object:
        config = EngineConfig(model=str(tmp_path / "model"), kv_cache_memory="16MiB")
        planned = prepare_model(config, is_for_here=False).planned
        return cache_name(planned.plan, planned.files)

    first = name()
    assert name() == first
    _exchange(tmp_path / "model" / "model.safetensors")
    assert name() != first


@pytest.mark.skipif(
    signal.getsignal(signal.SIGHUP) is signal.SIG_IGN,
    reason="hangups are ignored here, as under nohup, and then a server ignores them, too",
)
def test_a_hangup_drains_and_interrupts_without_number_print_no_traceback() -> None:
    with serving("--silence-timeout", "300") as served:
        served.await_ready()
        answers: list[httpx.Response] = []
        body = {"prompt": "Once upon a time", "max_tokens": 30, "ignore_eos": True}
        ask = threading.Thread(
            target=lambda: answers.append(
                httpx.post(f"{served.url}/v1/completions", json=body, timeout=DEADLINE_S)
            )
        )
        with frozen(served.engine_pid):  # so that it does not end before all has been seen
            ask.start()
            until(lambda: served.progress()["num_requests"] == 1)
            served.process.send_signal(signal.SIGHUP)
            until(lambda: served.get("/readyz").json().get("error", {}).get("code") == "draining")
        ask.join(DEADLINE_S)
        assert answers[0].json()["choices"][0]["finish_reason"] == "length"
        assert served.process.wait(DEADLINE_S) == 0
    with serving() as served:
        served.await_ready()
        while served.process.poll() is None:
            served.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                served.process.wait(0.01)
        assert served.process.stderr is not None
        assert "Traceback" not in (said := served.process.stderr.read()), said


def test_a_hangup_that_is_ignored_stays_so() -> None:
    """As under nohup."""
    command = [
        "sh",
        "-c",
        'trap "" HUP; exec "$@"',
        "sh",
        sys.executable,
        "-m",
        "quire",
        "serve",
        *OPTIONS,
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            until(lambda: "ready" in process.stderr.readline(), DEADLINE_S)
            process.send_signal(signal.SIGHUP)
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 0
            assert "draining" not in process.stderr.read()
        finally:
            process.kill()


@pytest.mark.parametrize("given", ["1025", "100000", "9" * 30])
def test_too_many_threads_are_one_line(given: str) -> None:
    command = [sys.executable, "-m", "quire", "plan", OPTIONS[0], "--num-threads", given]
    run = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert run.returncode == 2
    assert "at most 1024" in run.stderr and "Traceback" not in run.stderr
