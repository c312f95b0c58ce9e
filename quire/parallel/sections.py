"""The memory of a group of processes: sections, each for those of its processes that wait for one
another.

A group has stages, and each stage has ranks. The ranks of a stage exchange parts of values; what
a stage computes goes to all ranks of the next one, and from the last to the first process of all.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from quire.kernels.exchange import Exchange
from quire.parallel.shared_memory import Extent, RankCommand, SharedMemory, create_memory

ROUND_S = 1.0
"""Between two looks at whether to go on, while nothing is to be done."""


GREETING = RankCommand(-1, (), ())


class GroupShape(NamedTuple):
    """Stages, and the ranks of each. Processes are numbered stage by stage."""

    num_stages: int
    num_ranks: int

    @property
    def size(self) -> int:
        """Processes."""
        return self.num_stages * self.num_ranks

    @property
    def num_sections(self) -> int:
        """For exchanges in each stage, for what goes into each but the first, and for results."""
        return 1 if self.num_stages == 1 else 2 * self.num_stages


class StageSender:
    """One end of what goes from one process to some others, in order."""

    def __init__(self, memory: SharedMemory, exchange: Exchange) -> None:
        self._memory, self._native = memory, exchange.native

    def greet(self) -> None:
        """Say that there will be signs of life from now on. Before anything else."""
        self.send(GREETING)

    def send(self, command: RankCommand) -> None:
        """Put a command down, once all have taken the one before. Raises RuntimeError when one of
        them is gone or silent."""
        self._native.wait_done()
        self._native.post(*self._memory.write(command))


class StageReceiver:
    """The other end: each takes every command."""

    def __init__(self, memory: SharedMemory, exchange: Exchange) -> None:
        self._memory, self._native = memory, exchange.native
        self._has_heard = False

    def receive(self, timeout_s: float) -> RankCommand | None:
        """Wait for the next command; None after so long. With a negative timeout, RuntimeError says
        that the sender is gone or, once it has greeted, silent. The tensors are copies: the sender
        goes on at once."""
        if not self._native.wait_posted(timeout_s if self._has_heard else ROUND_S):
            return None
        command = self._memory.read()
        tensors = tuple(None if each is None else each.clone() for each in command.tensors)
        self._native.finish(*Extent())
        self._has_heard = True
        return None if command == GREETING else command._replace(tensors=tensors)


class ResultSender:
    """The last stage's end of a step's result, which arrives in pieces."""

    def __init__(self, memory: SharedMemory, exchange: Exchange) -> None:
        self._memory, self._native = memory, exchange.native

    def send(self, first_row: int, states: Tensor) -> None:
        """Put rows [n, H] down; the others of the step are elsewhere, so that nothing waits."""
        room = self._memory.rows(first_row, states.shape[1], len(states), states.dtype)
        room.copy_(states)
        self._native.post(*self._memory.extent_of(room))


class ResultReceiver:
    """The first process's end."""

    def __init__(self, memory: SharedMemory, exchange: Exchange) -> None:
        self._memory, self._native = memory, exchange.native

    def receive(self, num_pieces: int, out: Tensor) -> None:
        """Wait for all pieces of a result [T, H], and copy it. Raises RuntimeError when the last
        stage is gone or silent."""
        for _ in range(num_pieces):
            self._native.wait_posted(-1.0)
        out.copy_(self._memory.rows(0, out.shape[1], len(out), out.dtype))


class Joined(NamedTuple):
    """A section that a process takes part in, as one of `size`."""

    section: int
    rank: int
    size: int
    memory: SharedMemory
    exchange: Exchange


class Sections:
    """One process's view of all of them."""

    def __init__(
        self, filenos: Sequence[int], shape: GroupShape, command_bytes: int, silence_s: float
    ) -> None:
        self.shape, self._silence_s = shape, silence_s
        self._memories = [SharedMemory(fileno, command_bytes) for fileno in filenos]
        self.joined: list[Joined] = []
        self._beating = threading.Lock()
        """Held while signs of life are given: connections that are used then outlive a reset, whose
        end would be taken for the loss of a rank by those that follow."""

    @staticmethod
    def create(shape: GroupShape, command_bytes: int) -> list[int]:
        """Return the descriptors of new memory. Raises ConfigError where the system has none."""
        found: list[int] = []
        try:
            for _ in range(shape.num_sections):
                found.append(create_memory(command_bytes))
        except BaseException:
            for fileno in found:
                os.close(fileno)
            raise
        return found

    def exchange(self, stage: int, rank: int) -> tuple[SharedMemory, Exchange]:
        """What the ranks of a stage share."""
        return self._joined(stage, rank, self.shape.num_ranks)

    def sender(self, stage: int) -> StageSender:
        """What goes into a stage, as the first rank of the one before has it."""
        return StageSender(*self._joined(self._entry(stage), 0, self.shape.num_ranks + 1))

    def receiver(self, stage: int, rank: int) -> StageReceiver:
        """The same as a rank of the stage has it."""
        return StageReceiver(*self._joined(self._entry(stage), rank + 1, self.shape.num_ranks + 1))

    def result_sender(self) -> ResultSender:
        """What comes out of the last stage, as its first rank has it."""
        return ResultSender(*self._joined(self.shape.num_sections - 1, 0, 2))

    def result_receiver(self) -> ResultReceiver:
        """The same as the first process has it."""
        return ResultReceiver(*self._joined(self.shape.num_sections - 1, 1, 2))

    def process_of(self, section: int, rank: int) -> int:
        """Return which process of the group takes part in a section as this rank."""
        num_stages, num_ranks = self.shape
        if section < num_stages:
            return section * num_ranks + rank
        if section == self.shape.num_sections - 1:
            return 0 if rank == 1 else (num_stages - 1) * num_ranks
        stage = section - num_stages + 1
        return (stage - 1) * num_ranks if rank == 0 else stage * num_ranks + rank - 1

    def beat(self) -> None:
        """Give a sign of life in every section that this process is part of."""
        with self._beating:
            for each in self.joined:
                each.exchange.native.beat()

    def observers(self) -> list[Exchange]:
        """Return one for each section, to say that a process is lost, or to begin anew; they take
        part in nothing."""
        size = self.shape.num_ranks + (self.shape.num_stages > 1)  # with the sender of a way in
        return [each.exchange(0, size, self._silence_s) for each in self._memories]

    def reset(self) -> None:
        """Begin anew, once all other processes have ended."""
        with self._beating:
            for each in self.joined:
                each.exchange.native.reset()

    def _entry(self, stage: int) -> int:
        return self.shape.num_stages + stage - 1

    def _joined(self, section: int, rank: int, size: int) -> tuple[SharedMemory, Exchange]:
        memory = self._memories[section]
        exchange = memory.exchange(rank, size, self._silence_s)
        self.joined.append(Joined(section, rank, size, memory, exchange))
        return memory, exchange
