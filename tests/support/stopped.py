"""What a process is doing, as the kernel sees it."""

from __future__ import annotations

import time
from pathlib import Path


def state_of(pid: int) -> str:
    """R and S while it works or waits, T while it is stopped; X if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "X"


def has_ended(pid: int) -> bool:
    """Whether it ends before long: one that was killed takes a moment."""
    deadline = time.monotonic() + 60
    while state_of(pid) not in "XZ" and time.monotonic() < deadline:
        time.sleep(0.005)
    return state_of(pid) in "XZ"
