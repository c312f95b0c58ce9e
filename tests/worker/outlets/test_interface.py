"""A step's tasks are divided among the outlets, whatever these are,
and put together again by row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from quire.core.plan import ONE_SAMPLE, Candidates, RowWork, Sample, ScorePrompt, WorkResult
from quire.worker.outlets.interface import HiddenStates, batches
from quire.worker.staging import Staging


@dataclass(frozen=True)
class Outlet:
    """Serves some kinds of tasks with nothing."""

    tasks: tuple[Any, ...]

    def launch(self, batch: Any) -> list[WorkResult]:
        return [WorkResult() for _ in batch.tasks]

    def launch_unread(self, batch: Any) -> None:
        return None


TOKENS, SCORES = Outlet((Sample, Candidates)), Outlet((ScorePrompt,))
WORK = (
    RowWork(4, 0, 3, (*ONE_SAMPLE, ScorePrompt(1))),
    RowWork(2, 7, 1, (Candidates(4),)),
    RowWork(0, 0, 2),
    RowWork(1, 0, 2, (ScorePrompt(1),)),
)


def _hidden(work: tuple[RowWork, ...] = WORK) -> HiddenStates:
    query_start = [sum(item.num_tokens for item in work[:place]) for place in range(len(work) + 1)]
    return HiddenStates(work, torch.arange(2.0 * query_start[-1]).reshape(-1, 2), query_start)


def test_each_outlet_gets_its_tasks_of_all_rows_in_order() -> None:
    (first, tokens), (second, scores) = batches((TOKENS, SCORES), _hidden(), range(4))
    assert first is TOKENS and tokens.places == [0, 1] and tokens.tasks == [Sample(), Candidates(4)]
    assert (
        second is SCORES
        and scores.places == [0, 3]
        and [work.row for work in scores.work] == [4, 1]
    )


def test_rows_left_out_and_outlets_without_tasks_have_no_batch() -> None:
    assert [outlet for outlet, _ in batches((TOKENS, SCORES), _hidden(), (1, 2))] == [TOKENS]
    assert batches((TOKENS, SCORES), _hidden(), (2,)) == []


@pytest.mark.parametrize("outlets", [(TOKENS,), (TOKENS, SCORES, SCORES)])
def test_a_task_has_exactly_one_outlet(outlets: tuple[Outlet, ...]) -> None:
    with pytest.raises(AssertionError, match="without an outlet, or with two"):
        batches(outlets, _hidden(), range(4))


def test_the_last_states_of_a_batch_are_those_of_its_works_ends() -> None:
    stage = Staging(torch.device("cpu"))
    chunks = _hidden((RowWork(0, 0, 3, ONE_SAMPLE), RowWork(1, 0, 2), RowWork(2, 5, 1, ONE_SAMPLE)))
    ((_, batch),) = batches((TOKENS,), chunks, (0, 2))
    assert batch.last_states(stage).tolist() == [[4.0, 5.0], [10.0, 11.0]]
    decodes = _hidden((RowWork(0, 5, 1, ONE_SAMPLE), RowWork(1, 5, 1, ONE_SAMPLE)))
    ((_, batch),) = batches((TOKENS,), decodes, range(2))
    assert batch.last_states(stage) is decodes.states, "decodes alone are not copied"


def test_a_row_needs_the_hidden_states_of_its_greediest_task() -> None:
    assert [work.num_wanted for work in WORK] == [3, 1, 0, 2]


def test_an_error_stands_for_all_tasks_of_a_row() -> None:
    sampled, failed = WorkResult(token_ids=(3,)), WorkResult(error="no")
    assert sampled.join(WorkResult(prompt_logprobs=("score",))) == WorkResult(  # type: ignore[arg-type]
        (3,),
        prompt_logprobs=("score",),  # type: ignore[arg-type]
    )
    assert sampled.join(failed) == failed.join(sampled) == failed
