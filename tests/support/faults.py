"""What can be done to other processes from outside, and what the system shows of them: processes of
a tree, connections between them, how one is cut, ports that can be reached from other machines."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import signal
import socket
import struct
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

import pytest
from served import children, is_alive, listening

_PIDFD_GETFD = 438
"""The system call, the same on all architectures of Linux."""
_ESTABLISHED = "01"


class Connection(NamedTuple):
    """One end of an established TCP connection."""

    pid: int
    fileno: int
    """Of the process that has it."""
    ends: tuple[str, str]
    """This one and the other, as the system writes them."""


def tree(pid: int) -> list[int]:
    """A process and all that it and its children have started, as far as they still have a
    parent."""
    found, at = [pid], 0
    while at < len(found):
        with contextlib.suppress(OSError):
            found += children(found[at])
        at += 1
    return found


def arguments(pid: int) -> list[str]:
    """The command of a process; empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]
    except OSError:
        return []


def short_name(pid: int) -> str:
    """The name that a process has given itself; empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def connections(pids: Iterable[int]) -> list[Connection]:
    """The established TCP connections of processes, by their descriptors."""
    ends = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == _ESTABLISHED:
                ends[f"socket:[{columns[9]}]"] = (columns[1], columns[2])
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):  # closed since
                    known = ends.get(os.readlink(entry.path))
                    if known is not None:
                        found.append(Connection(pid, int(entry.name), known))
    return found


def cut(pid: int, fileno: int) -> None:
    """End a connection of another process in both directions, as a network that resets it does.
    Skips where the system lends no descriptors. Raises OSError where it is gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(pid)
    try:
        lent = libc.syscall(_PIDFD_GETFD, process, fileno, 0)
    finally:
        os.close(process)
    if lent < 0:
        number = ctypes.get_errno()
        if number in (1, 38):  # not permitted, or not there
            pytest.skip("this system lends no descriptors of other processes")
        raise OSError(number, os.strerror(number))
    with socket.socket(fileno=lent) as sock:
        sock.shutdown(socket.SHUT_RDWR)


def go_on(pids: Iterable[int]) -> None:
    """Have processes run that were stopped, as far as they are there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def have_ended(pids: Collection[int]) -> bool:
    """Whether none of these processes is left."""
    return not any(map(is_alive, pids))


def exposed(pids: Iterable[int]) -> list[str]:
    """Addresses at which processes listen for other machines."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):  # ended since
            found += [each for each in listening(pid) if not _address(each).is_loopback]
    return found


def _address(shown: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Of `/proc/net/tcp`: words of 32 bits in the order of this machine."""
    digits = shown.partition(":")[0]
    words = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
    address = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped or address
