"""Which neighbours of a batch begin with the same blocks: found on the host, from the block tables,
once a step.

Owns the look for runs (`quire.kernels.interface.SharedPrefixes`). Knows numbers of blocks, not what
is in them: a block is immutable once it is shared, and the same block at the same place of two
tables means the same positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class PrefixRun(NamedTuple):
    """Sequences `first` up to `end`, whose first `num_blocks` blocks are the same."""

    first: int
    end: int
    num_blocks: int


def find_runs(tables: Array, num_known: Sequence[int], unit: int) -> list[PrefixRun]:
    """Runs that cover all S sequences of tables [S, blocks], sharing multiples of `unit` blocks;
    empty if nothing is shared.

    `num_known` says how many whole blocks of each sequence lie before its new tokens. Only the
    table's column at the end of the first unit is looked at while there is no run.
    """
    if tables.shape[1] < unit:
        return []
    column = tables[:, unit - 1]
    is_long = np.array(num_known) >= unit
    is_alike = (column[1:] == column[:-1]) & is_long[1:] & is_long[:-1]
    if not is_alike.any():
        return []
    starts = [0, *(np.flatnonzero(~is_alike) + 1).tolist(), len(tables)]
    runs = [_run(tables, num_known, first, end, unit) for first, end in itertools.pairwise(starts)]
    return runs if any(run.num_blocks for run in runs) else []


def num_spared(runs: Sequence[PrefixRun]) -> int:
    """Return blocks that need not be read again where each run's are read once."""
    return sum((run.end - run.first - 1) * run.num_blocks for run in runs)


def _run(tables: Array, num_known: Sequence[int], first: int, end: int, unit: int) -> PrefixRun:
    if end - first == 1:
        return PrefixRun(first, end, 0)
    most = min(num_known[first:end])
    is_same = (tables[first + 1 : end, :most] == tables[first, :most]).all(axis=0)
    num_same = most if is_same.all() else int(is_same.argmin())
    return PrefixRun(first, end, num_same // unit * unit)


def run_arrays(
    runs: Sequence[PrefixRun], tables: Array, query_start: Sequence[int], block_size: int
) -> tuple[Array, ...]:
    """Return the five arrays of `SharedPrefixes`, in the order of its fields."""
    starts = np.array([query_start[run.first] for run in runs] + [query_start[-1]], np.int32)
    shared = np.array([run.num_blocks * block_size for run in runs], np.int32)
    known = np.repeat(shared, [run.end - run.first for run in runs])
    most = max(run.num_blocks for run in runs)
    return (
        starts,
        shared + np.diff(starts),
        tables[[run.first for run in runs], :most],
        shared,
        known,
    )
