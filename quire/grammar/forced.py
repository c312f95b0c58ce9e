"""Tokens that a grammar leaves little choice of, as drafts: they are known before they are sampled.

Nothing rests on them: what is drafted here is verified like any draft. Where only a few tokens are
allowed, the one that was chosen last where the same few were is drafted: forms and their writers
repeat themselves. Where all are beginnings of one, that one is. How far a row is followed adapts:
what is looked at in vain costs a mask over the vocabulary, what comes true costs nothing, since its
masks are kept for the step that samples there.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.core.drafts import FORCED, Drafted, DraftOrder
from quire.core.plan import Record, RowSampling, StepPlan
from quire.errors import RequestError
from quire.grammar.matcher import Habits
from quire.grammar.rows import RowMatchers

_FIRST_DEPTH = 3


class Rows(Protocol):
    """What is to be known of the worker's rows."""

    sampling: list[RowSampling]
    num_prompt_tokens: NDArray[np.int64]

    def tokens(self, row: int) -> NDArray[np.integer[Any]]:
        """The row's known tokens."""
        ...


class ForcedTokens:
    """Implements `Companion` beside the matchers of the rows: looks ahead at the end of each step,
    when its tokens are known."""

    name = FORCED

    def __init__(self, matchers: RowMatchers, rows: Rows) -> None:
        self._matchers, self._rows = matchers, rows
        self._habits = Habits()
        self._most: dict[int, int] = {}
        """Of the rows with an order."""
        self._last: dict[int, Drafted] = {}
        """Of each of these, what was drafted last."""
        self._sampled: list[int] = []
        """Of those, the ones that gain tokens in this step."""

    def begin(self, plan: StepPlan) -> None:
        """See `Companion.begin`."""
        for row in (*plan.removed_rows, *(new.row for new in plan.new_rows)):
            self._most.pop(row, None)
            self._last.pop(row, None)
        for order in plan.orders.get(FORCED, ()):
            row, most = DraftOrder._make(order)
            if most:
                self._most[row] = most
            else:
                self._most.pop(row, None)
                self._last.pop(row, None)
        self._sampled = []
        if self._most:
            self._sampled = [
                work.row for work in plan.work if work.tasks and work.row in self._most
            ]

    def take_news(self, wait_s: float) -> tuple[Record, ...]:
        """See `Companion.take_news`: nothing is waited for."""
        drafts = [self._draft(row) for row in self._sampled]
        return tuple(draft for draft in drafts if draft.token_ids)

    def close(self) -> None:
        """See `Companion.close`: nothing is to be ended."""

    def _draft(self, row: int) -> Drafted:
        tokens, sampling = self._rows.tokens(row), self._rows.sampling[row]
        output = np.asarray(tokens[int(self._rows.num_prompt_tokens[row]) :], np.int64)
        depth = self._depth(row, tokens)
        found: list[tuple[int, int]] = []
        if sampling.grammar is not None:
            try:
                found = self._matchers.of(row, sampling).ahead(output, depth, self._habits)
            except RequestError:  # told where the row is sampled, if it ever gets there
                self._matchers.forget(row)
        draft = self._last[row] = Drafted(
            row,
            len(tokens),
            tuple(token_id for token_id, _ in found),
            tuple(strength for _, strength in found),
        )
        return draft

    def _depth(self, row: int, tokens: NDArray[np.integer[Any]]) -> int:
        """Twice as far as the last draft was right, and one more."""
        last = self._last.get(row)
        if last is None or not last.token_ids:
            return min(_FIRST_DEPTH, self._most[row])
        came = tokens[last.num_tokens : last.num_tokens + len(last.token_ids)].tolist()
        num_right = 0
        for token_id, drafted in zip(came, last.token_ids, strict=False):
            if token_id != drafted:
                break
            num_right += 1
        left = len(last.token_ids) - num_right if num_right == len(came) else 0
        return min(max(2 * num_right + 1, left), self._most[row])
