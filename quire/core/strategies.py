"""Strategies: sampling (independent sequences that share their prompt's blocks), pooling, and the
one that a spec asks for."""

from __future__ import annotations

from quire.core.beam import BeamSearch
from quire.core.plan import ONE_SAMPLE, Sample, Task, WorkResult
from quire.core.pooling import Pool, WeighTokens
from quire.core.request import DecodingStrategy, FinishReason, Sequence, SequenceOps
from quire.core.request_spec import RequestSpec


def strategy_of(spec: RequestSpec, *, is_forked: bool = False) -> DecodingStrategy:
    """Return a new strategy for a request; `is_forked` where its sequences are there already."""
    if spec.pool is not None:
        return PoolingStrategy(spec.pool, is_whole=spec.pool.is_whole)
    if spec.weigh is not None:
        return PoolingStrategy(spec.weigh)
    return (
        SamplingStrategy(spec.num_sequences, is_forked=is_forked)
        if spec.beam is None
        else BeamSearch(spec)
    )


class SamplingStrategy:
    """Independent samples: the first closed gap of the prompt forks into `num_sequences`
    sequences on shared blocks."""

    early_tasks: tuple[Task, ...] = ()

    def __init__(self, num_sequences: int = 1, *, is_forked: bool = False) -> None:
        self.num_sequences = num_sequences
        self._first_tasks: tuple[Task, ...] = (Sample(num_sequences),)
        self.is_plain = is_forked or num_sequences == 1

    def tasks(self, sequence: Sequence) -> tuple[Task, ...]:
        return ONE_SAMPLE if self.is_plain else self._first_tasks

    def absorb(self, ops: SequenceOps, sequence: Sequence, result: WorkResult) -> None:
        if not self.is_plain:
            self._fork(ops, sequence, result)
        ops.append(
            sequence,
            result.token_ids[0],
            result.logprobs[0] if result.logprobs else None,
            is_on_worker=True,
        )

    def _fork(self, ops: SequenceOps, sequence: Sequence, result: WorkResult) -> None:
        """Fork while the parent still stands at the end of the prompt,
        then give each child its own first token."""
        self.is_plain = True
        logprobs = result.logprobs or (None,) * len(result.token_ids)
        children = [ops.fork(sequence, index) for index in range(1, self.num_sequences)]
        for child, token_id, record in zip(
            children, result.token_ids[1:], logprobs[1:], strict=True
        ):
            ops.append(child, token_id, record, is_on_worker=False)


class PoolingStrategy:
    """Numbers of the prompt, and no token: the sequence ends where the prompt does. With `is_whole`
    the task is one of every chunk."""

    is_plain = False

    def __init__(self, task: Pool | WeighTokens, *, is_whole: bool = False) -> None:
        self._tasks: tuple[Task, ...] = (task,)
        self.early_tasks: tuple[Task, ...] = self._tasks if is_whole else ()

    def tasks(self, sequence: Sequence) -> tuple[Task, ...]:
        return self._tasks

    def absorb(self, ops: SequenceOps, sequence: Sequence, result: WorkResult) -> None:
        sequence.request.pooled = result.pooled
        ops.finish(sequence, FinishReason.STOP)
