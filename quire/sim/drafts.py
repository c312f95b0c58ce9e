"""Drafters that know what will come, and err as often as they are told to: for runs in which every
way that a draft can end happens. One drafts in the control plane, one as a draft model does, beside
the executor."""

from __future__ import annotations

from random import Random

from quire.common.seeds import derive_seed
from quire.core.drafts import MODELLED, Drafted, DraftOrder
from quire.core.plan import Record, StepPlan
from quire.core.request import Sequence
from quire.core.speculation.drafters import Draft
from quire.executor.null import null_sample
from quire.sim.oracle import Oracle
from quire.worker.rows import RowTable


class OracleDrafter:
    """Implements `Drafter`. Each draft is right with the given chance, else any token."""

    def __init__(self, oracle: Oracle, random: Random, chance: float) -> None:
        self._oracle, self._random, self._chance = oracle, random, chance

    def draft(self, sequence: Sequence, most: int) -> Draft:
        """See `Drafter.draft`; the number of tokens is random."""
        random, tokens = self._random, list(sequence.token_ids)
        seed = derive_seed(sequence.request.sampling.seed, sequence.index)
        drafted: list[int] = []
        for _ in range(random.randint(0, most)):
            logits = self._oracle.logits(tuple(tokens))
            token_id = null_sample(logits, sequence.sampling, seed, len(tokens))
            if random.random() >= self._chance:
                token_id = random.randrange(self._oracle.vocab_size)
            drafted.append(token_id)
            tokens.append(token_id)
        return Draft(drafted, 1)

    def end(self, sequence: Sequence) -> None:
        """See `Drafter.end`; it remembers nothing."""


class OracleModel:
    """Implements `Companion` as a draft model does: by the rows of an executor, at the end of a
    step."""

    name = MODELLED

    def __init__(self, oracle: Oracle, random: Random, chance: float) -> None:
        self._oracle, self._random, self._chance = oracle, random, chance
        self._rows: RowTable | None = None
        self._most: dict[int, int] = {}
        """Of the rows with an order."""
        self._ends: dict[int, int] = {}
        """Of those that sample in this step: the end of their work."""

    def attach(self, rows: RowTable) -> None:
        """Draft for these rows."""
        self._rows = rows

    def begin(self, plan: StepPlan) -> None:
        """See `Companion.begin`."""
        for row in (*plan.removed_rows, *(new.row for new in plan.new_rows)):
            self._most.pop(row, None)
        for order in map(DraftOrder._make, plan.orders.get(MODELLED, ())):
            self._most[order.row] = order.most
        self._ends = {
            work.row: work.start + work.num_tokens
            for work in plan.work
            if work.tasks and self._most.get(work.row)
        }

    def take_news(self, wait_s: float) -> tuple[Record, ...]:
        """See `Companion.take_news`. Now and then a row is only caught up with."""
        return tuple(self._draft(row) for row in self._ends if self._random.random() < 0.9)

    def close(self) -> None:
        """See `Companion.close`: there is nothing to end."""

    def _draft(self, row: int) -> Drafted:
        assert self._rows is not None
        random, sampling = self._random, self._rows.sampling[row]
        tokens = self._rows.tokens(row).tolist()
        num_known, seed = len(tokens), derive_seed(sampling.seed, 0)
        for _ in range(random.randint(0, self._most[row])):
            token_id = null_sample(self._oracle.logits(tuple(tokens)), sampling, seed, len(tokens))
            if random.random() >= self._chance:
                token_id = random.randrange(self._oracle.vocab_size)
            tokens.append(token_id)
        drafted = tuple(tokens[num_known:])
        strengths = tuple(random.randrange(1, 128) for _ in drafted)
        seconds = random.choice((0.01, 0.1, 1.0))
        return Drafted(row, num_known, drafted, strengths, seconds, seconds / 2, num_known)
