"""Executors are made by name, and an unknown name is answered with those that there are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from quire.config.engine import EngineConfig
from quire.engine.assembly.preparation import prepare_model
from quire.engine.process.link import start_message
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


class Counting(NullExecutor):
    """An executor that a program brings."""

    def __init__(self, spec: ExecutorSpec) -> None:
        super().__init__(
            spec.num_rows, spec.num_blocks, spec.block_size, vocab_size=spec.vocab_size
        )
        self.spec = spec


def test_an_executor_may_be_a_class(tmp_path: Path) -> None:
    from ranks import engine_of, write_model

    folder = write_model(tmp_path, "LlamaForCausalLM")
    for size in (1, 2):
        given = {"distributed_executor_backend": Counting, "tensor_parallel_size": size}
        with engine_of(folder, **given) as engine:
            assert isinstance(engine.executor, Counting) and engine.executor.spec.num_ranks == size


def test_a_class_that_is_no_executor_is_told_what_it_lacks(tmp_path: Path) -> None:
    from ranks import engine_of, write_model

    folder = write_model(tmp_path, "LlamaForCausalLM")
    message = r"=Path is no executor: it lacks launch, execute, .*see quire\.executor\.interface"
    given: dict[str, Any] = {"distributed_executor_backend": Path}
    with pytest.raises(ConfigError, match=message), engine_of(folder, **given):
        pass


def test_a_class_stays_in_its_process(tmp_path: Path) -> None:
    from ranks import write_model

    options: dict[str, Any] = {"distributed_executor_backend": Counting, "load_format": "dummy"}
    config: dict[str, Any] = {"model": str(write_model(tmp_path, "LlamaForCausalLM")), **options}
    with pytest.raises(ConfigError, match="Counting is a class of this process, and data_parallel"):
        EngineConfig(**config, data_parallel_size=2)
    planned = prepare_model(EngineConfig(**config, skip_tokenizer_init=True)).planned
    with pytest.raises(ConfigError, match="Counting is a class of this process, and the en"):
        start_message(planned.plan)
