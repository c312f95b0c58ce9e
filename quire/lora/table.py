"""The adapters of one executor: loaded in a thread beside the steps, and which row uses which.

Owns the memory that adapters take. What is loaded and forgotten is the control plane's decision
(`quire.core.scheduler.adapters`): a step never waits for a file.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.common.failures import log_failure
from quire.core.adapters import ADAPTERS, AdapterOrder, AdapterVerdict
from quire.core.plan import Record, StepPlan
from quire.errors import QuireError, RequestError
from quire.kernels.lora import PackedAdapter, StepAdapters

logger = logging.getLogger(__name__)

Loaded = tuple[AdapterOrder, PackedAdapter | str]
"""An order, and its outcome or why there is none."""


class AdapterTable:
    """Implements `Companion` and `AdapterRows`."""

    name = ADAPTERS

    def __init__(self, load: Callable[[AdapterOrder], PackedAdapter], max_loaded: int) -> None:
        self._load, self._max_loaded = load, max_loaded
        self._adapters: dict[str, PackedAdapter] = {}
        self._of_row: dict[int, str] = {}
        """Digests, of the rows that use an adapter."""
        self._asked: queue.SimpleQueue[AdapterOrder | None] = queue.SimpleQueue()
        self._loaded: queue.SimpleQueue[Loaded] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._num_pending = 0

    @property
    def num_bytes(self) -> int:
        """Memory that the loaded adapters take."""
        return sum(adapter.num_bytes for adapter in self._adapters.values())

    def begin(self, plan: StepPlan) -> None:
        for row in plan.removed_rows:
            self._of_row.pop(row, None)
        for order in map(AdapterOrder._make, plan.orders.get(ADAPTERS, ())):
            if order.folder is None:
                self._adapters.pop(order.digest, None)
            else:
                self._ask(order)
        for new in plan.new_rows:
            adapter = new.sampling.adapter
            if adapter is not None:
                self._of_row[new.row] = adapter.digest

    def take_news(self, wait_s: float) -> tuple[Record, ...]:
        if not self._num_pending:
            return ()
        found: list[Loaded] = []
        with contextlib.suppress(queue.Empty):
            if wait_s:
                found.append(self._loaded.get(timeout=wait_s))
            while True:
                found.append(self._loaded.get_nowait())
        self._num_pending -= len(found)
        return tuple(self._verdict(*each) for each in found)

    def close(self) -> None:
        self._asked.put(None)

    def of_step(self, rows: Sequence[int], query_start: Tensor) -> StepAdapters | None:
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
        return StepAdapters(adapters, torch.repeat_interleave(of_row, query_start.diff()))

    def _ask(self, order: AdapterOrder) -> None:
        self._num_pending += 1
        if order.digest in self._adapters:  # a control plane that started over does not know
            self._loaded.put((order, self._adapters[order.digest]))
            return
        self._asked.put(order)
        if self._thread is None:
            arguments = self._load, self._asked, self._loaded
            self._thread = threading.Thread(
                target=_load_all, args=arguments, name="quire-adapters", daemon=True
            )
            self._thread.start()

    def _verdict(self, order: AdapterOrder, outcome: PackedAdapter | str) -> AdapterVerdict:
        if isinstance(outcome, str):
            return AdapterVerdict(order.digest, outcome)
        in_use = {order.digest, *self._of_row.values()}
        for digest in list(
            self._adapters
        ):  # what a control plane that started over has lost count of
            if len(self._adapters) >= self._max_loaded and digest not in in_use:
                del self._adapters[digest]
        self._adapters[order.digest] = outcome
        return AdapterVerdict(order.digest)


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
