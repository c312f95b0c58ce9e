"""Adapters as a prerequisite: a sequence runs once its adapter is in memory and may be used.

Owns what the control plane knows of the executor's memory for adapters: which are loaded, which
are used by running sequences and so must stay, and who waits for which. A cold adapter delays the
requests that name it, and no others.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, abc
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.core.adapters import (
    ADAPTERS,
    FORGET_ALL,
    Adapter,
    AdapterOrder,
    AdapterVerdict,
)
from quire.core.plan import Record
from quire.core.request import Sequence
from quire.core.scheduler.prerequisites import Settled

MAX_LOAD_S = 120.0
"""From the order to the verdict; gigabytes from a slow disk."""
PATIENCE_S = 1.0
"""After so long a wait for others' adapters, no sequence of another adapter begins before it."""
NOT_LOADED = "waits for its adapter to be loaded"
IN_USE = "waits for one of the adapters in use to be done with (max_loras)"
TOO_SLOW = f"the adapter was not loaded within {MAX_LOAD_S:g} s"


@dataclass(slots=True)
class _Waiting:
    """Sequences that wait for one adapter."""

    adapter: Adapter
    since_s: float | None = None
    sequences: list[Sequence] = field(default_factory=list)


class _Load(NamedTuple):
    """An order to load that no verdict has settled."""

    number: int
    folder: str
    ordered_s: float


class LoadedAdapters:
    """Implements `Prerequisite` and `Retained`."""

    name = ADAPTERS

    def __init__(self, max_active: int, max_loaded: int) -> None:
        """`max_active` adapters are used at once by running sequences, `max_loaded` are kept."""
        assert 1 <= max_active <= max_loaded
        self._max_active, self._max_loaded = max_active, max_loaded
        self._loaded: OrderedDict[str, None] = OrderedDict()
        """Least recently used first."""
        self._loading: dict[str, _Load] = {}
        self._num_loads = 0
        self._to_forget = [FORGET_ALL]
        """Orders for the next plan; the first, since the worker may have served another control
        plane."""
        self._num_running: Counter[str] = Counter()
        self._waiting: dict[str, _Waiting] = {}
        """By digest, in the order of arrival."""
        self._urgent: str | None = None
        """The adapter that has been waited for too long."""

    def refusal(self, sequence: Sequence) -> str | None:
        adapter = sequence.sampling.adapter
        if adapter is None:
            return None
        digest = adapter.digest
        if digest not in self._loaded:
            return NOT_LOADED
        # Siblings may hold their adapter until this sequence has moved on, as beams do.
        has_begun = sequence.request.metrics.first_scheduled_s is not None
        goes_on = has_begun and digest in self._num_running
        if self._urgent not in (None, digest) and not goes_on:
            return IN_USE
        return None if self._may_run(digest, self._num_running.keys()) else IN_USE

    def park(self, sequence: Sequence) -> None:
        adapter = sequence.sampling.adapter
        assert adapter is not None
        waiting = self._waiting.setdefault(adapter.digest, _Waiting(adapter))
        waiting.sequences.append(sequence)

    def unpark(self, sequence: Sequence) -> None:
        adapter = sequence.sampling.adapter
        waiting = self._waiting.get(adapter.digest) if adapter is not None else None
        if waiting is not None and sequence in waiting.sequences:
            waiting.sequences.remove(sequence)
            if not waiting.sequences:
                del self._waiting[waiting.adapter.digest]

    def parked(self) -> list[Sequence]:
        return [each for waiting in self._waiting.values() for each in waiting.sequences]

    def retain(self, sequence: Sequence) -> None:
        adapter = sequence.sampling.adapter
        if adapter is not None:
            self._num_running[adapter.digest] += 1
            self._loaded.move_to_end(adapter.digest)

    def release(self, sequence: Sequence) -> None:
        adapter = sequence.sampling.adapter
        if adapter is None:
            return
        self._num_running[adapter.digest] -= 1
        if not self._num_running[adapter.digest]:
            del self._num_running[adapter.digest]

    def take_orders(self, now: float) -> tuple[Record, ...]:
        orders, self._to_forget = self._to_forget, []
        for digest, waiting in self._waiting.items():
            if waiting.since_s is None:
                waiting.since_s = now
            if digest in self._loaded or digest in self._loading:
                continue
            if len(self._loaded) + len(self._loading) >= self._max_loaded:
                victim = self._victim(digest)
                if victim is None:
                    break
                del self._loaded[victim]
                orders.append(AdapterOrder(victim, None))
            self._num_loads += 1
            folder = waiting.adapter.folder
            self._loading[digest] = _Load(self._num_loads, folder, now)
            orders.append(AdapterOrder(digest, folder, self._num_loads))
        return tuple(orders)

    def take_news(self, news: tuple[Record, ...], now: float) -> list[Settled]:
        if not news and not self._waiting and not self._loading:
            return []
        settled = list[Settled]()
        for digest, error, number in map(AdapterVerdict._make, news):
            load = self._loading.get(digest)
            if load is None or load.number != number:
                continue  # given up
            del self._loading[digest]
            if error is None:
                self._loaded[digest] = None
            elif digest in self._waiting and self._waiting[digest].adapter.folder == load.folder:
                settled.append(Settled(self._waiting.pop(digest).sequences, error))
        settled += self._give_up(now)
        self._urgent = self._waited_too_long(now)
        return settled + self._freed()

    def lose_flights(self) -> None:
        assert not self._num_running
        self._loaded.clear()
        self._loading.clear()
        self._to_forget = [FORGET_ALL]

    def _may_run(self, digest: str, active: abc.Collection[str]) -> bool:
        return digest in active or len(active) < self._max_active

    def _victim(self, wanted: str) -> str | None:
        """Return the least recently used adapter that no sequence runs with, nor waits for unless
        this one is urgent."""
        free = [each for each in self._loaded if each not in self._num_running]
        unused = [each for each in free if each not in self._waiting]
        return next(iter(unused or (free if wanted == self._urgent else ())), None)

    def _freed(self) -> list[Settled]:
        """Who waits for a loaded adapter that may be used now."""
        active, freed = set(self._num_running), list[Settled]()
        for digest in list(self._waiting):
            is_next = self._urgent in (None, digest)
            if is_next and digest in self._loaded and self._may_run(digest, active):
                active.add(digest)
                freed.append(Settled(self._waiting.pop(digest).sequences))
        return freed

    def _waited_too_long(self, now: float) -> str | None:
        """The adapter that has been waited for longest, if that is too long and others are why."""
        for digest, waiting in self._waiting.items():
            if digest in self._loading or waiting.since_s is None:
                continue
            return digest if now - waiting.since_s > PATIENCE_S else None
        return None

    def _give_up(self, now: float) -> list[Settled]:
        """End the wait for adapters that take too long, whatever becomes of them."""
        late = [
            digest for digest, load in self._loading.items() if now - load.ordered_s > MAX_LOAD_S
        ]
        for digest in late:
            del self._loading[digest]
            self._to_forget.append(AdapterOrder(digest, None))
        waiting = (self._waiting.pop(digest) for digest in late if digest in self._waiting)
        return [Settled(each.sequences, TOO_SLOW) for each in waiting]
