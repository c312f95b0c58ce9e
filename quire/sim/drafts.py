"""A drafter that knows what will come, and errs as often as it is told to: for runs in which every
way that a draft can end happens."""

from __future__ import annotations

from random import Random

from quire.common.seeds import derive_seed
from quire.core.request import Sequence
from quire.core.speculation.drafters import Draft
from quire.executor.null import null_sample
from quire.sim.oracle import Oracle


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
