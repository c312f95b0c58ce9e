"""The null executor: carries out plans without a model, and notices every mistake in their block
tables.

It keeps, for each physical slot, the token written there and a running hash of the history before
it. The "logits" of a position are a keyed function of the tokens and hashes *as read back through
the block table*. A wrong, stale, prematurely freed or missing block therefore changes what is
sampled, and a comparison with `null_logits` on the plain token list (the oracle) shows it. With a
`script`, tokens are dictated and memory is not modelled, for replaying long traces quickly.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.common.seeds import derive_seed, mix64
from quire.core.plan import (
    ONE_SAMPLE,
    Candidates,
    RowSampling,
    RowWork,
    Sample,
    ScorePrompt,
    StepPlan,
    StepResult,
    Task,
    TokenLogprobs,
    Verify,
    WorkResult,
)
from quire.core.pooling import Pool, WeighTokens
from quire.errors import CheckpointError, InvalidParameterError
from quire.executor.interface import Launched
from quire.worker.companions import Companion, Companions
from quire.worker.rows import RowTable

Script = Callable[[str, int], int]
"""(row's name, position) -> the token that is sampled there."""

_EMPTY_HISTORY = 0x51D0


def extend_history(history: int, token_id: int) -> int:
    """Return the running hash after one more token."""
    return mix64(history ^ mix64(token_id + 1))


def null_logits(
    key: int,
    token_ids: Sequence[int],
    vocab_size: int,
    windows: Sequence[int | None] = (None,),
) -> NDArray[np.float64]:
    """Return the oracle: logits after `token_ids`, computed from the plain list, of what groups of
    layers with these windows see of it."""
    histories, history = [], _EMPTY_HISTORY
    for token_id in token_ids:
        history = extend_history(history, token_id)
        histories.append(history)
    seen = [_first_seen(window, len(token_ids)) for window in windows]
    tokens = np.concatenate([np.array(token_ids[first:], np.int64) for first in seen])
    known = np.concatenate([np.array(histories[first:], np.uint64) for first in seen])
    return _logits(key, tokens, known, vocab_size)


def null_sample(
    logits: NDArray[np.float64], sampling: RowSampling, seed: int, position: int
) -> int:
    """Return the oracle's choice: the largest logit, plus noise keyed by (seed, position)
    unless the row is greedy."""
    if sampling.temperature == 0.0:
        return int(np.argmax(logits))
    return int(
        np.argmax(
            logits / sampling.temperature + _gumbel(mix64(seed ^ mix64(position)), len(logits))
        )
    )


def null_logprobs(
    logits: NDArray[np.float64], token_id: int, num_alternatives: int
) -> TokenLogprobs:
    """Log-probabilities from logits, as `TokenLogprobs`."""
    logprobs = logits - np.log(np.exp(logits).sum())
    order = np.argsort(-logprobs, kind="stable")
    kept = order if num_alternatives < 0 else order[:num_alternatives]
    rank = int((logprobs > logprobs[token_id]).sum()) + 1
    return TokenLogprobs(
        token_id,
        float(logprobs[token_id]),
        rank,
        tuple(map(int, kept)),
        tuple(map(float, logprobs[kept])),
    )


def _first_seen(window: int | None, end: int) -> int:
    """The first position that the one before `end` sees."""
    return 0 if window is None else max(0, end - window)


def _logits(
    key: int, token_ids: NDArray[np.int64], histories: NDArray[np.uint64], vocab_size: int
) -> NDArray[np.float64]:
    digest = hashlib.blake2b(
        token_ids.tobytes() + histories.tobytes(), digest_size=16, key=key.to_bytes(8, "little")
    )
    return _uniform(int.from_bytes(digest.digest(), "little"), vocab_size)


# A simulation needs the same draws again and again: in the executor, in the oracle, and after
# each preemption.
@lru_cache(maxsize=1 << 14)
def _uniform(key: int, vocab_size: int) -> NDArray[np.float64]:
    draws = 4.0 * np.random.Generator(np.random.Philox(key=key)).random(vocab_size)
    draws.flags.writeable = False
    return draws


@lru_cache(maxsize=1 << 14)
def _gumbel(key: int, vocab_size: int) -> NDArray[np.float64]:
    draws = np.random.Generator(np.random.Philox(key=key)).gumbel(size=vocab_size)
    draws.flags.writeable = False
    return draws


class NullMemory:
    """What each slot of a pool holds: the token written there, and the hash of all up to it."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.slot_tokens: NDArray[np.int64] = np.zeros(num_blocks * block_size, np.int64)
        self.slot_histories: NDArray[np.uint64] = np.zeros(num_blocks * block_size, np.uint64)
        self._both = tuple(
            each.reshape(num_blocks, block_size) for each in (self.slot_tokens, self.slot_histories)
        )

    @property
    def block_bytes(self) -> int:
        """Size of one block."""
        return sum(each[0].nbytes for each in self._both)

    def read_blocks(self, blocks: Sequence[int]) -> NDArray[np.uint8]:
        """Return a copy of what is in some blocks, one behind the other."""
        parts = [each[block] for block in blocks for each in self._both]
        return np.concatenate([np.empty(0, np.uint8), *(part.view(np.uint8) for part in parts)])

    def write_blocks(self, blocks: Sequence[int], payload: NDArray[np.uint8]) -> None:
        """Write what `read_blocks` returned into as many blocks."""
        parts = iter(np.split(payload, 2 * len(blocks)))
        for block in blocks:
            for each in self._both:
                each[block] = next(parts).view(each.dtype)


class NullExecutor:
    """Executes plans against a model of the KV memory instead of the memory."""

    def __init__(
        self, num_rows: int, num_blocks: int, block_size: int, *, vocab_size: int = 32,
        key: int = 0,
        script: Script | None = None, companions: Iterable[Companion] = (),
        windows: Sequence[int | None] = (None,), memory: NullMemory | None = None,
    ) -> None:  # fmt: skip
        """`windows` of the groups of layers are as in `SchedulerLimits`. `memory`, if a companion
        has it as well, is as large as the pool."""
        self.rows = RowTable(num_rows, block_size, len(windows))
        self._windows = windows
        self.companions = Companions(companions)
        self.vocab_size = vocab_size
        self.key = key
        self.num_steps = 0
        self._script = script
        self._outlets: dict[type[Task], Callable[[RowWork, Any], WorkResult]] = {
            Sample: self._sample,
            Verify: self._verify,
            Candidates: self._report_candidates,
            ScorePrompt: self._score_prompt,
            Pool: self._pool,
            WeighTokens: self._weigh,
        }
        memory = memory or NullMemory(num_blocks if script is None else 1, block_size)
        self._slot_tokens, self._slot_histories = memory.slot_tokens, memory.slot_histories

    def launch(self, plan: StepPlan) -> Launched:
        """`execute` it; nothing is computed beside the host."""
        result = self.execute(plan)
        return lambda: result

    def execute(self, plan: StepPlan) -> StepResult:
        started = time.perf_counter()
        self.num_steps += 1
        self.companions.begin(plan)
        self.rows.apply(plan)
        self.rows.write_ahead(plan.work)
        if self._script is not None:
            results = tuple(self._dictate(work) for work in plan.work)
        else:
            self._copy_blocks(plan)
            for work in plan.work:
                self._write(work)
            results = tuple(self._compute(work) for work in plan.work)
        for work, result in zip(plan.work, results, strict=True):
            if result.token_ids:
                self.rows.append_result(work, result)
        return StepResult(
            plan.step_id, results, time.perf_counter() - started, self.companions.take_news(plan)
        )

    def register_processor(self, processor: Callable[..., Any]) -> str:
        """Refused: there are no logits tensors to process."""
        raise InvalidParameterError(
            "the null executor runs no logits processors", param="logits_processors"
        )

    def unregister_processor(self, name: str) -> None:
        """Do nothing: none was registered."""

    def idle(self) -> bool:
        """There is nothing to prepare."""
        return False

    def sleep(self, level: int) -> None:
        """Lose what all slots hold."""
        self._slot_tokens.fill(-1)
        self._slot_histories.fill(0)

    def wake(self, parts: Sequence[str]) -> None:
        """Do nothing: there are no weights."""

    def load_weights(self, source: Any) -> Any:
        """Return it, a number or its digits: the key by which tokens are drawn."""
        if not str(source).isdecimal():
            raise CheckpointError(f"{source!r} is no key, and could not be loaded")
        return int(source)

    def replace_weights(self, loaded: Any) -> None:
        """Take the key."""
        self.key = loaded

    def close(self) -> None:
        """Do nothing."""

    def poison(self, row: int, start: int, end: int) -> None:
        """Overwrite positions of a row with nonsense: for tests of the checks themselves."""
        for group in range(len(self._windows)):
            self._slot_tokens[self._held_slots(row, start, end, group)] = -2

    def _dictate(self, work: RowWork) -> WorkResult:
        assert self._script is not None
        if not work.tasks:
            return WorkResult()
        if isinstance(work.tasks[0], Verify):
            return self._verify(work, work.tasks[0])
        return WorkResult(
            (self._script(self.rows.names[work.row], work.start + work.num_tokens),)
            * work.num_samples
        )

    def _copy_blocks(self, plan: StepPlan) -> None:
        if not plan.copies:
            return
        size = self.rows.block_size
        sources = np.array([copy.source for copy in plan.copies])
        destinations = np.array([copy.destination for copy in plan.copies])
        for memory in (self._slot_tokens.reshape(-1, size), self._slot_histories.reshape(-1, size)):
            memory[destinations] = memory[sources]

    def _write(self, work: RowWork) -> None:
        end = work.start + work.num_tokens
        known = self.rows.num_tokens[work.row] + work.num_ahead
        assert end <= known, "work beyond the tokens the row knows"
        num_places = self.rows.num_blocks[work.row] // len(self._windows)
        assert end <= num_places * self.rows.block_size, "work beyond the row's blocks"
        for group in range(len(self._windows)):
            self._write_group(work, self._held_slots(work.row, max(work.start - 1, 0), end, group))

    def _write_group(self, work: RowWork, slots: NDArray[np.int64]) -> None:
        """Write to the slots of a group; the first one, if there is one before, has the history."""
        end = work.start + work.num_tokens
        if work.start == 0:
            history = _EMPTY_HISTORY
        else:
            history, slots = int(self._slot_histories[slots[0]]), slots[1:]
        for slot, token_id in zip(
            slots, self.rows.token_ids[work.row, work.start : end], strict=True
        ):
            history = extend_history(history, int(token_id))
            self._slot_tokens[slot], self._slot_histories[slot] = token_id, history

    def _compute(self, work: RowWork) -> WorkResult:
        return reduce(
            WorkResult.join,
            (self._outlets[type(task)](work, task) for task in work.tasks),
            WorkResult(),
        )

    def _sample(self, work: RowWork, task: Sample) -> WorkResult:
        end, sampling = work.start + work.num_tokens, self.rows.sampling[work.row]
        logits = self._read(work.row, end)
        seeds = [derive_seed(sampling.seed, index) for index in range(task.count)]
        token_ids = tuple(null_sample(logits, sampling, seed, end) for seed in seeds)
        if sampling.num_logprobs is None:
            return WorkResult(token_ids)
        return WorkResult(
            token_ids,
            tuple(null_logprobs(logits, each, sampling.num_logprobs) for each in token_ids),
        )

    def _verify(self, work: RowWork, task: Verify) -> WorkResult:
        """One token after the other, until one differs from what it was to be."""
        run: list[WorkResult] = []
        for place, draft in enumerate((*task.token_ids, None)):
            known = work.num_tokens - len(task.token_ids) + place
            one = RowWork(work.row, work.start, known, ONE_SAMPLE)
            run.append(self._compute(one) if self._script is None else self._dictate(one))
            if run[-1].token_ids[0] != draft:
                break
        return WorkResult(
            tuple(one.token_ids[0] for one in run),
            tuple(record for one in run for record in one.logprobs),
            num_rejected=len(task.token_ids) + 1 - len(run),
        )

    def _report_candidates(self, work: RowWork, task: Candidates) -> WorkResult:
        logits = self._read(work.row, work.start + work.num_tokens)
        return WorkResult(logprobs=(null_logprobs(logits, int(np.argmax(logits)), task.count),))

    def _score_prompt(self, work: RowWork, task: ScorePrompt) -> WorkResult:
        assert task.first > work.start, (
            "a prompt token is to be scored by a position not in this step"
        )
        end = min(work.start + work.num_tokens + 1, int(self.rows.num_prompt_tokens[work.row]))
        num_alternatives = self.rows.sampling[work.row].num_prompt_logprobs or 0
        tokens = self.rows.tokens(work.row)
        targets = [(target, int(tokens[target])) for target in range(task.first, end)]
        scores = tuple(
            null_logprobs(self._read(work.row, target), token_id, num_alternatives)
            for target, token_id in targets
        )
        return WorkResult(prompt_logprobs=scores)

    def _pool(self, work: RowWork, task: Pool) -> WorkResult:
        """Four numbers of the whole prompt, as it is in memory, at its end."""
        end = work.start + work.num_tokens
        if end < int(self.rows.num_prompt_tokens[work.row]):
            return WorkResult()
        logits = self._read(work.row, end)
        return WorkResult(pooled=logits[:4].astype("<f4").tobytes())

    def _weigh(self, work: RowWork, task: WeighTokens) -> WorkResult:
        """Logits of some tokens behind the prompt."""
        logits = self._read(work.row, work.start + work.num_tokens)
        return WorkResult(pooled=logits[list(task.token_ids)].astype("<f4").tobytes())

    def _read(self, row: int, end: int) -> NDArray[np.float64]:
        """Logits after `end` tokens, of what each group sees of them."""
        slots = np.concatenate(
            [
                self._held_slots(row, _first_seen(window, end), end, group)
                for group, window in enumerate(self._windows)
            ]
        )
        return _logits(
            self.key, self._slot_tokens[slots], self._slot_histories[slots], self.vocab_size
        )

    def _held_slots(self, row: int, start: int, end: int, group: int) -> NDArray[np.int64]:
        slots = self.rows.slots(row, start, end, group)
        assert (slots >= 0).all(), (
            f"{self.rows.names[row]}: positions {start} to {end} of group {group} were given back"
        )
        return slots
