"""How what one process of a group writes comes to the others: through memory that all map, or,
where they are on several hosts, over sockets into a memory of the same shape that each has alone.

Either way the sections, their counters and the code around them are the same; a transport makes
the memory, tells new processes how they come to it, and says that a group is over.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from quire.common.tls import TlsContexts, mutual_tls
from quire.config.processes import SSL
from quire.errors import ConfigError, EngineError
from quire.parallel.links import (
    GREETING_TIMEOUT_S,
    Credentials,
    Doorway,
    Introduced,
    dial,
    prepare,
    receive_record,
    send_record,
)
from quire.parallel.sections import GroupShape, Joined, Sections

_LOOK_INTERVAL_S = 0.05
_MOST_COMMAND_BYTES = 2_000_000_000
"""With buffers and counters less than what the native code checks without overflow."""
_CONNECT_TIMEOUT_S = 60.0
"""For processes that have loaded, and know where the others are."""


class GroupMemory(NamedTuple):
    """What all processes of a group know of what they exchange."""

    shape: GroupShape
    command_bytes: int
    silence_s: float


class Transport(Protocol):
    """The first process's side."""

    sections: Sections
    filenos: Sequence[int]
    """Descriptors that the other processes inherit."""

    def renew(self) -> Mapping[str, Any]:
        """Forget former processes, which have ended; return what new ones are told (plain values),
        to be given to `join`."""

    def connect(self, look: Callable[[], None], deadline_s: float) -> None:
        """Wait until the others are there. `look` is called in between, and raises where one of
        them never will be. Raises ConfigError or EngineError."""

    def lose(self) -> None:
        """Have all who wait for another know that the group is over. From any thread."""

    def close(self) -> None:
        """Give back what the system lent. Idempotent."""


class SharedTransport:
    """Processes of one host, which inherit the memory."""

    def __init__(self, memory: GroupMemory) -> None:
        """Raises ConfigError where the system has no memory without a name."""
        self.filenos: Sequence[int] = Sections.create(memory.shape, memory.command_bytes)
        self.sections = Sections(self.filenos, *memory)
        self._observers = self.sections.observers()

    def renew(self) -> Mapping[str, Any]:
        self.sections.reset()
        for each in self._observers:
            each.native.reset()
        return {"filenos": list(self.filenos)}

    def connect(self, look: Callable[[], None], deadline_s: float) -> None:
        return  # the memory is there

    def lose(self) -> None:
        for each in self._observers:
            each.native.lose(0)

    def close(self) -> None:
        filenos, self.filenos = self.filenos, ()
        for fileno in filenos:
            os.close(fileno)


class SocketTransport:
    """Processes anywhere, which reach one another by sockets."""

    filenos: Sequence[int] = ()

    def __init__(
        self, memory: GroupMemory, host: str, facts: str, ssl: Mapping[str, str] | None = None
    ) -> None:
        """`host` is the address at which the others reach this process; `facts` is what they must
        have in common with it; `ssl` are paths of each one's certificate, by the names of
        `DistributedSsl`. Raises ConfigError."""
        if memory.command_bytes > _MOST_COMMAND_BYTES:
            raise ConfigError(
                f"the largest step takes {memory.command_bytes} bytes to tell the other processes "
                f"of, and at most {_MOST_COMMAND_BYTES} are sent; give fewer max_num_batched_tokens"
            )
        self._memory, self._host, self._facts = memory, host, facts
        self._ssl, self._tls = ssl, _contexts(ssl)
        self.sections = _private(memory)
        self._doorway: Doorway | None = None
        self._shown = Credentials(b"")

    def renew(self) -> Mapping[str, Any]:
        self._shut_doorway()
        self.sections.reset()
        secret = secrets.token_bytes(32)  # former processes may still be on their way
        self._shown = Credentials(secret, self._tls)
        self._doorway = Doorway(self._host, self._shown)
        told = {"doorway": self._doorway.address, "secret": secret.hex()}
        return told | ({} if self._ssl is None else {"ssl": self._ssl})

    def connect(self, look: Callable[[], None], deadline_s: float) -> None:
        assert self._doorway is not None, "connected twice"
        doorway, early, found = self._doorway, list[Introduced](), dict[int, Introduced]()
        try:
            while len(found) < self._memory.shape.size - 1:
                look()
                if time.monotonic() > deadline_s:
                    raise EngineError("a process of the model does not report in time")
                arrival = doorway.take(_LOOK_INTERVAL_S)
                if arrival is not None and "process" in arrival.record:
                    found[arrival.record["process"]] = arrival
                    self._check(arrival.record)
                elif arrival is not None:
                    early.append(arrival)
            table = [list(doorway.address)]
            table += [list(found[number].record["address"]) for number in sorted(found)]
            for each in found.values():
                with contextlib.suppress(OSError):  # it will be missed
                    send_record(each.sock, {"addresses": table})
            _connect(self.sections, doorway, self._shown, table, early, self._memory.silence_s)
        finally:
            for each in (*found.values(), *early):
                each.sock.close()
            self._shut_doorway()

    def lose(self) -> None:
        for each in self.sections.joined:
            each.exchange.native.lose(each.rank)

    def close(self) -> None:
        self._shut_doorway()
        self.sections.reset()

    def _check(self, record: Mapping[str, Any]) -> None:
        if record["facts"] != self._facts:
            raise ConfigError(
                f"process {record['process']} of the model has {record['facts']}, and this one has "
                f"{self._facts}: answers could differ in bits; use hosts that are alike, with the "
                "same version"
            )

    def _shut_doorway(self) -> None:
        doorway, self._doorway = self._doorway, None
        if doorway is not None:
            doorway.close()


class Membership(NamedTuple):
    """Another process's side: its view of the sections, what connects it once it has loaded, and
    what ends its connections."""

    sections: Sections
    connect: Callable[[], None]
    close: Callable[[], None]


def join(start: Mapping[str, Any], memory: GroupMemory, facts: str) -> Membership:
    """Make what a process that was started with `start` exchanges by. Its number in the group is
    `start["rank"]`, and its own address, if it needs one, `start["host"]`."""
    if "filenos" in start:
        return Membership(Sections(start["filenos"], *memory), lambda: None, lambda: None)
    sections, tls = _private(memory), _contexts(start.get("ssl"))

    def connect() -> None:
        shown = Credentials(bytes.fromhex(start["secret"]), tls)
        host, port = start["doorway"]
        doorway = Doorway(start["host"], shown)
        try:
            record = {"process": start["rank"], "address": doorway.address, "facts": facts}
            # the first process may have much to load itself before it answers
            deadline_s = time.monotonic() + start["load_timeout_s"]
            with dial((host, port), shown, record, deadline_s) as sock:
                try:
                    table = receive_record(sock, deadline_s)["addresses"]
                except (OSError, ValueError, KeyError):
                    raise EngineError("the first process does not say where all are") from None
            _connect(sections, doorway, shown, table, [], memory.silence_s)
        finally:
            doorway.close()

    return Membership(sections, connect, sections.reset)


def _contexts(ssl: Mapping[str, str] | None) -> TlsContexts | None:
    if ssl is None:
        return None
    try:
        return mutual_tls(ssl["ssl_certfile"], ssl["ssl_keyfile"], ssl["ssl_ca_file"])
    except OSError as error:
        raise ConfigError(f"{SSL}: the certificates cannot be used: {error}") from error


def _private(memory: GroupMemory) -> Sections:
    return Sections([-1] * memory.shape.num_sections, *memory)


def _connect(
    sections: Sections,
    doorway: Doorway,
    shown: Credentials,
    table: Sequence[Sequence[Any]],
    early: list[Introduced],
    silence_s: float,
) -> None:
    """Connect a process to all that it shares a section with: of two, the one of the higher rank
    there dials. `early` are those who came before this was called."""
    deadline_s = time.monotonic() + _CONNECT_TIMEOUT_S
    filenos: dict[tuple[int, int], int] = {}  # by section and the other's rank
    missing = set[tuple[int, int]]()
    try:
        for each in sections.joined:
            for rank in range(each.rank):
                host, port = table[sections.process_of(each.section, rank)]
                record = {"section": each.section, "rank": each.rank}
                greeting_s = min(deadline_s, time.monotonic() + GREETING_TIMEOUT_S)
                sock = dial((host, port), shown, record, greeting_s)
                filenos[each.section, rank] = prepare(sock, silence_s)
            missing |= {(each.section, rank) for rank in range(each.rank + 1, each.size)}
        while missing:
            arrival = early.pop() if early else doorway.take(_LOOK_INTERVAL_S)
            if arrival is not None:
                place = (arrival.record.get("section"), arrival.record.get("rank"))
                if place not in missing:
                    arrival.sock.close()
                    continue
                missing.discard(place)
                filenos[place] = prepare(arrival.sock, silence_s)
            elif time.monotonic() > deadline_s:
                raise EngineError(
                    f"{len(missing)} connections of the model's processes are missing"
                )
    except BaseException:
        for fileno in filenos.values():
            os.close(fileno)
        raise
    for each in sections.joined:
        _give(each, filenos)


def _give(joined: Joined, filenos: Mapping[tuple[int, int], int]) -> None:
    peers = [
        (rank, filenos[joined.section, rank]) for rank in range(joined.size) if rank != joined.rank
    ]
    if peers:
        joined.exchange.native.connect(peers, joined.memory.num_bytes)
