"""A reasoning budget: where a row's output stands with its think tags, and which token it must get
once the budget is spent.

Like a matcher of a grammar, a watch only saves work: what it says is a function of the output's
tokens alone, and a new one catches up wherever one is missing (after a preemption, on another
engine, in a fork).
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from quire.core.plan import ANY_STATE, ThinkingBudget, ThinkTagTokens
from quire.sampling.rows import TokenIds

_BEFORE, _WITHIN, _BEHIND = "before", "within", "behind"
_NOWHERE = -1
_MAX_PAST = 64
"""More than a step drafts."""


class ThinkingWatch:
    """Follows one row."""

    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget = budget
        self._begin, self._end = _steps(budget.marks)
        self._seen = np.empty(0, np.int64)
        """The tokens that it was given last."""
        self._start_over()

    def _start_over(self) -> None:
        self._where = _WITHIN if self._budget.is_open else _BEFORE
        self._state = 0
        """How much of the first mark, or of the second one, has been spelt."""
        self._num_spent = 0
        self._num_seen = 0
        self._past: deque[tuple[str, int, int, int]] = deque(maxlen=_MAX_PAST)
        """The fields above behind each of the last tokens, but the very last."""

    def forced(self, output_token_ids: TokenIds) -> int | None:
        """Return the token that must come now; None where any may."""
        token_ids = np.asarray(output_token_ids, np.int64)
        num_same = self._num_same(token_ids)
        while self._num_seen > num_same:
            if not self._past:
                self._start_over()
                break
            self._where, self._state, self._num_spent, self._num_seen = self._past.pop()
        for token_id in token_ids[self._num_seen :].tolist():
            self._past.append((self._where, self._state, self._num_spent, self._num_seen))
            self._take(token_id)
            self._num_seen += 1
        self._seen = token_ids.copy()  # what was given is the row's own memory
        is_spent = self._where is _WITHIN and self._num_spent >= self._budget.max_tokens
        return self._budget.marks.end_token_ids[self._state] if is_spent else None

    def _num_same(self, token_ids: NDArray[np.int64]) -> int:
        """Return how many of the tokens seen these begin with: rejected drafts are others, also
        where a later one of them happens to be right."""
        count = min(self._num_seen, len(token_ids))
        differing = np.flatnonzero(self._seen[:count] != token_ids[:count])
        return int(differing[0]) if len(differing) else count

    def _take(self, token_id: int) -> None:
        marks = self._budget.marks
        if self._where is _BEFORE:
            self._state = self._begin.get((self._state, token_id), _NOWHERE)
            if self._state == _NOWHERE:
                self._where = _BEHIND
            elif self._state == marks.begin_len:
                self._where, self._state = _WITHIN, 0
        elif self._where is _WITHIN:
            self._num_spent += 1
            usual = self._end.get((ANY_STATE, token_id), 0)
            self._state = self._end.get((self._state, token_id), usual)
            if self._state == len(marks.end_token_ids):
                self._where = _BEHIND


_Steps = dict[tuple[int, int], int]
"""(state, token id) to the next state."""


@lru_cache(maxsize=4)
def _steps(marks: ThinkTagTokens) -> tuple[_Steps, _Steps]:
    """Return the steps of the opening and the closing tag: thousands for a large vocabulary,
    and the same for all of a model's rows."""
    begin = {(state, token_id): to for state, token_id, to in marks.begin_steps}
    return begin, {(state, token_id): to for state, token_id, to in marks.end_steps}
