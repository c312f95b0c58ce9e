"""The adapters of one executor: loaded in a thread beside the steps, and which row uses which.

Owns the memory that adapters take. What is loaded and forgotten is the control plane's decision
(`quire.core.scheduler.adapters`): a step never waits for a file.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.common.failures import log_failure
from quire.core.adapters import ADAPTERS, FORGET_ALL, AdapterOrder, AdapterVerdict
from quire.core.plan import Record, StepPlan
from quire.errors import QuireError, RequestError
from quire.kernels.lora import PackedAdapter, StatePlaces, StepAdapters

logger = logging.getLogger(__name__)

Loaded = tuple[AdapterOrder, PackedAdapter | str]
"""An order to load, and its outcome or why there is none."""

_EXIT_S = 2.0
"""For so long the interpreter's exit waits for an adapter that is being loaded."""


class AdapterTable:
    """Implements `Companion` and `AdapterRows`."""

    name = ADAPTERS

    def __init__(
        self,
        load: Callable[[AdapterOrder], PackedAdapter],
        max_loaded: int,
        note: Callable[[AdapterOrder, PackedAdapter], None],
    ) -> None:
        """`note` hears of each order and its adapter before a step uses it, also where it was
        loaded for an earlier order: the folder of that one may be gone by now."""
        self._load, self._max_loaded, self._note = load, max_loaded, note
        self._adapters: dict[str, PackedAdapter] = {}
        self._spare: dict[str, PackedAdapter] = {}
        """Loaded for a control plane that started over and may want them again: what there is room
        for beside the others."""
        self._of_row: dict[int, str] = {}
        """Digests, of the rows that use an adapter."""
        self._starts: dict[int, int] = {}
        """Positions from which on they do, of those that do not from the first one on."""
        self._asked: queue.SimpleQueue[AdapterOrder | None] = queue.SimpleQueue()
        self._loaded: queue.SimpleQueue[Loaded] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pending: dict[str, int] = {}
        """Orders to load that no verdict was given on: digest and number."""
        self._verdicts: list[AdapterVerdict] = []
        """Those that need no loading."""

    @property
    def num_bytes(self) -> int:
        """Memory that the loaded adapters take."""
        return sum(each.num_bytes for each in (*self._adapters.values(), *self._spare.values()))

    def begin(self, plan: StepPlan) -> None:
        for row in plan.removed_rows:
            self._of_row.pop(row, None)
            self._starts.pop(row, None)
        for order in map(AdapterOrder._make, plan.orders.get(ADAPTERS, ())):
            if order.folder is not None:
                self._ask(order)
            elif order == FORGET_ALL:
                self._forget_all()
            else:
                self._adapters.pop(order.digest, None)
                self._pending.pop(order.digest, None)
        for new in plan.new_rows:
            adapter = new.sampling.adapter
            if adapter is not None:
                self._of_row[new.row] = adapter.digest
                if new.sampling.adapter_start:
                    self._starts[new.row] = new.sampling.adapter_start

    def take_news(self, wait_s: float) -> tuple[Record, ...]:
        verdicts, self._verdicts = self._verdicts, []
        found: list[Loaded] = []
        with contextlib.suppress(queue.Empty):
            if wait_s and self._pending and not verdicts:
                found.append(self._loaded.get(timeout=wait_s))
            while self._pending:
                found.append(self._loaded.get_nowait())
        for order, outcome in found:
            if self._pending.get(order.digest) == order.number:
                del self._pending[order.digest]
                verdicts.append(self._verdict(order, outcome))
        return tuple(verdicts)

    def close(self) -> None:
        self._asked.put(None)

    def of_step(
        self, rows: Sequence[int], query_start: Tensor, context_len: Tensor
    ) -> StepAdapters | None:
        """See `AdapterRows`. Raises RequestError where a row's adapter is not loaded."""
        if not self._of_row:
            return None
        digests = [self._of_row.get(row) for row in rows]
        places = {
            digest: place for place, digest in enumerate(dict.fromkeys(filter(None, digests)))
        }
        if not places:
            return None
        if not places.keys() <= self._adapters.keys():
            raise RequestError("an adapter is used that is not loaded")
        of_row = torch.tensor(
            [places.get(each, -1) if each else -1 for each in digests], dtype=torch.int32
        )
        adapters = tuple(self._adapters[digest] for digest in places)
        of_token = torch.repeat_interleave(of_row, query_start.diff())
        if not self._starts.keys().isdisjoint(rows):
            self._leave_out(rows, query_start.tolist(), context_len.tolist(), of_token)
        return StepAdapters(adapters, of_token)

    def of_states(self, places: StatePlaces, number: int) -> StepAdapters | None:
        """See `AdapterRows`."""
        if not self._of_row:
            return None
        digests = [self._digest_at(*place) for place in zip(*places, strict=True)]
        found = {digest: self._adapters.get(digest) for digest in dict.fromkeys(digests) if digest}
        used = {
            digest: adapter
            for digest, adapter in found.items()
            if adapter is not None and number in adapter.numbers
        }
        if not used:
            return None
        indices = {digest: index for index, digest in enumerate(used)}
        of_state = [indices.get(each, -1) if each else -1 for each in digests]
        return StepAdapters(tuple(used.values()), torch.tensor(of_state, dtype=torch.int32))

    def _digest_at(self, row: int, position: int) -> str | None:
        """The adapter that a row uses at a position."""
        return self._of_row.get(row) if position >= self._starts.get(row, 0) else None

    def _leave_out(
        self, rows: Sequence[int], starts: list[int], ends: list[int], of_token: Tensor
    ) -> None:
        """Tokens before the position from which on their row uses its adapter use none."""
        for row, start, after, end in zip(rows, starts, starts[1:], ends, strict=False):
            count = min(self._starts.get(row, 0) - (end - (after - start)), after - start)
            if count > 0:
                of_token[start : start + count] = -1

    def _ask(self, order: AdapterOrder) -> None:
        spare = self._spare.pop(order.digest, None)
        if spare is not None:
            self._note(order, spare)
            self._adapters[order.digest] = spare
            self._verdicts.append(AdapterVerdict(order.digest, None, order.number))
            return
        self._pending[order.digest] = order.number
        self._asked.put(order)
        if self._thread is None:
            arguments = self._load, self._asked, self._loaded
            self._thread = threading.Thread(
                target=_load_all, args=arguments, name="quire-adapters", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, _end, self._asked, self._thread)

    def _forget_all(self) -> None:
        self._spare |= self._adapters
        self._adapters = {}
        self._of_row.clear()
        self._starts.clear()
        self._pending.clear()
        self._verdicts.clear()

    def _verdict(self, order: AdapterOrder, outcome: PackedAdapter | str) -> AdapterVerdict:
        if isinstance(outcome, str):
            return AdapterVerdict(order.digest, outcome, order.number)
        while self._spare and len(self._adapters) + len(self._spare) >= self._max_loaded:
            del self._spare[next(iter(self._spare))]
        self._note(order, outcome)
        self._adapters[order.digest] = outcome
        return AdapterVerdict(order.digest, None, order.number)


def _end(asked: queue.SimpleQueue[AdapterOrder | None], thread: threading.Thread) -> None:
    """End the thread of a table that is freed, or that is still there as the interpreter exits: a
    thread that waits then is never woken, and what it refers to never freed, the model included."""
    asked.put(None)
    if thread is not threading.current_thread():
        thread.join(_EXIT_S)


def _load_all(
    load: Callable[[AdapterOrder], PackedAdapter],
    asked: queue.SimpleQueue[AdapterOrder | None],
    loaded: queue.SimpleQueue[Loaded],
) -> None:
    """The thread. It refers to no table, which may so be freed while it waits."""
    while (order := asked.get()) is not None:
        try:
            loaded.put((order, load(order)))
        except QuireError as error:
            loaded.put((order, str(error)))
        except BaseException as error:  # a bug fails the waiting requests, and no others
            log_failure(logger, "an adapter could not be loaded", error)
            loaded.put((order, f"the adapter could not be loaded: {type(error).__name__}"))
