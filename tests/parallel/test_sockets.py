"""Ranks that share no memory: what they exchange over sockets is what they would exchange in memory,
and what goes wrong with a connection is noticed."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from certificates import write_certificates
from ranks import OLMOE, answers, engine_of, ranks_of, write_model

from quire.common.tls import TlsContexts, mutual_tls
from quire.config.engine import EngineConfig
from quire.errors import ConfigError, EngineError
from quire.kernels import cpu
from quire.kernels.exchange import Exchange
from quire.parallel import links, transports
from quire.parallel.links import Credentials, Doorway, dial, receive_record
from quire.parallel.sections import GroupShape, Joined, Sections
from quire.parallel.shared_memory import GATHER_BYTES, Kind, RankCommand, SharedMemory
from quire.parallel.transports import GroupMemory, SocketTransport, join

pytestmark = pytest.mark.skipif(cpu.IMPORT_ERROR is not None, reason="ranks need the native module")
COMMAND_BYTES = 1 << 20


@contextmanager
def linked(num_ranks: int, silence_s: float = 5.0) -> Iterator[list[tuple[SharedMemory, Exchange]]]:
    memories = [SharedMemory(-1, COMMAND_BYTES) for _ in range(num_ranks)]
    exchanges = [each.exchange(rank, num_ranks, silence_s) for rank, each in enumerate(memories)]
    peers: list[list[tuple[int, int]]] = [[] for _ in memories]
    for rank in range(num_ranks):
        for other in range(rank):
            one, two = socket.socketpair()
            peers[rank].append((other, one.detach()))
            peers[other].append((rank, two.detach()))
    for memory, exchange, own in zip(memories, exchanges, peers, strict=True):
        exchange.native.connect(own, memory.num_bytes)
    try:
        yield list(zip(memories, exchanges, strict=True))
    finally:
        for each in exchanges:
            each.native.reset()


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    found: dict[int, Any] = {}

    def run(place: int, call: Callable[[], Any]) -> None:
        found[place] = call()

    threads = [threading.Thread(target=run, args=each) for each in enumerate(calls)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert len(found) == len(calls), "a rank has failed"
    return [found[place] for place in range(len(calls))]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("num_rows", [1, 7, GATHER_BYTES // 2 // 4096 + 3])
def test_columns_of_all_ranks_come_together(num_ranks: int, num_rows: int) -> None:
    width = 1024
    value = torch.randn(num_rows, width)
    # a rank may have several ranges, or none
    parts = [[range(0, 100), range(600, 1024)], [range(100, 600)], []][:num_ranks]

    def gather(exchange: Exchange) -> list[torch.Tensor]:
        mine = parts[exchange.rank]
        own = torch.cat([value[:, :0], *(value[:, each.start : each.stop] for each in mine)], 1)
        return [exchange.columns(own, mine, width) for _ in range(3)]

    with linked(num_ranks) as ranks:
        found = at_once(*(lambda each=each: gather(each) for _, each in ranks))
    assert all(torch.equal(each, value) for several in found for each in several)


def test_rows_of_all_ranks_come_together() -> None:
    value = torch.randn(20_000, 16)  # more rows of its own than one message describes

    def gather(exchange: Exchange) -> torch.Tensor:
        is_own = torch.arange(len(value)) % 2 == exchange.rank
        return exchange.rows(value * is_own.unsqueeze(1), is_own)

    with linked(2) as ranks:
        found = at_once(*(lambda each=each: gather(each) for _, each in ranks))
    assert all(torch.equal(each, value) for each in found)


def test_a_command_and_what_is_written_for_it_arrive() -> None:
    with linked(2) as ((memory, leader), (other_memory, follower)):
        numbers, room = torch.arange(5), torch.zeros(2, 4, dtype=torch.int32)
        for turn in range(3):
            leader.native.wait_done()
            leader.native.post(*memory.write(RankCommand(Kind.LOGITS, (turn,), (numbers, room))))
            assert follower.native.wait_posted(5.0)
            command = other_memory.read()
            assert command.numbers == (turn,) and torch.equal(command.tensors[0], numbers)  # type: ignore[arg-type]
            own = command.tensors[1][1]  # type: ignore[index]
            own.fill_(turn)
            follower.native.finish(*other_memory.extent_of(own))
        leader.native.wait_done()
        answer = memory.read().tensors[1]
        assert answer is not None and answer.tolist() == [[0] * 4, [2] * 4]


def test_a_connection_that_ends_is_noticed_by_who_waits() -> None:
    with linked(2, silence_s=60.0) as ((_, one), (_, two)):
        threading.Timer(0.1, two.native.lose, (1,)).start()
        with pytest.raises(RuntimeError, match="a rank of the group is gone"):
            one.columns(torch.ones(1, 1), [range(1)], 2)
        with pytest.raises(RuntimeError, match="a rank of the group is gone"):
            one.columns(torch.ones(1, 1), [range(1)], 2)
        assert one.native.is_lost


def test_a_rank_that_says_nothing_is_noticed() -> None:
    with linked(2, silence_s=0.2) as ((_, one), (_, two)):
        two.native.beat()
        with pytest.raises(RuntimeError, match="rank 1 gives no sign of life"):
            one.columns(torch.ones(1, 1), [range(1)], 2)
        deadline_s = time.monotonic() + 10.0
        while not two.native.is_lost and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert two.native.is_lost, "the other end does not know that the group is over"


def test_a_sign_of_life_uses_no_connection_of_a_group_that_is_over() -> None:
    """Connections end with those who use them last, and their end would lose a rank of the next
    group."""
    sections, said = Sections([-1], GroupShape(1, 2), COMMAND_BYTES, 5.0), list[str]()
    is_beating, may_end = threading.Event(), threading.Event()

    class Native:
        def beat(self) -> None:
            is_beating.set()
            assert may_end.wait(60)
            said.append("beat")

        def reset(self) -> None:
            said.append("reset")

    memory, _ = sections.exchange(0, 0)
    native: Any = Native()
    sections.joined[:] = [Joined(0, 0, 2, memory, Exchange(native, 0, 2, memory))]
    calls = [threading.Thread(target=each) for each in (sections.beat, sections.reset)]
    calls[0].start()
    assert is_beating.wait(60)
    calls[1].start()
    time.sleep(0.05)  # in which it would be through
    may_end.set()
    for each in calls:
        each.join(60)
    assert said == ["beat", "reset"]


CUT = """
import fcntl, socket, struct, sys, time
from quire.parallel.links import prepare


def set_loopback(is_up):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, 0x8914, struct.pack("16sh", b"lo", int(is_up)))  # SIOCSIFFLAGS


set_loopback(True)
with socket.create_server(("127.0.0.1", 0)) as listener:
    near = socket.create_connection(listener.getsockname())
    far, _ = listener.accept()
near, far = (socket.socket(fileno=prepare(each, 1.0)) for each in (near, far))
set_loopback(False)
deadline_s = time.monotonic() + 60.0
while time.monotonic() < deadline_s:
    try:
        if sys.argv[1] == "beats":
            near.send(b"x", socket.MSG_DONTWAIT)
        near.recv(1, socket.MSG_DONTWAIT)
    except BlockingIOError:
        time.sleep(0.25)
    except OSError:
        print("ended")
        break
"""


@pytest.mark.slow
@pytest.mark.parametrize("signs", ["beats", "none"])
def test_connections_to_a_host_that_is_cut_off_end(signs: str) -> None:
    alone = ("unshare", "--map-root-user", "--net")  # a network of its own, to be cut off in
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], check=False).returncode:
        pytest.skip("this system gives no network of one's own")
    ran = subprocess.run(
        [*alone, sys.executable, "-c", CUT, signs], check=True, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert ran.stdout == "ended\n"


@pytest.mark.parametrize(
    "message",
    [
        b"\xff" * 24,
        (1).to_bytes(4, "little") + bytes(4) + (1 << 40).to_bytes(8, "little") + bytes(8),
        # one extent at the beginning of the memory, where the counters are
        (1).to_bytes(4, "little") + bytes(4) + (1).to_bytes(8, "little")
        + (8).to_bytes(8, "little") + bytes(16) + (1).to_bytes(8, "little")
        + (8).to_bytes(8, "little") + bytes(8),
    ],
    ids=["noise", "too many extents", "counters"],
)  # fmt: skip
def test_what_no_rank_sends_ends_the_connection(message: bytes) -> None:
    memory, (near, far) = SharedMemory(-1, COMMAND_BYTES), socket.socketpair()
    native = memory.exchange(0, 2, 5.0).native
    native.connect([(1, near.detach())], memory.num_bytes)
    with far:
        far.sendall(message)
        deadline_s = time.monotonic() + 10.0
        while not native.is_lost and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert native.is_lost
    native.reset()


# ---- finding one another ----


def test_a_stranger_is_told_nothing_and_holds_up_nobody() -> None:
    secret = secrets.token_bytes(32)
    doorway = Doorway("127.0.0.1", Credentials(secret))
    silent = [socket.create_connection(doorway.address) for _ in range(20)]
    try:
        with socket.create_connection(doorway.address) as stranger:
            stranger.sendall(bytes(32))
            answer = links.receive_exactly(stranger, 64, time.monotonic() + 10.0)
            stranger.sendall(answer[32:] + b"\0\0\0\x02{}")
            with contextlib.suppress(ConnectionError):
                assert stranger.recv(1) == b""
        assert doorway.take(0.1) is None
        with pytest.raises(EngineError, match="does not know this group's secret"):
            dial(doorway.address, Credentials(b"another"), {}, time.monotonic() + 10.0)
        with dial(doorway.address, Credentials(secret), {"process": 3}, time.monotonic() + 10.0):
            arrival = doorway.take(10.0)
        assert arrival is not None and arrival.record == {"process": 3}
        arrival.sock.close()
    finally:
        doorway.close()
        for each in silent:
            each.close()
    with pytest.raises(EngineError, match="cannot be reached"):
        dial(doorway.address, Credentials(secret), {}, time.monotonic() + 1.0)


def test_only_who_has_a_certificate_is_admitted_and_sends_what_arrives_whole(
    tmp_path: Path,
) -> None:
    ours, others = (
        mutual_tls(*write_certificates(tmp_path, name).values()) for name in ("ours", "others")
    )
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # any end, and has no certificate itself
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    secret = secrets.token_bytes(32)
    doorway = Doorway("127.0.0.1", Credentials(secret, ours))
    try:
        for tls in (None, others, TlsContexts(ours.server, trusting)):
            with pytest.raises(EngineError, match="does not answer"):
                dial(doorway.address, Credentials(secret, tls), {}, time.monotonic() + 10.0)
        with pytest.raises(EngineError, match="does not know this group's secret"):
            dial(doorway.address, Credentials(b"another", ours), {}, time.monotonic() + 10.0)
        assert doorway.take(0.1) is None
        sock = dial(doorway.address, Credentials(secret, ours), {}, time.monotonic() + 10.0)
        arrival = doorway.take(10.0)
    finally:
        doorway.close()
    assert arrival is not None
    memories = [SharedMemory(-1, COMMAND_BYTES) for _ in range(2)]
    exchanges = [each.exchange(rank, 2, 5.0) for rank, each in enumerate(memories)]
    for rank, end in enumerate((sock, arrival.sock)):
        peer = (1 - rank, links.prepare(end, 5.0))
        exchanges[rank].native.connect([peer], memories[rank].num_bytes)
    value = torch.randn(GATHER_BYTES // 2 // 4096 + 3, 1024)  # both send at the same time
    parts = (range(300), range(300, 1024))

    def gather(exchange: Exchange) -> torch.Tensor:
        own = parts[exchange.rank]
        return exchange.columns(value[:, own.start : own.stop].contiguous(), [own], 1024)

    found = at_once(*(lambda each=each: gather(each) for each in exchanges))
    assert all(torch.equal(each, value) for each in found)
    exchanges[0].native.lose(0)  # a connection that ends is noticed through the bridge
    with pytest.raises(RuntimeError, match="a rank of the group is gone"):
        gather(exchanges[1])
    for each in exchanges:
        each.native.reset()


def test_certificates_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    memory, files = GroupMemory(GroupShape(1, 2), COMMAND_BYTES, 5.0), write_certificates(tmp_path)
    (tmp_path / "ours.key").write_text("nothing")
    with pytest.raises(ConfigError, match="distributed_ssl: the certificates cannot be used"):
        SocketTransport(memory, "127.0.0.1", "alike", files)
    given: dict[str, Any] = {"model": "m", "tensor_parallel_size": 2, "distributed_ssl": files}
    with pytest.raises(ConfigError, match="with distributed_executor_backend='mp' they send noth"):
        EngineConfig(**given)
    given |= {"distributed_executor_backend": "sockets", "distributed_ssl": {"ssl_keyfile": "x"}}
    with pytest.raises(ConfigError, match="distributed_ssl: ssl_certfile=None must be a path"):
        EngineConfig(**given)


def test_a_connection_that_cannot_be_taken_is_not_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors: list[Exception] = [OSError(24, "Too many open files"), ConnectionAbortedError()]
    create_server = socket.create_server

    class Listener:
        def __init__(self, *args: Any, **options: Any) -> None:
            self._listener = create_server(*args, **options)

        def accept(self) -> Any:
            if errors:
                raise errors.pop()
            return self._listener.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._listener, name)

    monkeypatch.setattr(socket, "create_server", Listener)
    secret = Credentials(b"s" * 32)
    doorway = Doorway("127.0.0.1", secret)
    with contextlib.closing(doorway):
        with dial(doorway.address, secret, {"process": 1}, time.monotonic() + 20.0):
            arrival = doorway.take(20.0)
        assert arrival is not None and arrival.record == {"process": 1}
        arrival.sock.close()


def test_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(ConfigError, match="give an address of this host"):
        Doorway("192.0.2.7", Credentials(b""))


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_every_process_of_a_group_is_connected_to_those_it_waits_for(
    is_encrypted: bool, tmp_path: Path
) -> None:
    memory = GroupMemory(GroupShape(3, 2), COMMAND_BYTES, 5.0)
    files = write_certificates(tmp_path) if is_encrypted else None
    leader = SocketTransport(memory, "127.0.0.1", "alike", files)
    told = {**leader.renew(), "load_timeout_s": 30.0, "host": "127.0.0.1"}
    members = [join(told | {"rank": number}, memory, "alike") for number in range(1, 6)]
    sides = [_side(sections, number) for number, sections in _views(leader, members)]
    at_once(lambda: leader.connect(lambda: None, time.monotonic() + 30.0), *(
        each.connect for each in members
    ))  # fmt: skip
    command = RankCommand(Kind.STAGE, (4, 2), (torch.arange(3),))
    states = torch.randn(4, 8)
    out = torch.empty(4, 8)
    found = at_once(*(lambda run=run: run(command, states, out) for run in sides))
    assert torch.equal(out, states)
    assert [each.numbers for several in found for each in several] == [(4, 2)] * 4
    assert not any(each.exchange.native.is_lost for each in leader.sections.joined)
    leader.close()
    for each in members:
        each.close()


def _views(
    leader: SocketTransport, members: list[transports.Membership]
) -> list[tuple[int, Sections]]:
    return [(0, leader.sections), *enumerate((each.sections for each in members), 1)]


def _side(
    sections: Sections, number: int
) -> Callable[[RankCommand, torch.Tensor, torch.Tensor], list[RankCommand]]:
    """What a process of three stages of two ranks does with one piece of a step."""
    stage, rank = divmod(number, 2)
    _, exchange = sections.exchange(stage, rank)
    source = sections.receiver(stage, rank) if stage else None
    target = sections.sender(stage + 1) if rank == 0 and stage < 2 else None
    results = sections.result_sender() if (stage, rank) == (2, 0) else None
    wanted = sections.result_receiver() if number == 0 else None

    def run(command: RankCommand, states: torch.Tensor, out: torch.Tensor) -> list[RankCommand]:
        heard = [] if source is None else [source.receive(30.0)]
        if source is not None and heard[0] is None:  # it was ready before the sender
            heard = [source.receive(30.0)]
        exchange.columns(torch.full((1, 1), float(rank)), [range(rank, rank + 1)], 2)
        if target is not None:
            target.send(command)
        if results is not None:
            results.send(0, states)
        if wanted is not None:
            wanted.receive(1, out)
        return [each for each in heard if each is not None]

    return run


def test_a_process_of_another_version_is_refused() -> None:
    memory = GroupMemory(GroupShape(1, 2), COMMAND_BYTES, 5.0)
    leader = SocketTransport(memory, "127.0.0.1", "quire 1 with kernels for avx2")
    leader.sections.exchange(0, 0)
    told = leader.renew()
    secret, (host, port) = bytes.fromhex(told["secret"]), told["doorway"]
    record = {"process": 1, "address": [host, port], "facts": "quire 2 with kernels for avx2"}
    with dial((host, port), Credentials(secret), record, time.monotonic() + 10.0) as sock:
        with pytest.raises(ConfigError, match=r"process 1 of the model has quire 2 with .*alike"):
            leader.connect(lambda: None, time.monotonic() + 10.0)
        with pytest.raises((OSError, ValueError)):
            receive_record(sock, time.monotonic() + 10.0)
    leader.close()


# ---- engines ----


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "options", "number"),
    [
        (
            "LlamaForCausalLM", {},
            {"tensor_parallel_size": 3, "dtype": "bfloat16", "distributed_ssl": {}},
            signal.SIGKILL,
        ),
        (
            "OlmoeForCausalLM", OLMOE,
            {"tensor_parallel_size": 2, "enable_expert_parallel": True, "quantization": "int8"},
            None,
        ),
        (
            "LlamaForCausalLM", {"num_hidden_layers": 3},
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "kv_cache_memory": "128KiB"},
            signal.SIGSTOP,
        ),
    ],
    ids=["encrypted and killed", "cut off", "frozen"],
)  # fmt: skip
def test_ranks_without_shared_memory_give_the_bits_of_one_process_and_are_replaced(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    sizes: dict[str, int],
    options: dict[str, Any],
    number: signal.Signals | None,
) -> None:
    folder, ports = write_model(tmp_path, name, **sizes), _listening(os.getpid())
    if "distributed_ssl" in options:
        options = options | {"distributed_ssl": write_certificates(tmp_path)}
    divided = ("parallel", "distributed")
    alone = {name: options[name] for name in options if not any(each in name for each in divided)}
    with engine_of(folder, **alone) as engine:
        expected = answers(engine)
    connections: list[int] = []

    def prepare(sock: socket.socket, silence_s: float) -> int:
        connections.append(links.prepare(sock, silence_s))
        return connections[-1]

    monkeypatch.setattr(transports, "prepare", prepare)
    given = {"distributed_executor_backend": "sockets", "distributed_timeout_seconds": 1.0}
    with engine_of(folder, **options, **given) as engine:
        group, num_steps = ranks_of(engine).group, 0
        pids = group.pids

        def strike() -> None:
            nonlocal num_steps
            num_steps += 1
            if num_steps == 5 and number is not None:
                os.kill(group.pids[-1], number)
            if num_steps == 5 and number is None:  # the connection alone is cut
                with socket.socket(fileno=os.dup(connections[-1])) as sock:
                    sock.shutdown(socket.SHUT_RDWR)

        assert answers(engine, strike) == expected
        assert num_steps > 5 and not set(pids) & set(group.pids), "nothing was replaced"
        assert _listening(os.getpid()) == ports, "a port is still open"


def _listening(pid: int) -> set[str]:
    """The TCP ports that a process listens on."""
    inodes = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(each))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes}
