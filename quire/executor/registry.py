"""Executors by name: the one table of those that there are. Each is imported when it is made:
naming them costs nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.executor.interface import Executor
    from quire.parallel.group import RankGroup
    from quire.sampling.processors import ProcessorTable
    from quire.worker.worker import Worker


class ExecutorSpec(NamedTuple):
    """What an executor is made of, whichever it is."""

    num_rows: int
    num_blocks: int
    block_size: int
    """In tokens."""
    vocab_size: int
    build_worker: Callable[[], tuple[Worker, ProcessorTable]]
    """Loads the weights and allocates the KV memory, in the process that calls it."""
    windows: tuple[int | None, ...] = (None,)
    """Of the groups of layers, as in `SchedulerLimits`."""
    build_ranks: Callable[[], tuple[Worker, ProcessorTable, RankGroup]] | None = None
    """`build_worker` of rank 0's part, and the processes that have the others'."""


def _inline(spec: ExecutorSpec) -> Executor:
    from quire.executor.inline import InlineExecutor

    return InlineExecutor(*spec.build_worker())


def _null(spec: ExecutorSpec) -> Executor:
    from quire.executor.null import NullExecutor

    return NullExecutor(
        spec.num_rows,
        spec.num_blocks,
        spec.block_size,
        vocab_size=spec.vocab_size,
        windows=spec.windows,
    )


def _ranks(spec: ExecutorSpec) -> Executor:
    from quire.executor.ranks import RanksExecutor

    assert spec.build_ranks is not None, "nothing says what the ranks are made of"
    return RanksExecutor(*spec.build_ranks())


EXECUTORS: dict[str, Callable[[ExecutorSpec], Executor]] = {
    "inline": _inline, "mp": _ranks, "null": _null,
}  # fmt: skip


def make_executor(name: str, spec: ExecutorSpec) -> Executor:
    """Make the executor of this name. Raises ConfigError naming those that there are."""
    if name not in EXECUTORS:
        raise ConfigError(
            f"there is no executor called {name!r}; choose one of {', '.join(EXECUTORS)}"
        )
    return EXECUTORS[name](spec)
