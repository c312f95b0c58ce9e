"""Rank 0's side of a group: it asks the others for what it computes itself at the same time.

Whatever goes wrong in between (a rank that is gone or silent, an exception on any side) ends the
group as a whole: where the ranks are within a step is then unknown. `restart` makes another.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from quire.errors import EngineError
from quire.kernels.exchange import Exchange
from quire.parallel.processes import RankProcess, Watcher
from quire.parallel.shared_memory import RankCommand, SharedMemory, create_memory

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 3600.0
"""Ranks that are not loaded by then never will be."""
Result = TypeVar("Result")


class GroupLostError(EngineError):
    """A rank is gone or silent: the step is lost, and so is what the others held."""


class RankGroup:
    """The processes of ranks 1 and above, and what they share with this one."""

    def __init__(
        self,
        command: Sequence[str],
        start: Mapping[str, Any],
        *,
        num_ranks: int,
        command_bytes: int,
        silence_s: float,
    ) -> None:
        """Start the processes; they load while this one does. `start` says what they build; rank,
        sizes and the memory's descriptor are added to it."""
        self.num_ranks = num_ranks
        self._command, self._start = tuple(command), dict(start)
        self._fileno = create_memory(command_bytes)
        self.memory = SharedMemory(self._fileno, command_bytes)
        self.exchange: Exchange = self.memory.exchange(0, num_ranks, silence_s)
        self._start |= {
            "fileno": self._fileno, "num_ranks": num_ranks, "command_bytes": command_bytes,
            "silence_s": silence_s,
        }  # fmt: skip
        self._processes: list[RankProcess] = []
        self._is_closed = False
        self._watcher: Watcher | None = None
        try:
            self._launch()
        except BaseException:
            self.close()
            raise
        self._watcher = Watcher(self.exchange.native.beat, self._look)

    @property
    def pids(self) -> list[int]:
        """The processes of ranks 1 and above."""
        return [each.pid for each in self._processes]

    @property
    def is_lost(self) -> bool:
        """Whether a rank is known to be gone."""
        return self.exchange.native.is_lost

    def wait_ready(self) -> None:
        """Wait until all ranks have loaded. Raises ConfigError or EngineError, and ends them, where
        one cannot."""
        deadline_s = time.monotonic() + LOAD_TIMEOUT_S
        try:
            for each in self._processes:
                each.wait_ready(deadline_s)
        except BaseException:
            self._end()
            raise

    def call(self, command: RankCommand, run: Callable[[], Result]) -> Result:
        """Have all ranks do the same; `run` is this one's part."""
        native = self.exchange.native
        if native.is_lost:
            raise GroupLostError("a rank of the group is gone")
        try:
            native.wait_done()
            self.memory.write(command)
            native.post()
            return run()
        except Exception as error:
            native.lose(0)
            raise GroupLostError(str(error)) from error

    def restart(self) -> None:
        """Replace all ranks but this one. Raises EngineError where they cannot be."""
        logger.error("a rank is lost; %d processes are replaced", len(self._processes))
        self._end()
        self.exchange.native.reset()
        self._launch()
        self.wait_ready()

    def close(self) -> None:
        """End the processes and give the descriptor back. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._watcher is not None:
            self._watcher.close()
        self._end()
        os.close(self._fileno)
        del self.exchange, self.memory

    def _launch(self) -> None:
        for rank in range(1, self.num_ranks):
            start = self._start | {"rank": rank}
            self._processes.append(RankProcess(self._command, start, self._fileno))

    def _end(self) -> None:
        processes, self._processes = self._processes, []
        for each in processes:
            each.kill()
        for rank in range(1, self.num_ranks):
            self.exchange.native.lose(rank)

    def _look(self) -> None:
        for rank, each in enumerate(list(self._processes), 1):
            if each.has_ended:
                self.exchange.native.lose(rank)
