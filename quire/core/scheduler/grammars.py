"""Grammars as something to be waited for: a sequence whose output has a form is let in once that form is compiled.

Owns what the control plane knows of compiling: which grammars were asked for, who waits for which, and until when. Like a turn
at a shared prefix (`resources.PrefixTurns`) this is no scarce thing: whoever waits is set aside, and those behind go first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from quire.core.plan import Grammar, GrammarVerdict
from quire.core.request import Sequence

MAX_READY = 128
"""Grammars that count as compiled: fewer than the executor keeps."""
MAX_WAIT_S = 60.0
"""The compiler's own limits end a grammar within a second; a vocabulary is prepared within a few, once."""
TOO_SLOW = f"the form that the answer must have was not compiled within {MAX_WAIT_S:g} s"


class _Pending(NamedTuple):
    asked_s: float
    waiting: list[Sequence]


class Settled(NamedTuple):
    """Sequences that wait no more, and why those of them that cannot be served cannot."""

    sequences: list[Sequence]
    error: str | None


class GrammarTurns:
    """Who waits for which grammar."""

    REASON = "waits for the form of its answer to be compiled"

    def __init__(self) -> None:
        self.now = 0.0
        """Set by the scheduler at every step."""
        self._ready: OrderedDict[Grammar, None] = OrderedDict()
        self._pending: dict[Grammar, _Pending] = {}
        self._unasked: list[Grammar] = []

    def __len__(self) -> int:
        return len(self._pending)

    def refusal(self, sequence: Sequence) -> str | None:
        """Why the sequence must be set aside; None where it need not."""
        grammar = sequence.sampling.grammar
        if grammar is None or grammar in self._ready:
            return None
        return self.REASON

    def park(self, sequence: Sequence) -> None:
        """Keep a refused sequence until its grammar is ready."""
        grammar = sequence.sampling.grammar
        assert grammar is not None
        pending = self._pending.get(grammar)
        if pending is None:
            pending = self._pending[grammar] = _Pending(self.now, [])
            self._unasked.append(grammar)
        pending.waiting.append(sequence)

    def unpark(self, sequence: Sequence) -> None:
        """Forget a parked sequence that was aborted."""
        grammar = sequence.sampling.grammar
        pending = self._pending.get(grammar) if grammar is not None else None
        if pending is not None and sequence in pending.waiting:
            pending.waiting.remove(sequence)

    def take_unasked(self) -> list[Grammar]:
        """Grammars to be compiled of which no plan has told yet."""
        unasked, self._unasked = self._unasked, []
        return unasked

    def settle(self, verdicts: Iterable[GrammarVerdict]) -> list[Settled]:
        """Take in what became of grammars."""
        settled = []
        for grammar, error in verdicts:
            pending = self._pending.pop(grammar, None)
            if error is None:
                self._ready[grammar] = None
                self._ready.move_to_end(grammar)
                if len(self._ready) > MAX_READY:
                    self._ready.popitem(last=False)
            if pending is not None and pending.waiting:
                settled.append(Settled(pending.waiting, error))
        return settled

    def overdue(self) -> list[Settled]:
        """Those who have waited too long."""
        late = [grammar for grammar, pending in self._pending.items() if self.now - pending.asked_s > MAX_WAIT_S]
        return self.settle(GrammarVerdict(grammar, TOO_SLOW) for grammar in late)
