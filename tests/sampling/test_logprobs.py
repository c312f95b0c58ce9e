"""Reports: alternatives followed by the ids asked for, and prompts that cannot be scored."""

from __future__ import annotations

import math

import pytest
import torch

from quire.core.plan import RowSampling
from quire.errors import RequestError
from quire.kernels.reference.sampling import ReferenceSampling
from quire.sampling.logprobs import Query, describe, num_alternatives, prompt_logprobs

KERNELS = ReferenceSampling()


def test_ids_asked_for_follow_the_alternatives_once() -> None:
    query = Query(
        row=0, max_logit=4.0, token_id=0, num_top=2, extra_ids=(1, 4, 0, 1), is_logits=True
    )
    report = describe(KERNELS, torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0]]), [query])[0]
    assert report.top_ids == (4, 3, 1, 0)
    assert report.top_logprobs == (4.0, 3.0, 1.0, 0.0)
    assert (report.logprob, report.rank) == (0.0, 5)


def test_queries_of_different_lengths_keep_their_order() -> None:
    logits = torch.tensor([[0.0, 1.0], [3.0, 2.0]])
    queries = [Query(i % 2, 1.0 + 2 * (i % 2), token_id=0, num_top=i % 3) for i in range(6)]
    reports = describe(KERNELS, logits, queries)
    assert [len(report.top_ids) for report in reports] == [0, 1, 2, 0, 1, 2]
    assert [report.rank for report in reports] == [2, 1, 2, 1, 2, 1]
    assert reports[0].logprob == pytest.approx(-math.log(1 + math.e))


@pytest.mark.parametrize(("wanted", "got"), [(-1, 50), (0, 0), (7, 7), (99, 50)])
def test_num_alternatives(wanted: int, got: int) -> None:
    assert num_alternatives(wanted, 50) == got


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_prompt_with_bad_logits_is_refused(bad: float) -> None:
    logits = torch.zeros(5, 3)
    logits[-1, 0] = bad
    with pytest.raises(RequestError, match="not finite"):
        prompt_logprobs(KERNELS, logits, [0] * len(logits), RowSampling(num_prompt_logprobs=0))


def test_prompt_logits_and_extra_ids() -> None:
    sampling = RowSampling(
        num_prompt_logprobs=1, logprobs_mode="raw_logits", logprob_token_ids=(2,)
    )
    report = prompt_logprobs(KERNELS, torch.tensor([[5.0, 6.0, 7.5, 8.0]]), [0], sampling)[0]
    assert (report.logprob, report.rank, report.top_ids, report.top_logprobs) == (
        5.0,
        4,
        (3, 2),
        (8.0, 7.5),
    )
