"""Beam search in the engine against the oracle's independent version,
in every mode and in tight memory."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.core.beam import BeamSearch
from quire.core.plan import RowSampling
from quire.core.request import FinishReason
from quire.core.request_spec import BeamSettings


def _harness() -> Any:
    path = Path(__file__).parent / "scheduler" / "conftest.py"
    spec = importlib.util.spec_from_file_location("scheduler_harness", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.Harness


Harness = _harness()


def _search(
    run: Any, settings: BeamSettings, prompt: list[int], max_tokens: int, eos: tuple[int, ...]
) -> tuple[BeamSearch, list[Any]]:
    request = run.add(
        f"r{len(run.specs)}", prompt, max_tokens=max_tokens, beam=settings,
        stop_token_ids=frozenset(eos),
    )  # fmt: skip
    run.run()
    assert isinstance(request.strategy, BeamSearch)
    outcome = [
        (tuple(each.output_token_ids), each.cumulative_logprob, each.finish_reason)
        for each in request.sequences
    ]
    assert outcome == [
        (each.token_ids, each.cumulative_logprob, each.finish_reason)
        for each in request.strategy.hypotheses
    ]
    told = [each for each in run.progress if each.sequence.request is request]
    assert [each.token_id for each in told] == [
        token for token_ids, *_ in outcome for token in (*token_ids, None)
    ]
    return request.strategy, run.oracle.search(run.specs[request.request_id])


@pytest.mark.slow_combinations
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("eos", [(), (3,), (3, 5)])
def test_hypotheses_are_those_of_transformers(
    early_stopping: Any, length_penalty: float, eos: tuple[int, ...]
) -> None:
    run = Harness()
    for width in (1, 2, 4):
        settings = BeamSettings(width, length_penalty, early_stopping)
        strategy, expected = _search(run, settings, [width, 2, 3], 6, eos)
        assert [(list(h.token_ids), h.score) for h in strategy.hypotheses] == [
            tuple(answer) for answer in expected
        ]
        for hypothesis in strategy.hypotheses:
            is_stop = hypothesis.token_ids[-1] in eos
            assert hypothesis.finish_reason is (
                FinishReason.STOP if is_stop else FinishReason.LENGTH
            )


@pytest.mark.parametrize(
    "limits", [{"max_num_seqs": 1}, {"num_blocks": 5}, {"max_num_seqs": 2, "num_blocks": 6}]
)
def test_beams_that_cannot_all_run_at_once_find_the_same(limits: dict[str, int]) -> None:
    run = Harness(block_size=2, max_num_batched_tokens=8, **limits)
    strategy, expected = _search(run, BeamSettings(3), [1, 2, 3, 4], 5, (3,))
    assert [list(h.token_ids) for h in strategy.hypotheses] == [
        answer.token_ids for answer in expected
    ]


def test_beams_share_what_they_have_in_common() -> None:
    run = Harness(block_size=4, num_blocks=64)
    settings = BeamSettings(4)
    run.add("a", [*range(1, 16), 1], max_tokens=3, beam=settings, sampling=RowSampling())
    run.step()
    run.step()
    assert run.scheduler.manager.pool.num_used <= 4 + 4
    run.run()


def test_an_abort_ends_every_beam() -> None:
    run = Harness(max_num_seqs=2)
    run.add("a", [1, 2], max_tokens=9, beam=BeamSettings(4))
    run.step()
    run.step()
    request = run.scheduler.abort("a")
    assert request.is_finished
    assert [each.finish_reason for each in request.sequences] == [FinishReason.ABORT]
    assert request.sequences[0].output_token_ids == [] and not run.progress
    run.run()
    assert run.scheduler.num_waiting == 0
