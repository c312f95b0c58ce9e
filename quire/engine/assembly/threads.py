"""The number of threads that a process computes with: torch's and the native kernels' pools."""

from __future__ import annotations

import os
from functools import cache


def set_num_threads(num_threads: int) -> None:
    """Set the size of both pools. They are the process's: the engine that was built last decides.
    Results never depend on it."""
    _stay_alone_after_fork()
    _resize_pools(num_threads)


def _resize_pools(num_threads: int) -> None:
    import torch

    from quire.kernels import cpu

    torch.set_num_threads(num_threads)
    if cpu.IMPORT_ERROR is None:
        cpu.set_num_threads(num_threads)


@cache
def _stay_alone_after_fork() -> None:
    """Compute with one thread after a fork: a child would wait forever for its parent's OpenMP
    threads."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: _resize_pools(1))
