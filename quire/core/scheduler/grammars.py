"""Grammars as a prerequisite: a sequence whose output has a form is admitted once that form is
compiled.

Owns what the control plane knows of compiling: which grammars were ordered, which sequences wait
for which, and until when.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from quire.core.grammars import GRAMMARS, Grammar, GrammarVerdict
from quire.core.plan import Record
from quire.core.request import Sequence
from quire.core.scheduler.prerequisites import Settled

MAX_READY = 128
"""Grammars that count as compiled: fewer than the executor keeps."""
MAX_WAIT_S = 60.0
"""The compiler's own limits end a grammar within a second; a vocabulary is prepared within a few,
once."""
TOO_SLOW = f"the form that the answer must have was not compiled within {MAX_WAIT_S:g} s"


@dataclass(slots=True)
class _Pending:
    sequences: list[Sequence] = field(default_factory=list)
    ordered_s: float | None = None
    """None until a plan carries the order."""


class CompiledGrammars:
    """Implements `Prerequisite`: the grammars that are ready,
    and the sequences that wait for others."""

    name = GRAMMARS
    REASON = "waits for the form of its answer to be compiled"

    def __init__(self) -> None:
        self._ready: OrderedDict[Grammar, None] = OrderedDict()
        self._pending: dict[Grammar, _Pending] = {}

    def refusal(self, sequence: Sequence) -> str | None:
        grammar = sequence.sampling.grammar
        return None if grammar is None or grammar in self._ready else self.REASON

    def park(self, sequence: Sequence) -> None:
        grammar = sequence.sampling.grammar
        assert grammar is not None
        self._pending.setdefault(grammar, _Pending()).sequences.append(sequence)

    def unpark(self, sequence: Sequence) -> None:
        grammar = sequence.sampling.grammar
        pending = self._pending.get(grammar) if grammar is not None else None
        if pending is not None and sequence in pending.sequences:
            pending.sequences.remove(sequence)

    def parked(self) -> list[Sequence]:
        return [sequence for pending in self._pending.values() for sequence in pending.sequences]

    def take_orders(self, now: float) -> tuple[Record, ...]:
        if not self._pending:
            return ()
        ordered = tuple(
            grammar for grammar, pending in self._pending.items() if pending.ordered_s is None
        )
        for grammar in ordered:
            self._pending[grammar].ordered_s = now
        return ordered

    def take_news(self, news: tuple[Record, ...], now: float) -> list[Settled]:
        if not news and not self._pending:
            return []
        verdicts = [*map(GrammarVerdict._make, news), *self._overdue(now)]
        return [settled for verdict in verdicts if (settled := self._settle(*verdict)).sequences]

    def lose_flights(self) -> None:
        for pending in self._pending.values():
            pending.ordered_s = None

    def _settle(self, grammar: Grammar, error: str | None) -> Settled:
        pending = self._pending.pop(grammar, _Pending())
        if error is not None:
            return Settled(pending.sequences, f"structured_outputs: {error}")
        self._ready[grammar] = None
        self._ready.move_to_end(grammar)
        if len(self._ready) > MAX_READY:
            self._ready.popitem(last=False)
        return Settled(pending.sequences)

    def _overdue(self, now: float) -> list[GrammarVerdict]:
        since_s = {
            grammar: pending.ordered_s
            for grammar, pending in self._pending.items()
            if pending.ordered_s is not None
        }
        return [
            GrammarVerdict(grammar, TOO_SLOW)
            for grammar, each_s in since_s.items()
            if now - each_s > MAX_WAIT_S
        ]
