"""What a process is doing, as the kernel sees it."""

from __future__ import annotations

from pathlib import Path


def state_of(pid: int) -> str:
    """R and S while it works or waits, T while it is stopped; X if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "X"
