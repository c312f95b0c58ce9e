"""The null executor agrees with the oracle, and notices what it exists to notice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from quire.common.seeds import derive_seed
from quire.core.plan import (
    ONE_SAMPLE,
    AppendedBlocks,
    AppendedTokens,
    BlockCopy,
    Candidates,
    NewRow,
    RowSampling,
    RowWork,
    Sample,
    ScorePrompt,
    StepPlan,
)
from quire.errors import InvalidParameterError
from quire.executor.null import NullExecutor, null_logits, null_logprobs, null_sample

_PROMPT = (3, 1, 4, 1, 5)
_GREEDY = RowSampling(temperature=0.0)


def _executor() -> NullExecutor:
    return NullExecutor(4, 8, 4, vocab_size=10, key=1)


def _admit(
    row: int = 0, blocks: tuple[int, ...] = (2, 5), sampling: RowSampling = _GREEDY
) -> StepPlan:
    new = NewRow(row, "a", _PROMPT, len(_PROMPT), blocks, sampling)
    return StepPlan(1, work=(RowWork(row, 0, len(_PROMPT), ONE_SAMPLE),), new_rows=(new,))


def test_what_is_sampled_is_what_the_oracle_samples() -> None:
    executor = _executor()
    token_id = executor.execute(_admit()).results[0].token_ids[0]
    assert token_id == null_sample(null_logits(1, _PROMPT, 10), _GREEDY, 0, 5)
    following = (
        executor.execute(StepPlan(2, work=(RowWork(0, 5, 1, ONE_SAMPLE),))).results[0].token_ids[0]
    )
    assert following == null_sample(null_logits(1, (*_PROMPT, token_id), 10), _GREEDY, 0, 6)


def test_chunks_give_what_the_whole_gives() -> None:
    whole, chunked = _executor(), _executor()
    expected = whole.execute(_admit()).results[0]
    plan = replace(_admit(), work=(RowWork(0, 0, 2),))
    assert chunked.execute(plan).results[0].token_ids == ()
    assert chunked.execute(StepPlan(2, work=(RowWork(0, 2, 3, ONE_SAMPLE),))).results[0] == expected


def test_several_samples_have_seeds_of_their_own() -> None:
    sampling = RowSampling(seed=9, num_logprobs=2)
    plan = replace(_admit(sampling=sampling), work=(RowWork(0, 0, 5, (Sample(3),)),))
    result = _executor().execute(plan).results[0]
    logits = null_logits(1, _PROMPT, 10)
    assert result.token_ids == tuple(
        null_sample(logits, sampling, derive_seed(9, index), 5) for index in range(3)
    )
    assert result.logprobs == tuple(
        null_logprobs(logits, token_id, 2) for token_id in result.token_ids
    )


def test_candidates_and_prompt_scores() -> None:
    plan = _admit(sampling=RowSampling(num_prompt_logprobs=1))
    result = (
        _executor()
        .execute(replace(plan, work=(RowWork(0, 0, 5, (Candidates(4), ScorePrompt(1))),)))
        .results[0]
    )
    assert result.token_ids == () and len(result.logprobs[0].top_ids) == 4
    assert list(result.logprobs[0].top_logprobs) == sorted(
        result.logprobs[0].top_logprobs, reverse=True
    )
    scores = [
        null_logprobs(null_logits(1, _PROMPT[:target], 10), _PROMPT[target], 1)
        for target in range(1, 5)
    ]
    assert list(result.prompt_logprobs) == scores


def test_ranks_and_probabilities() -> None:
    record = null_logprobs(np.log(np.array([0.1, 0.6, 0.3])), 2, -1)
    assert record.rank == 2 and record.top_ids == (1, 2, 0)
    assert np.exp(record.logprob) == pytest.approx(0.3) and np.exp(
        record.top_logprobs
    ).sum() == pytest.approx(1.0)


def test_a_copied_block_reads_the_same() -> None:
    executor = _executor()
    token_id = executor.execute(_admit()).results[0].token_ids[0]
    twin = NewRow(1, "b", (*_PROMPT, token_id), 5, (2, 7), _GREEDY)
    work = (RowWork(0, 5, 1, ONE_SAMPLE), RowWork(1, 5, 1, ONE_SAMPLE))
    plan = StepPlan(2, work, new_rows=(twin,), copies=(BlockCopy(5, 7),))
    first, second = executor.execute(plan).results
    assert first == second


@pytest.mark.parametrize("blocks", [(2, 7), (5, 2), (7, 5)])
def test_a_wrong_block_table_changes_the_outcome(blocks: tuple[int, int]) -> None:
    executor = _executor()
    token_id = executor.execute(_admit()).results[0].token_ids[0]
    wrong = NewRow(
        1, "b", (*_PROMPT, token_id), 5, blocks, RowSampling(temperature=0.0, num_logprobs=0)
    )
    right = null_logits(1, (*_PROMPT, token_id), 10)
    result = executor.execute(
        StepPlan(2, work=(RowWork(1, 5, 1, ONE_SAMPLE),), new_rows=(wrong,))
    ).results[0]
    assert result.logprobs[0] != null_logprobs(right, result.token_ids[0], 0)


def test_a_poisoned_or_overwritten_slot_changes_the_outcome() -> None:
    for spoil in ("poison", "overwrite"):
        executor = _executor()
        token_id = (
            executor.execute(_admit(sampling=RowSampling(temperature=0.0, num_logprobs=0)))
            .results[0]
            .token_ids[0]
        )
        if spoil == "poison":
            executor.poison(0, 1, 2)
        else:
            executor.execute(
                replace(
                    _admit(1, (2, 6)),
                    step_id=2,
                    new_rows=(NewRow(1, "b", (9,) * 5, 5, (2, 6), _GREEDY),),
                )
            )
        result = executor.execute(StepPlan(3, work=(RowWork(0, 5, 1, ONE_SAMPLE),))).results[0]
        assert result.logprobs[0] != null_logprobs(
            null_logits(1, (*_PROMPT, token_id), 10), result.token_ids[0], 0
        )


def test_work_beyond_the_row_is_refused() -> None:
    executor = _executor()
    executor.execute(_admit())
    with pytest.raises(AssertionError, match="tokens the row knows"):
        executor.execute(StepPlan(2, work=(RowWork(0, 5, 2, ONE_SAMPLE),)))
    tokens = AppendedTokens(0, (1, 2, 3))
    with pytest.raises(AssertionError, match="row's blocks"):
        executor.execute(
            StepPlan(2, work=(RowWork(0, 5, 4, ONE_SAMPLE),), appended_tokens=(tokens,))
        )


def test_scores_can_only_be_had_from_positions_in_the_step() -> None:
    executor = _executor()
    executor.execute(replace(_admit(), work=(RowWork(0, 0, 3),)))
    with pytest.raises(AssertionError, match="scored by a position not in this step"):
        executor.execute(StepPlan(2, work=(RowWork(0, 3, 2, (*ONE_SAMPLE, ScorePrompt(3))),)))


def test_a_script_dictates() -> None:
    executor = NullExecutor(2, 8, 4, script=lambda name, position: 100 * len(name) + position)
    new = NewRow(0, "ab", (1, 2, 3), 3, (0,), _GREEDY)
    result = executor.execute(StepPlan(1, work=(RowWork(0, 0, 3, (Sample(2),)),), new_rows=(new,)))
    assert result.results[0].token_ids == (203, 203)
    following = executor.execute(
        StepPlan(
            2, work=(RowWork(0, 3, 1, ONE_SAMPLE),), appended_blocks=(AppendedBlocks(0, (1,)),)
        )
    )
    assert following.results[0].token_ids == (204,)
    assert executor.num_steps == 2


def test_processors_are_refused_and_closing_is_harmless() -> None:
    executor = _executor()
    with pytest.raises(InvalidParameterError, match="no logits processors"):
        executor.register_processor(lambda tokens, logits: logits)
    executor.unregister_processor("x")
    executor.close()
    executor.close()
