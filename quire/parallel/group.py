"""Rank 0's side of a group: it asks the ranks of its stage for what it computes itself at the same
time, and the later stages for what follows.

Whatever goes wrong in between (a rank that is gone or silent, an exception on any side) ends the
group as a whole: where the ranks are within a step is then unknown. `restart` makes another.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from quire.errors import EngineError
from quire.kernels.exchange import Exchange
from quire.parallel.processes import RankHandle, RankPlaces, Watcher
from quire.parallel.sections import ResultReceiver, StageSender
from quire.parallel.shared_memory import RankCommand
from quire.parallel.transports import GroupMemory, Transport

LOAD_TIMEOUT_S = 3600.0
"""Ranks that are not loaded by then never will be."""
Result = TypeVar("Result")


class GroupLostError(EngineError):
    """A rank is gone or silent: the step is lost, and so is what the others held."""


class RankGroup:
    """The processes of all ranks but the first of the first stage, and what they share with it."""

    def __init__(
        self,
        places: RankPlaces,
        transport: Transport,
        start: Mapping[str, Any],
        memory: GroupMemory,
    ) -> None:
        """Start the processes; they load while this one does. `start` says what they build; rank,
        sizes and the way to the memory are added to it. Places and transport are the group's own
        from now on."""
        self.shape = shape = memory.shape
        self._places, self._transport = places, transport
        self._sections = transport.sections
        self._observers = self._sections.observers()
        self.memory, self.exchange = self._sections.exchange(0, 0)
        self.next_stage: StageSender | None = None
        """The way into the stage after this one, if there is any; and the way back."""
        self.results: ResultReceiver | None = None
        if shape.num_stages > 1:
            self.next_stage = self._sections.sender(1)
            self.results = self._sections.result_receiver()
        self._start = dict(start) | {
            "num_ranks": shape.num_ranks, "num_stages": shape.num_stages,
            "command_bytes": memory.command_bytes, "silence_s": memory.silence_s,
            "load_timeout_s": LOAD_TIMEOUT_S,
        }  # fmt: skip
        self.num_starts = 0
        """How often processes were started: new ones have nothing of what the former were told."""
        self._processes: list[RankHandle] = []
        self._changing = threading.Lock()
        """Held while processes are replaced, and while it is looked who has ended."""
        watcher = Watcher(self._sections.beat, self._look)
        self._finish = weakref.finalize(
            self, _finish, watcher, self._processes, transport, places
        )  # also of a group that is dropped, or still there when the program ends
        try:
            with self._changing:
                self._launch()
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The other processes, those of this stage first. Of another host, the number there."""
        return [each.pid for each in self._processes]

    @property
    def is_lost(self) -> bool:
        """Whether a rank is known to be gone."""
        return any(each.native.is_lost for each in self._observers)

    @property
    def shared(self) -> Exchange | None:
        """What this stage's ranks exchange by; None where it has one alone."""
        return None if self.shape.num_ranks == 1 else self.exchange

    def wait_ready(self) -> None:
        """Wait until all ranks have loaded. Raises ConfigError or EngineError, and ends them, where
        one cannot."""
        deadline_s = time.monotonic() + LOAD_TIMEOUT_S
        try:
            self._transport.connect(self._check, deadline_s)
            for each in self._processes:
                each.wait_ready(deadline_s)
            self._places.settle()
        except BaseException:
            self._end()
            raise

    def call(self, command: RankCommand, run: Callable[[], Result]) -> Result:
        """Have all ranks of this stage do the same; `run` is this one's part."""
        native = self.exchange.native
        with self.uninterrupted():
            if self.shape.num_ranks > 1:
                native.wait_done()
                native.post(*self.memory.write(command))
            return run()

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Whatever is raised within ends the group, as GroupLostError; Ctrl-C as itself."""
        if self.is_lost:
            raise GroupLostError("a rank of the group is gone")
        try:
            yield
        except Exception as error:
            self._lose()
            raise GroupLostError(str(error)) from error
        except BaseException:  # the others are in the middle of what this one has left
            self._lose()
            raise

    def tell(self, command: RankCommand, run: Callable[[], None] = lambda: None) -> None:
        """Have all processes do the same, each when it comes to it; `run` is this one's part."""
        with self.uninterrupted():
            self.call(command, run)
            if self.next_stage is not None:
                self.next_stage.send(command)

    @property
    def told(self) -> Mapping[str, Any]:
        """What the other ranks are told to build."""
        return self._start

    def restart(self, told: Mapping[str, Any] | None = None) -> None:
        """Replace all ranks but this one; `told` changes what they build, from now on. Raises
        ConfigError or EngineError where they cannot be: the group is over then, and what they are
        told is what it was."""
        former = self._start
        self._start = {**former, **(told or {})}
        try:
            with self._changing:
                self._end()
                self._launch()
            self.wait_ready()
        except BaseException:  # some of them may not have been started
            self.end(former)
            raise

    def end(self, told: Mapping[str, Any] | None = None) -> None:
        """End all ranks but this one, until `restart`; `told` is what they are told to build then,
        by default what these were."""
        self._start = dict(told or self._start)
        with self._changing:
            self._end()

    def close(self) -> None:
        """End the processes and give back what was taken for them. Idempotent."""
        if self._finish.alive:
            self._finish()
            del self.exchange, self.memory, self.next_stage, self.results
            del self._sections, self._observers, self._transport

    def _launch(self) -> None:
        self.num_starts += 1
        told = {**self._start, **self._transport.renew()}
        for rank in range(1, self.shape.size):
            start = told | {"rank": rank}
            self._processes.append(self._places.start(start, self._transport.filenos))

    def _check(self) -> None:
        """Raise where a process will never be ready."""
        for each in self._processes:
            each.look()

    def _end(self) -> None:
        _kill(self._processes)
        self._lose()

    def _look(self) -> None:
        with self._changing:
            if any(each.has_ended for each in self._processes):
                self._lose()

    def _lose(self) -> None:
        self._transport.lose()


def _finish(
    watcher: Watcher, processes: list[RankHandle], transport: Transport, places: RankPlaces
) -> None:
    """End a group, of which this refers to nothing."""
    watcher.close()
    _kill(processes)
    transport.lose()
    transport.close()
    places.close()


def _kill(processes: list[RankHandle]) -> None:
    ended = processes[:]
    processes.clear()
    for each in ended:
        each.kill()
