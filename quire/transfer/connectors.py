"""The two ways between engines: a socket of this machine, over which a descriptor of shared memory
is handed, and TCP, encrypted or not.

A producer serves: it waits for consumers, and answers each on a thread of its own. A consumer
pulls. Both sides of every exchange have a deadline, and what arrives is compared with its checksum
before anything reads it. A connector knows sockets and memory, and nothing of blocks.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from quire.common.failures import log_failure
from quire.common.lookup import look_up
from quire.common.tls import TlsContexts, mutual_tls
from quire.config.transfer import NAME, SHARED_MEMORY, UNIX, KVTransferConfig, is_loopback
from quire.core.transfers import RemotePrefix
from quire.errors import ConfigError
from quire.transfer.layout import Chunk
from quire.transfer.leases import LeaseBook, Shelf, StagedPrompt, checksum
from quire.transfer.wire import (
    ChunkHead,
    EndFacts,
    Line,
    Manifest,
    PullDone,
    PullRequest,
    WireError,
)

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
"""Of consumers at once; more are refused."""
MAX_WAIT_S = 2.0
"""That a producer waits for a lease it does not know yet: its answer may be there a step before
what it announces."""
_GREET_S = 5.0
"""For a consumer to say what it wants, and that it may."""
_SERVE_S = 60.0
"""For it to take that."""
_ROUND_S = 0.5


class PullWish(NamedTuple):
    """What a consumer wants, and what it grants for it."""

    remote: RemotePrefix
    ask: PullRequest
    max_bytes: int
    deadline_s: float
    """On the monotonic clock."""


class Pulled(NamedTuple):
    """What a producer had."""

    num_tokens: int
    starts: tuple[int, ...]
    """Of each layer the first token that there is."""
    chunks: list[Chunk]


class Connector(Protocol):
    """One way between engines."""

    def shelf(self) -> Shelf:
        """Return memory for what a producer keeps."""
        ...

    def listen(self) -> socket.socket:
        """Return the socket that consumers connect to. Raises ConfigError."""
        ...

    def accept(self, sock: socket.socket) -> socket.socket:
        """Judge a consumer that has connected. Raises OSError or WireError."""
        ...

    def connect(self, remote: RemotePrefix, deadline_s: float) -> socket.socket:
        """Connect to a producer. Raises OSError, or WireError for one that is not allowed."""
        ...

    def send(self, line: Line, lease: StagedPrompt, heads: Sequence[ChunkHead]) -> None:
        """Give the bytes of chunks that were announced."""
        ...

    def receive(self, line: Line, heads: Sequence[ChunkHead]) -> list[Chunk]:
        """Take the bytes of chunks that were announced."""
        ...


class OwnMemory:
    """Implements `Shelf`: memory of this process."""

    fileno = None

    def put(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        return list(chunks)

    def close(self) -> None:
        """Do nothing: it goes with the chunks."""


class SharedShelf:
    """Implements `Shelf`: memory without a name, that others map by its descriptor. It is gone with
    the last process that has one, however these end."""

    def __init__(self) -> None:
        self.fileno: int | None = os.memfd_create("quire-kv", os.MFD_CLOEXEC)

    def put(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        assert self.fileno is not None
        os.ftruncate(self.fileno, max(1, sum(chunk.data.nbytes for chunk in chunks)))
        view, start, found = np.frombuffer(mmap.mmap(self.fileno, 0), np.uint8), 0, list[Chunk]()
        for chunk in chunks:
            own = view[start : start + chunk.data.nbytes]
            own[:] = chunk.data
            found.append(chunk._replace(data=own))
            start += chunk.data.nbytes
        return found

    def close(self) -> None:
        if self.fileno is not None:
            os.close(self.fileno)
            self.fileno = None


class SharedMemoryConnector:
    """Between engines of one user on one machine."""

    def __init__(self, config: KVTransferConfig) -> None:
        """Raises ConfigError."""
        if not hasattr(os, "memfd_create"):
            raise ConfigError(f"{NAME}: {SHARED_MEMORY} needs Linux; take TcpConnector")
        self._config = config

    def shelf(self) -> Shelf:
        return SharedShelf()

    def listen(self) -> socket.socket:
        folder, path = self._config.folder, self._config.socket_path
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_own(folder)
            _remove_stale(path)
            sock.bind(str(path))
            path.chmod(0o600)
            sock.listen(MAX_CONNECTIONS)
        except OSError as error:
            sock.close()
            raise ConfigError(f"{NAME}: {path} cannot be listened at: {error}") from error
        return sock

    def accept(self, sock: socket.socket) -> socket.socket:
        _check_peer(sock)
        return sock

    def connect(self, remote: RemotePrefix, deadline_s: float) -> socket.socket:
        path = Path(remote.host.removeprefix(UNIX))
        if not remote.host.startswith(UNIX) or path.parent != self._config.folder:
            raise WireError(f"{remote.host[:200]!r} is not a socket in {self._config.folder}")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(0.001, deadline_s - time.monotonic()))
            sock.connect(str(path))
            _check_peer(sock)
        except BaseException:
            sock.close()
            raise
        return sock

    def send(self, line: Line, lease: StagedPrompt, heads: Sequence[ChunkHead]) -> None:
        if heads:
            assert lease.shelf is not None and lease.shelf.fileno is not None
            line.send_bytes(memoryview(b""))  # sets the time limit
            socket.send_fds(line.socket, [b"\0"], [lease.shelf.fileno])

    def receive(self, line: Line, heads: Sequence[ChunkHead]) -> list[Chunk]:
        if not heads:
            return []
        line.receive_bytes(0)
        data, descriptors, _, _ = socket.recv_fds(line.socket, 1, 1)
        try:
            if len(data) != 1 or len(descriptors) != 1:
                raise WireError("the connection ended too early")
            size = os.fstat(descriptors[0]).st_size
            if any(head.start + head.num_bytes > size for head in heads):
                raise WireError("chunks beyond the end of the memory that was given")
            view = np.frombuffer(mmap.mmap(descriptors[0], size, prot=mmap.PROT_READ), np.uint8)
        finally:
            for each in descriptors:
                os.close(each)
        # A copy first, and the checksum of that: the other process can still write to its memory.
        return [
            Chunk(head.first, head.end, view[head.start : head.start + head.num_bytes].copy())
            for head in heads
        ]


class TcpConnector:
    """Between machines."""

    def __init__(self, config: KVTransferConfig) -> None:
        """Raises ConfigError."""
        self._config = config
        self._tls = _tls_contexts(config)

    def shelf(self) -> Shelf:
        return OwnMemory()

    def listen(self) -> socket.socket:
        host, port = self._config.kv_ip, self._config.kv_port
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            sock = socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
        except OSError as error:
            raise ConfigError(f"{NAME}: {host}:{port} cannot be listened at: {error}") from error
        return sock

    def accept(self, sock: socket.socket) -> socket.socket:
        sock.settimeout(_GREET_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock if self._tls is None else self._tls.server.wrap_socket(sock, server_side=True)

    def connect(self, remote: RemotePrefix, deadline_s: float) -> socket.socket:
        extra = self._config.kv_connector_extra_config
        is_known = bool(extra.secret_file) or extra.has_tls
        if extra.hosts and remote.host not in extra.hosts:
            raise WireError(f"{remote.host[:200]!r} is not one of hosts")
        if not (is_known or is_loopback(remote.host)):
            raise WireError(
                f"{remote.host[:200]!r} is another machine, and there is neither a secret nor TLS"
            )
        sock = self._open(remote, deadline_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is None:
            return sock
        try:
            return self._tls.client.wrap_socket(sock)
        except BaseException:
            sock.close()
            raise

    def _open(self, remote: RemotePrefix, deadline_s: float) -> socket.socket:
        """Connect to one of the addresses of a host. Raises OSError."""
        addresses = look_up(remote.host, remote.port, max(0.001, deadline_s - time.monotonic()))
        for address in addresses[:-1]:
            with contextlib.suppress(OSError):
                left_s = max(0.001, deadline_s - time.monotonic())
                return socket.create_connection((address, remote.port), left_s)
        left_s = max(0.001, deadline_s - time.monotonic())
        return socket.create_connection((addresses[-1], remote.port), left_s)

    def send(self, line: Line, lease: StagedPrompt, heads: Sequence[ChunkHead]) -> None:
        chosen = {(head.first, head.end) for head in heads}
        for chunk in lease.chunks:
            if (chunk.first, chunk.end) in chosen:
                line.send_bytes(chunk.data.data)

    def receive(self, line: Line, heads: Sequence[ChunkHead]) -> list[Chunk]:
        return [
            Chunk(head.first, head.end, np.frombuffer(line.receive_bytes(head.num_bytes), np.uint8))
            for head in heads
        ]


def make_connector(config: KVTransferConfig) -> Connector:
    """Return the connector of a config. Raises ConfigError."""
    kind = SharedMemoryConnector if config.kv_connector == SHARED_MEMORY else TcpConnector
    return kind(config)


def pull(connector: Connector, settings: EndFacts, wanted: PullWish) -> Pulled:
    """Fetch chunks of a lease that have the tokens that are wanted, each as it was when its
    producer computed it. Raises OSError or WireError."""
    sock = connector.connect(wanted.remote, wanted.deadline_s)
    with sock:
        line = Line(sock, settings, wanted.deadline_s)
        line.greet(wanted.remote.engine)
        line.send(wanted.ask)
        manifest = line.receive(Manifest)
        if manifest.refusal:
            raise WireError(f"the producer refuses: {manifest.refusal[:200]}")
        _check_manifest(manifest, wanted)
        chunks = connector.receive(line, manifest.chunks)
        for chunk, head in zip(chunks, manifest.chunks, strict=True):
            if checksum(chunk.data.data) != head.checksum:
                raise WireError(f"tokens {head.first} to {head.end} were damaged on the way")
        with contextlib.suppress(OSError):
            line.send(PullDone())
    return Pulled(manifest.num_tokens, manifest.starts, chunks)


def _check_manifest(manifest: Manifest, wanted: PullWish) -> None:
    """Raise WireError for what cannot be."""
    ask, at, num_bytes = wanted.ask, wanted.ask.first, 0
    for head in manifest.chunks:
        if (
            not head.first <= at < head.end <= manifest.num_tokens
            or min(head.first, head.start, head.num_bytes) < 0
        ):
            raise WireError("chunks that do not follow one another")
        at, num_bytes = head.end, num_bytes + head.num_bytes
    if at < min(ask.end, manifest.num_tokens) or any(start < 0 for start in manifest.starts):
        raise WireError("chunks that are too few")
    if num_bytes > wanted.max_bytes:
        raise WireError(f"{num_bytes} bytes, where at most {wanted.max_bytes} can be")


class Producer:
    """Serves what a `LeaseBook` keeps."""

    def __init__(
        self,
        connector: Connector,
        settings: Callable[[float], EndFacts],
        engine: str,
        leases: LeaseBook,
    ) -> None:
        """Listen. `settings` waits so long for what this end knows, and raises WireError. Raises
        ConfigError where nothing can listen."""
        self._connector, self._settings, self._engine = connector, settings, engine
        self._leases = leases
        self._socket = connector.listen()
        self._socket.settimeout(_ROUND_S)
        self._is_closing = False
        self._free = threading.Semaphore(MAX_CONNECTIONS)
        self._thread = threading.Thread(target=self._run, name="kv-producer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End serving. Idempotent."""
        self._is_closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._thread.join(2 * _ROUND_S)
        self._socket.close()

    def _run(self) -> None:
        while not self._is_closing:
            self._leases.expire()
            try:
                sock, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if not self._is_closing:
                    logger.error("consumers of KV cannot connect: %s", error)
                    time.sleep(_ROUND_S)  # as while there are no descriptors left
                continue
            if not self._free.acquire(blocking=False):
                sock.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()
            except RuntimeError as error:  # no thread is to be had
                logger.error("a consumer of KV was not served: %s", error)
                sock.close()
                self._free.release()

    def _serve(self, sock: socket.socket) -> None:
        try:
            with self._connector.accept(sock) as accepted:
                settings = self._settings(_GREET_S)
                line = Line(accepted, settings, time.monotonic() + _GREET_S).as_producer()
                line.welcome(self._engine)
                ask = line.receive(PullRequest)
                line.deadline_s = time.monotonic() + _SERVE_S
                self._answer(line, ask)
        except (OSError, WireError) as error:
            logger.debug("a consumer of KV was not served: %s", error)
        except Exception as error:
            log_failure(logger, "a consumer of KV was not served", error)
        finally:
            sock.close()
            self._free.release()

    def _answer(self, line: Line, ask: PullRequest) -> None:
        lease = self._leases.open(ask.lease, min(max(0.0, ask.wait_s), MAX_WAIT_S))
        if lease is None:
            line.send(Manifest("nothing is kept under this lease, or not any more"))
            return
        is_done = False
        try:
            if lease.content != ask.content:
                line.send(Manifest("what is kept is of another prompt"))
                return
            if lease.shelf is None:
                line.send(Manifest("there was no room to keep it (kv_buffer_size)"))
                is_done = True
                return
            heads = _heads(lease, ask)
            line.send(Manifest("", lease.num_tokens, lease.starts, heads))
            self._connector.send(line, lease, heads)
            line.receive(PullDone)
            is_done = True
        finally:
            self._leases.close(ask.lease, lease, is_done=is_done)


def _heads(lease: StagedPrompt, ask: PullRequest) -> tuple[ChunkHead, ...]:
    found, start = list[ChunkHead](), 0
    for chunk, each in zip(lease.chunks, lease.checksums, strict=True):
        size = chunk.data.nbytes
        if chunk.first < ask.end and chunk.end > ask.first:
            found.append(ChunkHead(chunk.first, chunk.end, start, size, each))
        start += size
    return tuple(found)


def _tls_contexts(config: KVTransferConfig) -> TlsContexts | None:
    """Return those of a server and of a client, each of which checks the other's certificate."""
    extra = config.kv_connector_extra_config
    if extra.ssl_certfile is None:
        return None
    try:
        return mutual_tls(extra.ssl_certfile, extra.ssl_keyfile, extra.ssl_ca_file)
    except OSError as error:
        raise ConfigError(f"{NAME}: the certificates cannot be used: {error}") from error


def _check_own(folder: Path) -> None:
    """Raise ConfigError for a folder in which others could put a socket."""
    status = folder.stat()
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"{NAME}: {folder} can be written by other users; take a folder of your own (chmod 700)"
        )


def _remove_stale(path: Path) -> None:
    """Remove a socket that no process listens at. Raises OSError where one does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_ROUND_S)
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            path.unlink()
            return
    raise OSError("another engine listens there; give another kv_port")


def _check_peer(sock: socket.socket) -> None:
    """Raise WireError for a process of another user."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if user not in (0, os.geteuid()):
        raise WireError(f"the other end runs as user {user}")
