"""Tokens that stay on the device: the table, and the launch of a step that reads nothing back."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.config.engine import EngineConfig
from quire.core.plan import (
    NOT_FINITE,
    ONE_SAMPLE,
    AppendedBlocks,
    NewRow,
    RowSampling,
    RowWork,
    StepPlan,
)
from quire.engine.assembly.builder import build_engine
from quire.engine.loop.engine import Engine
from quire.errors import EngineError
from quire.kernels import cpu
from quire.sampling import Sampler, select_sampling
from quire.worker.last_tokens import Arrival, LastTokens, PinnedReadback, wait_until
from quire.worker.outlets import outlets_for
from quire.worker.rows import RowTable
from quire.worker.worker import Worker

DEVICE = os.environ.get("QUIRE_TEST_DEVICE", "cpu")
"""`make gpu-test` asks for a GPU, where torch itself tells of what waits."""
READING = (
    "tolist",
    "item",
    "cpu",
    "numpy",
    "nonzero",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__array__",
)
"""What waits for a GPU that a tensor is on."""
SAMPLINGS = (
    RowSampling(temperature=0.0),
    RowSampling(seed=5),
    RowSampling(seed=1 << 63, temperature=0.7, top_k=9, top_p=0.8, min_p=0.01),
)


def _at_once(tensors: Sequence[Tensor]) -> Arrival:
    copies = [tensor.clone() for tensor in tensors]
    return lambda: copies


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = build_engine(
        EngineConfig(
            model="quire-storyteller", kv_cache_memory="4MiB", max_num_seqs=4, device=DEVICE
        )
    )
    yield engine
    engine.close()


def _worker(engine: Engine, *, is_late: bool) -> Worker:
    inner: Worker = engine.executor.worker  # type: ignore[attr-defined]
    rows = RowTable(4, engine.plan.limits.block_size)
    sampler = Sampler(select_sampling(inner.model.kernels))
    worker = Worker(inner.model, inner.memory, rows, outlets_for(inner.model, rows, sampler))
    if is_late:
        worker.read_late(_at_once if DEVICE == "cpu" else PinnedReadback())
    return worker


@contextlib.contextmanager
def _nothing_is_read() -> Iterator[None]:
    """Everything fails that would wait for a GPU: reading a tensor, and making one of a list."""
    with pytest.MonkeyPatch.context() as patch:
        for name in READING:
            patch.setattr(torch.Tensor, name, _refusing(getattr(torch.Tensor, name)), raising=False)
        patch.setattr(torch, "tensor", _refuse)
        if DEVICE != "cpu":
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            if DEVICE != "cpu":
                torch.cuda.set_sync_debug_mode("default")


def _refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("the launch of a step waits for the device")


def _refusing(read: Callable[..., Any]) -> Callable[..., Any]:
    """A way to read a tensor, refused for those on the device. Where that is the CPU, for all."""

    def guarded(tensor: Tensor, *args: Any, **options: Any) -> Any:
        return read(tensor, *args, **options) if tensor.device.type != DEVICE else _refuse()

    return guarded


def _begin(samplings: Sequence[RowSampling]) -> StepPlan:
    """Prompts of five, six, ... tokens, all of them computed, a token sampled for each."""
    new = tuple(
        NewRow(row, str(row), tuple(range(40, 45 + row)), 5 + row, (2 * row, 2 * row + 1), sampling)
        for row, sampling in enumerate(samplings)
    )
    return StepPlan(
        1,
        tuple(RowWork(each.row, 0, each.num_prompt_tokens, ONE_SAMPLE) for each in new),
        new_rows=new,
    )


def _decode(step: int, rows: Sequence[int]) -> StepPlan:
    return StepPlan(step, tuple(RowWork(row, 5 + row + step - 2, 1, ONE_SAMPLE) for row in rows))


def test_ids_that_were_not_read_are_filled_in_on_the_device() -> None:
    tokens = LastTokens(4, torch.device(DEVICE), _at_once)
    tokens.put(*torch.tensor([[2, 0], [77, 88]], device=DEVICE))
    rows = RowTable(4, 16)
    for row in (0, 2):
        rows.append_token(row, 5)
        rows.append_unread(row)
    ids = torch.from_numpy(
        np.array([rows.tokens(0)[1], 9, rows.tokens(2)[1], rows.tokens(2)[0], 0], np.int64)
    )
    ids = ids.to(DEVICE)
    assert ids.tolist() == [-1, 9, -3, 5, 0]
    assert tokens.fill_in(ids).tolist() == [88, 9, 77, 5, 0]
    tokens.put(*torch.tensor([[2], [6]], device=DEVICE))
    assert tokens.fill_in(ids).tolist() == [88, 9, 6, 5, 0]


def test_a_device_that_never_ends_is_not_waited_for_forever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = iter([False, False, True])
    wait_until(lambda: next(looks))
    assert next(looks, None) is None
    monkeypatch.setattr("quire.worker.last_tokens._DEADLINE_S", 0.01)
    with pytest.raises(EngineError, match="not finished a step"):
        wait_until(lambda: False)


@pytest.mark.skipif(
    DEVICE == "cpu" and cpu.IMPORT_ERROR is not None, reason="the reference reads as it computes"
)
def test_steps_are_launched_without_a_look_at_the_one_before(engine: Engine) -> None:
    """Greedy, drawn and filtered: three steps are on their way before the first is read,
    and give what one by one gives."""
    plain, late = _worker(engine, is_late=False), _worker(engine, is_late=True)
    plans = [_begin(SAMPLINGS), _decode(2, (0, 1, 2)), _decode(3, (2, 0, 1)), _decode(4, (1,))]
    expected = [plain.execute(plan).results for plan in plans]
    with _nothing_is_read():
        launched = [late.launch(plan) for plan in plans]
    assert [each().results for each in launched] == expected
    assert late.rows.tokens(0).tolist()[-2:] == [-1, -1], "the host's table was told"


def test_the_check_notices_a_launch_that_reads(engine: Engine) -> None:
    """A row with log-probabilities waits for its own step."""
    late = _worker(engine, is_late=True)
    with _nothing_is_read():
        results = late.launch(_begin([RowSampling(temperature=0.0, num_logprobs=1)]))
    assert results().results[0].error is not None


def test_a_step_with_rows_that_are_read_finds_the_tokens_of_those_that_were_not(
    engine: Engine,
) -> None:
    """A penalised row comes, and goes: beside it tokens are read at once;
    the row before was not."""
    penalised = RowSampling(seed=3, presence_penalty=1.0, num_logprobs=2)
    came = NewRow(3, "late", (40, 41, 42), 3, (8, 9), penalised)
    plans = [
        _begin(SAMPLINGS),
        _decode(2, (0, 1, 2)),
        StepPlan(3, (*_decode(3, (0, 1, 2)).work, RowWork(3, 0, 3, ONE_SAMPLE)), new_rows=(came,)),
        StepPlan(4, (*_decode(4, (0, 2)).work, RowWork(3, 3, 1, ONE_SAMPLE))),
        StepPlan(
            5, (*_decode(5, (0, 2)).work, RowWork(1, 6 + 2, 1, ONE_SAMPLE)), removed_rows=(3,)
        ),
    ]
    expected = [each.results for each in map(_worker(engine, is_late=False).execute, plans)]
    late = _worker(engine, is_late=True)
    launched = [late.launch(plan) for plan in plans]
    assert [each().results for each in launched] == expected


def test_a_row_that_passes_to_another_sequence_takes_nothing_of_the_first(engine: Engine) -> None:
    other = NewRow(0, "other", (60, 61, 62, 63), 4, (8, 9), RowSampling(temperature=0.0))
    plans = [
        _begin(SAMPLINGS),
        _decode(2, (0, 1)),
        StepPlan(
            3,
            (RowWork(1, 7, 1, ONE_SAMPLE), RowWork(0, 0, 2)),
            removed_rows=(0,),
            new_rows=(other,),
        ),
        StepPlan(4, (RowWork(0, 2, 2, ONE_SAMPLE), RowWork(1, 8, 1, ONE_SAMPLE))),
        StepPlan(5, (RowWork(0, 4, 1, ONE_SAMPLE),), appended_blocks=(AppendedBlocks(0, (10,)),)),
    ]
    expected = [each.results for each in map(_worker(engine, is_late=False).execute, plans)]
    late = _worker(engine, is_late=True)
    launched = [late.launch(plan) for plan in plans]
    assert [each().results for each in launched] == expected


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "drawn", "filtered"])
def test_a_row_that_is_not_finite_is_told_of_late_and_alone(
    engine: Engine, sampling: RowSampling
) -> None:
    plans = [_begin([sampling, sampling]), _decode(2, (0, 1)), _decode(3, (0, 1))]
    alone = _worker(engine, is_late=False)
    expected = [alone.execute(plan).results for plan in plans]
    late = _worker(engine, is_late=True)
    launched = [late.launch(plans[0])]
    late.memory.caches[0][0][0] = float("nan")  # a block of row 0
    launched += map(late.launch, plans[1:])
    found = [each().results for each in launched]
    assert found[0] == expected[0] and found[1][0].error == NOT_FINITE and not found[1][0].token_ids
    assert [each[1] for each in found] == [each[1] for each in expected]
    late.memory.caches[0][0][0] = 0.0


def test_what_raises_costs_its_row_alone(engine: Engine) -> None:
    plans = [_begin(SAMPLINGS), _decode(2, (0, 1, 2)), _decode(3, (0, 1, 2))]
    plain = _worker(engine, is_late=False)
    expected = [plain.execute(plan).results for plan in plans]
    late = _worker(engine, is_late=True)
    launch = late._launch

    def fail(work: Sequence[RowWork]) -> Any:
        if any((item.row, item.start) == (1, 6) for item in work):
            raise RuntimeError("a kernel refused")
        return launch(work)

    late._launch = fail  # type: ignore[method-assign]
    found = [each().results for each in [late.launch(plan) for plan in plans]]
    assert found[0] == expected[0]
    assert found[1][1].error == "the model failed on this sequence: RuntimeError"
    assert found[2][1].error is not None and "before this one" in found[2][1].error
    assert [each[::2] for each in found] == [each[::2] for each in expected]
