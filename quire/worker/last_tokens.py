"""Tokens that stay on the device: each row's last sampled one in a table, and what the host learns
of them later.

Owns the table, which the next step's inputs are gathered from on the device, and the copies on
their way to the host. Both are written and read in the order in which steps are launched, on one
stream, so a row that has passed to another sequence needs no other mark. It knows rows and tensors;
whether a step can do without its tokens is the worker's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from quire.errors import EngineError

Arrival = Callable[[], list[Tensor]]
"""Waits until tensors have arrived, and gives them: on the host, as often as it is called."""

_LOOK_S = 50e-6
"""So often a waiting host looks. The next step is queued behind the one that is waited for:
nothing is lost meanwhile."""
_DEADLINE_S = 120.0
"""A step takes a second at most; what takes longer than this does not come."""


class Readback(Protocol):
    """The way from the device to the host."""

    def __call__(self, tensors: Sequence[Tensor]) -> Arrival:
        """Begin to copy what the tensors will hold once the operations launched so far are done.
        Waits for nothing."""
        ...


class PinnedReadback:
    """Copies to pinned memory on the current CUDA stream, behind what was launched on it, with an
    event behind them.

    torch gives pinned memory to others only after the copies that use it are done, also where
    no step waited for them.
    """

    def __call__(self, tensors: Sequence[Tensor]) -> Arrival:
        hosts = [
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors
        ]
        for host, tensor in zip(hosts, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()

        def wait() -> list[Tensor]:
            wait_until(copied.query)
            return hosts

        return wait


def wait_until(is_done: Callable[[], bool]) -> None:
    """Wait for the device; EngineError after a time in which any step would have ended."""
    deadline_s = time.monotonic() + _DEADLINE_S
    while not is_done():
        if time.monotonic() > deadline_s:
            raise EngineError(
                f"the device has not finished a step within {_DEADLINE_S:.0f} s; restart the engine"
            )
        time.sleep(_LOOK_S)


class LastTokens:
    """The last sampled token of each row, on one device."""

    def __init__(self, num_rows: int, device: torch.device, read: Readback) -> None:
        self.read = read
        self._token_ids = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def fill_in(self, token_ids: Tensor) -> Tensor:
        """Return a step's ids int64 [T], in which -1 - r stands for the last token of row r, with
        those tokens.

        Operations of the device on places that stay, so that they can be recorded.
        """
        rows = -1 - token_ids
        return torch.where(rows >= 0, self._token_ids.index_select(0, rows.clamp_min(0)), token_ids)

    def put(self, rows: Tensor, token_ids: Tensor) -> None:
        """Tokens int64 [n] sampled for rows int64 [n], each a different one."""
        self._token_ids.index_copy_(0, rows, token_ids)
