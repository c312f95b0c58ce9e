"""Ranks that a server forks: the bits of those that are started alone, whatever becomes of the
server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from ranks import answers, engine_of, needs_ranks, ranks_of, write_model
from served import until
from stopped import has_ended, state_of

from quire.engine.ranks import RANK_COMMAND
from quire.parallel import fork_server, processes
from quire.parallel.fork_server import FORK, ForkServer, SharedServer, can_fork

pytestmark = [
    needs_ranks,
    pytest.mark.slow,
    pytest.mark.skipif(not can_fork(), reason="this system has no descriptors of processes"),
]
TP = {"tensor_parallel_size": 2}


@pytest.fixture
def own_servers(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, ...], ForkServer]:
    """Where those of this test are, and none that others hold."""
    servers: dict[tuple[str, ...], ForkServer] = {}
    monkeypatch.setattr(SharedServer, "_servers", servers)
    monkeypatch.setattr(SharedServer, "_num_holders", type(SharedServer._num_holders)())
    return servers


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of ranks that were started without a server."""
    found: list[int] = []
    spawn = processes.spawn

    def noted(command: Sequence[str], filenos: Sequence[int]) -> subprocess.Popen[bytes]:
        process = spawn(command, filenos)
        found.append(process.pid)
        return process

    monkeypatch.setattr(processes, "spawn", noted)
    return found


@pytest.fixture
def server() -> Iterator[ForkServer]:
    server = ForkServer((*RANK_COMMAND, FORK))
    assert server.wait_ready(120.0)
    yield server
    server.close()


def test_a_lost_rank_is_forked_with_the_same_bits_and_the_server_ends_with_its_engine(
    tmp_path: Path, own_servers: dict[tuple[str, ...], ForkServer], spawned: list[int]
) -> None:
    folder = write_model(tmp_path, "LlamaForCausalLM")
    with engine_of(folder, holds=False) as engine:
        expected = answers(engine)
    with engine_of(folder, holds=False, **TP) as engine:
        group = ranks_of(engine).group
        assert group.pids == spawned, "the first ones wait for no server"
        (server,) = own_servers.values()
        assert server.wait_ready(120.0)
        os.kill(group.pids[0], signal.SIGKILL)
        assert answers(engine) == expected
        assert len(spawned) == 1 and group.pids != spawned
        assert Path(f"/proc/{group.pids[0]}/comm").read_text() == "quire-rank\n"
        forked = group.pids[0]
    assert not own_servers and has_ended(server.pid) and has_ended(forked)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_server_that_is_gone_or_stopped_costs_no_request(
    tmp_path: Path,
    own_servers: dict[tuple[str, ...], ForkServer],
    spawned: list[int],
    number: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fork_server, "FORK_TIMEOUT_S", 0.5)
    folder = write_model(tmp_path, "LlamaForCausalLM")
    with engine_of(folder, holds=False) as engine:
        expected = answers(engine)
    with engine_of(folder, holds=False, **TP) as engine:
        group = ranks_of(engine).group
        (former,) = own_servers.values()
        assert former.wait_ready(120.0)
        os.kill(former.pid, number)
        os.kill(group.pids[0], signal.SIGKILL)
        assert answers(engine) == expected
        assert len(spawned) == 2 and group.pids == spawned[1:]
        (server,) = own_servers.values()
        assert server is not former and has_ended(former.pid)
        assert server.wait_ready(120.0), "there is another one for the next loss"


def test_a_rank_has_the_environment_and_the_descriptors_of_now(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_NAME_OF_THIS_TEST", "ä \udcff")
    # The numbers that it is given are others' until they are moved.
    with open("/proc/self/comm", "rb") as one, open("/proc/self/stat", "rb") as other:
        filenos = [one.fileno(), other.fileno()]
        process = server.fork(filenos)
        assert process is not None
        proc = Path(f"/proc/{process.pid}")
        until(lambda: (proc / "comm").read_text() == "quire-rank\n")
        until(lambda: len(list((proc / "fd").iterdir())) >= 3 + len(filenos))
        for fileno, name in zip(filenos, ("comm", "stat"), strict=True):
            assert os.readlink(proc / "fd" / str(fileno)).endswith(f"/{name}")
        sockets = [os.readlink(each) for each in (proc / "fd").iterdir()]
        assert not any(each.startswith("socket:") for each in sockets), "the server's own"
    process.stdin.close()  # so that it is over, without a word to build by
    until(lambda: process.poll() is not None)
    assert has_ended(process.pid)
    process.stdout.close()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # which libraries have read by now
    assert server.fork(()) is None and not server.is_usable


def test_an_environment_that_no_packet_holds_is_left_to_a_process_of_its_own(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(8):
        monkeypatch.setenv(f"A_NAME_OF_THIS_TEST_{number}", "x" * 20_000)
    assert server.fork(()) is None and server.is_usable, "it is kept for a smaller one"


def test_a_server_ends_where_nothing_holds_it(
    own_servers: dict[tuple[str, ...], ForkServer],
) -> None:
    one, other = SharedServer(RANK_COMMAND), SharedServer(RANK_COMMAND)
    (server,) = own_servers.values()
    one.release()
    one.release()
    assert own_servers and state_of(server.pid) not in "XZ"
    other.release()
    assert not own_servers and has_ended(server.pid)


def test_a_server_ends_with_the_process_that_started_it() -> None:
    script = (
        "import time\n"
        "from quire.engine.ranks import RANK_COMMAND\n"
        "from quire.parallel.fork_server import SharedServer\n"
        "server = SharedServer(RANK_COMMAND)\n"
        "assert server.wait_ready(120.0)\n"
        "print(next(iter(server._servers.values())).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    assert has_ended(pid)
