"""Servers and routers as they are deployed: each a process on a port of its own with what it has
started, by names, and the connections between them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import faults
from ports import reserved_port
from served import Served, is_alive, routing, serving, until

SERVER = ("--silence-timeout", "2", "--max-num-seqs", "32")
DIVIDED = ("--distributed-timeout-seconds", "1")
ROUTER = (
    "--health-interval-s", "0.3", "--health-timeout-s", "1.5", "--prefill-timeout-s", "3",
    "--prefill-min-bytes", "64",
)  # fmt: skip
CLIENT = "client"
CHANNEL = "channel"


class Link(NamedTuple):
    """What `faults.cut` takes."""

    pid: int
    fileno: int


class Node:
    """A program that the test starts, again and again, always at the same port."""

    def __init__(
        self, name: str, start: Callable[..., AbstractContextManager[Served]], log: Path
    ) -> None:
        self.name, self._start, self._log = name, start, log
        self._num_starts = 0
        self._stack = ExitStack()
        self._known: set[int] = set()

    def start(self) -> None:
        """Wait until it listens."""
        log = self._log.with_name(f"{self._log.name}-{self._num_starts}")
        self._num_starts += 1
        self._known.clear()
        self.served = self._stack.enter_context(self._start(log=log))

    def end(self) -> None:
        """End it, frozen or not."""
        faults.go_on(self.pids())
        self._stack.close()

    @property
    def pid(self) -> int:
        """Its first process."""
        return self.served.process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not been killed."""
        return self.served.process.poll() is None

    @property
    def is_router(self) -> bool:
        """Whether it has no engine."""
        return self.name == "router"

    def pids(self) -> list[int]:
        """Of all that it has started; those that have lost their parent, as ranks do whose fork
        server is killed, if they were known before."""
        if not self.is_running:
            return []
        found = faults.tree(self.pid)
        found += sorted(each for each in self._known - {*found} if is_alive(each))
        self._known.update(found)
        return found

    def processes(self) -> dict[str, int]:
        """They by name: its own one by the node's, `engine`, `rank` and `fork server` of it with
        their numbers."""
        found, counts = {self.name: self.pid}, dict[str, int]()
        for pid in self.pids()[1:]:
            for module, kind in (
                ("quire.engine.process", "engine"),
                ("quire.engine.ranks", "rank"),
            ):
                if module in faults.arguments(pid):
                    if faults.short_name(pid) == "quire-forks":
                        kind = "fork server"
                    number = counts[kind] = counts.get(kind, -1) + 1
                    found[f"{self.name} {kind} {number}"] = pid
        return found

    def text(self) -> str:
        """What it has said since its last start."""
        path = self._log.with_name(f"{self._log.name}-{self._num_starts - 1}")
        return path.read_text(errors="replace")


class Deployment:
    """Several nodes; the last one is what clients ask."""

    def __init__(self, *nodes: Node) -> None:
        self.nodes = {each.name: each for each in nodes}
        self.front = nodes[-1]

    @property
    def is_routed(self) -> bool:
        """Whether clients ask a router."""
        return self.front.is_router

    def processes(self) -> dict[str, int]:
        """All by name."""
        return {name: pid for each in self.nodes.values() for name, pid in each.processes().items()}

    def links(self) -> dict[str, list[Link]]:
        """The connections that there are now, by the names of both ends."""
        processes = self.processes()
        names = {pid: name for name, pid in processes.items()} | {os.getpid(): CLIENT}
        ends = {each.ends: each for each in faults.connections(names)}
        found: dict[str, list[Link]] = {}
        for (near, far), each in ends.items():
            other = ends.get((far, near))
            if other is not None and each.pid != other.pid and names[each.pid] != CLIENT:
                kind = " - ".join(sorted((names[each.pid], names[other.pid])))
                found.setdefault(kind, []).append(Link(each.pid, each.fileno))
        for name, pid in processes.items():
            if " engine " in name and (given := faults.arguments(pid)):
                fileno = int(given[given.index("quire.engine.process") + 1])
                found[f"{name} - {CHANNEL}"] = [Link(pid, fileno)]
        return found

    def exposed(self) -> list[str]:
        """Addresses that other machines can reach."""
        return faults.exposed(self.processes().values())

    def is_lasting(self, name: str) -> bool:
        """Whether a process that is no node may stop for a while unnoticed."""
        return False

    def await_whole(self) -> None:
        """Start what was killed, and wait until all answer and hold nothing."""
        for each in self.nodes.values():
            if not each.is_running:
                each.end()
                each.start()
        for each in self.nodes.values():
            if not each.is_router:
                each.served.await_ready()
                each.served.await_idle()
        if self.is_routed:
            until(self._may_all_be_asked)

    def text(self) -> str:
        """The last of what all have said."""
        return "\n".join(f"{each.name}: {each.text()[-3000:]}" for each in self.nodes.values())

    def _may_all_be_asked(self) -> bool:
        shown = self.front.served.get("/admin/backends").json()["data"]
        return all(each["state"] != "down" for each in shown)


def server(name: str, folder: Path, *options: str) -> tuple[Node, str]:
    """A server at a port that is kept for it, and its address."""
    port = reserved_port()
    given = (*SERVER, *options, "--port", str(port))
    return Node(
        name, lambda log: serving(*given, log=log), folder / name
    ), f"http://127.0.0.1:{port}"


def _router(folder: Path, *options: str) -> Node:
    given = (*ROUTER, *options, "--port", str(reserved_port()))
    return Node("router", lambda log: routing(*given, log=log), folder / "router")


def _alone(*options: str) -> Callable[[Path], Deployment]:
    return lambda folder: Deployment(server("server", folder, *options)[0])


def _prefill_and_decode(folder: Path) -> Deployment:
    extra = {"pull_timeout_s": 2.0}
    config = {
        "kv_connector": "TcpConnector",
        "kv_port": reserved_port(),
        "kv_connector_extra_config": extra,
    }
    producer, consumer = (
        ("--kv-transfer-config", json.dumps(config | {"kv_role": role}))
        for role in ("kv_producer", "kv_consumer")
    )
    prefill, prefill_url = server("prefill", folder, *producer)
    decode, decode_url = server("decode", folder, *consumer)
    router = _router(folder, "--prefill-backend", prefill_url, "--backend", decode_url)
    return Deployment(prefill, decode, router)


def _two_back_ends(folder: Path) -> Deployment:
    one, one_url = server("one", folder)
    two, two_url = server("two", folder)
    router = _router(folder, "--backend", one_url, "--backend", two_url)
    return Deployment(one, two, router)


DEPLOYMENTS: Mapping[str, Callable[[Path], Deployment]] = {
    "two ranks": _alone("--tensor-parallel-size", "2", *DIVIDED),
    "two ranks by sockets": _alone(
        "--tensor-parallel-size", "2", "--distributed-executor-backend", "sockets", *DIVIDED
    ),
    "two stages": _alone("--pipeline-parallel-size", "2", *DIVIDED),
    "two replicas": _alone("--data-parallel-size", "2"),
    "prefill and decode": _prefill_and_decode,
    "two back ends": _two_back_ends,
}


@contextmanager
def deployed(made: Deployment) -> Iterator[Deployment]:
    """One, once it is whole; ended with the block, and nothing of it is left."""
    pids = set[int]()
    try:
        for each in made.nodes.values():
            each.start()
        made.await_whole()
        yield made
        pids = set(made.processes().values())
    finally:
        for each in reversed(made.nodes.values()):
            each.end()
    until(lambda: faults.have_ended(pids))
