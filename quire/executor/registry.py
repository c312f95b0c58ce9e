"""Executors by name: the one table of those that there are. Each is imported when it is made:
naming them costs nothing. A class is one that a program brings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.executor.interface import Executor
    from quire.parallel.group import RankGroup
    from quire.parallel.processes import RankPlaces
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
    build_ranks: Callable[[RankPlaces], tuple[Worker, ProcessorTable, RankGroup]] | None = None
    """`build_worker` of rank 0's part, and the processes that have the others', in these places."""
    rank_command: Sequence[str] = ()
    """What starts such a process."""
    num_ranks: int = 1
    """Processes of all stages, the first included."""
    num_threads: int = 1
    """Of each."""
    placement_group: str | None = None
    """The name of that of Ray's in which they are to be."""


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


def _ranks(places: RankPlaces, spec: ExecutorSpec) -> Executor:
    from quire.executor.ranks import RanksExecutor

    assert spec.build_ranks is not None, "nothing says what the ranks are made of"
    return RanksExecutor(*spec.build_ranks(places))


def _local(host: str | None, spec: ExecutorSpec) -> Executor:
    from quire.parallel.fork_server import can_fork
    from quire.parallel.processes import LocalPlaces

    return _ranks(LocalPlaces(spec.rank_command, host, can_fork=can_fork()), spec)


def _ray(spec: ExecutorSpec) -> Executor:
    from quire.parallel.ray_places import RayPlaces

    places = RayPlaces(spec.rank_command, spec.num_ranks, spec.num_threads, spec.placement_group)
    return _ranks(places, spec)


EXECUTORS: dict[str, Callable[[ExecutorSpec], Executor]] = {
    "inline": _inline, "mp": partial(_local, None), "null": _null,
    "ray": _ray, "sockets": partial(_local, "127.0.0.1"),
}  # fmt: skip


def _of_class(given: type[Any], spec: ExecutorSpec) -> Executor:
    """Make an executor of a class. Raises ConfigError where that is none."""
    from quire.executor.interface import Executor

    methods = [name for name in vars(Executor) if not name.startswith("_")]
    lacking = [name for name in methods if not callable(getattr(given, name, None))]
    if lacking:
        raise ConfigError(
            f"distributed_executor_backend={given.__name__} is no executor: it lacks "
            f"{', '.join(lacking)}; see quire.executor.interface.Executor"
        )
    return cast("Executor", given(spec))


def make_executor(name: str | type[Any], spec: ExecutorSpec) -> Executor:
    """Make the executor of this name, or of this class, which is called with `spec`. Raises
    ConfigError naming those that there are, or what a class lacks."""
    if isinstance(name, type):
        return _of_class(name, spec)
    if name not in EXECUTORS:
        raise ConfigError(
            f"there is no executor called {name!r}; choose one of {', '.join(EXECUTORS)}"
        )
    return EXECUTORS[name](spec)
