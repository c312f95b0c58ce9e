"""Drafts that the worker makes, seen from the control plane: for which sequences they are ordered,
and those that have come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from quire.core.drafts import Drafted, DraftOrder
from quire.core.plan import Record
from quire.core.request import Sequence
from quire.core.speculation.account import NO_DRAFTING, Drafting
from quire.core.speculation.drafters import NO_DRAFT, Draft

_LEAST_READ = 16
"""Tokens, of which what one of them takes can be told."""


class StandingOrders:
    """Orders of one name. A row's order stands until the row changes hands."""

    def __init__(self, name: str, most: int) -> None:
        self.name = name
        self._most = most
        self._rows: dict[int, Sequence] = {}
        self._drafts: dict[Sequence, Drafted] = {}
        self._orders: dict[int, DraftOrder] = {}
        self.took = NO_DRAFTING
        """Of the step that was taken in last, as the worker said."""
        self.read_token_s = 0.0
        """What it takes to catch up with a token, as measured; 0 before it was."""

    def has_ordered(self, sequence: Sequence) -> bool:
        """Whether a sequence's row has an order."""
        return self._rows.get(sequence.row) is sequence

    def order(self, sequence: Sequence, *, is_entering: bool) -> None:
        """Have drafts made for a sequence that has a row, or gets one in this step."""
        row = sequence.row
        if is_entering or self._rows.get(row) is not sequence:
            self._drafts.pop(self._rows.get(row, sequence), None)
            self._rows[row] = sequence
            self._orders[row] = DraftOrder(row, self._most)

    def lapse(self, rows: Iterable[int]) -> None:
        """These rows change hands in this step: the worker drops their orders by itself."""
        for row in rows:
            sequence = self._rows.pop(row, None)
            if sequence is not None:
                self._drafts.pop(sequence, None)
            self._orders.pop(row, None)

    def cancel(self) -> None:
        """Have none made any more."""
        for row in self._rows:
            self._orders[row] = DraftOrder(row, 0)
        self._rows.clear()
        self._drafts.clear()

    def end(self, sequence: Sequence) -> None:
        """Forget a sequence; the worker forgets its row."""
        self._drafts.pop(sequence, None)
        for row in [row for row, other in self._rows.items() if other is sequence]:
            del self._rows[row]
            self._orders.pop(row, None)

    def take_orders(self) -> dict[str, tuple[Record, ...]]:
        """What the next plan is to carry."""
        if not self._orders:
            return {}
        orders, self._orders = self._orders, {}
        return {self.name: tuple(orders.values())}

    def take(self, news: Mapping[str, tuple[Record, ...]]) -> list[Sequence]:
        """Take in what came of a step; returns the sequences that have a draft by that."""
        found, self.took = [], NO_DRAFTING
        for record in news.get(self.name, ()):
            draft = Drafted._make(record)
            if draft.seconds:
                self.took = Drafting(draft.seconds - draft.read_s, draft.read_s)
                if draft.num_read >= _LEAST_READ:
                    self.read_token_s = draft.read_s / draft.num_read
            sequence = self._rows.get(draft.row)
            if sequence is not None and draft.token_ids:
                self._drafts[sequence] = draft
                found.append(sequence)
        return found

    def draft(self, sequence: Sequence, most: int) -> Draft:
        """What is left of the last draft for a sequence, if it has been right so far."""
        found = self._drafts.get(sequence)
        if found is None:
            return NO_DRAFT
        came = sequence.token_ids[found.num_tokens :]
        num_came = len(sequence.token_ids) - found.num_tokens
        if num_came < 0 or list(found.token_ids[:num_came]) != came:
            del self._drafts[sequence]
            return NO_DRAFT
        kept = slice(num_came, num_came + most)
        return Draft(found.token_ids[kept], strengths=found.strengths[kept])
