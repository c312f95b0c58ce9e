"""The protocol of outlets, and how a step's tasks are divided among them.

The worker computes hidden states and knows no task. An outlet takes those of its tasks, of all rows
together, and returns what the plan's `WorkResult` has for them. A row's result never depends on
which other rows are in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from quire.core.plan import RowWork, Task, WorkResult
from quire.worker.staging import Staging


class HiddenStates(NamedTuple):
    """What a forward pass gave for some work."""

    work: Sequence[RowWork]
    states: Tensor
    """[T, H], valid until the next forward pass is launched.
    Of each row the last `RowWork.num_wanted` are defined."""
    query_start: list[int]
    """Where each work's tokens begin, and the end: length work + 1."""


class TaskBatch(NamedTuple):
    """The tasks of one outlet in one step."""

    hidden: HiddenStates
    places: list[int]
    """Of each task: the place of its work in the step."""
    tasks: list[Task]

    @property
    def work(self) -> list[RowWork]:
        """The work of each task."""
        return [self.hidden.work[place] for place in self.places]

    def last_states(self, stage: Staging) -> Tensor:
        """Gather the hidden states [n, H] of the last position of each task's work."""
        states, query_start = self.hidden.states, self.hidden.query_start
        if len(self.places) == len(states):
            return states
        (ends,) = stage(
            (np.array([query_start[place + 1] - 1 for place in self.places], np.int64),)
        )
        return states.index_select(0, ends)


class Unread(NamedTuple):
    """What an outlet left on the device, to be read once the next step has been launched."""

    tensors: tuple[Tensor, ...]
    """The first holds one sampled token for each task, int64 [n]."""
    results: Callable[[Sequence[Tensor]], list[WorkResult]]
    """Makes the results of those tensors, once they are on the host."""


class Outlet(Protocol):
    """What becomes of hidden states, for some kinds of tasks."""

    @property
    def tasks(self) -> tuple[type[Task], ...]:
        """The kinds that it serves."""
        ...

    def launch(self, batch: TaskBatch) -> list[WorkResult]:
        """Return one result for each task, with the fields that come of it.
        What fails for one row is that row's error."""
        ...

    def launch_unread(self, batch: TaskBatch) -> Unread | None:
        """Do the same without a wait for the device; None where some task needs one.
        Changes nothing."""
        ...


def batches(
    outlets: Iterable[Outlet], hidden: HiddenStates, places: Iterable[int]
) -> list[tuple[Outlet, TaskBatch]]:
    """Divide the tasks of the work at `places` among the outlets, in the order of the outlets."""
    pairs = [(place, task) for place in places for task in hidden.work[place].tasks]
    found: list[tuple[Outlet, TaskBatch]] = []
    for outlet in outlets:
        mine = [pair for pair in pairs if type(pair[1]) in outlet.tasks]
        if mine:
            found.append(
                (
                    outlet,
                    TaskBatch(hidden, [place for place, _ in mine], [task for _, task in mine]),
                )
            )
    assert sum(len(batch.tasks) for _, batch in found) == len(pairs), (
        "a task without an outlet, or with two"
    )
    return found
