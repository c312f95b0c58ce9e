"""Executors are made by name, and an unknown name is answered with those that there are."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import pytest

from quire.errors import ConfigError
from quire.executor.null import NullExecutor
from quire.executor.registry import EXECUTORS, ExecutorSpec, make_executor

if TYPE_CHECKING:
    from quire.executor.interface import Executor


def _no_worker() -> NoReturn:
    raise AssertionError("no weights are loaded for this executor")


_SPEC = ExecutorSpec(num_rows=2, num_blocks=4, block_size=4, vocab_size=10, build_worker=_no_worker)


def test_the_null_executor_is_made_without_a_worker() -> None:
    executor = make_executor("null", _SPEC)
    assert isinstance(executor, NullExecutor) and executor.vocab_size == 10


def test_the_inline_executor_builds_its_worker() -> None:
    with pytest.raises(AssertionError, match="no weights"):
        make_executor("inline", _SPEC)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match="no executor called 'gpu'; choose one of inline, mp, null"
    ):
        make_executor("gpu", _SPEC)


def test_another_executor_comes_in_by_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ExecutorSpec] = []

    def make(spec: ExecutorSpec) -> Executor:
        made.append(spec)
        return make_executor("null", spec)

    monkeypatch.setitem(EXECUTORS, "counted", make)
    make_executor("counted", _SPEC)
    assert made == [_SPEC]
