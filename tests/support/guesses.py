"""Drafters for tests: what they guess is known, or any."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from quire.core.drafts import MODELLED
from quire.core.plan import StepPlan, StepResult
from quire.core.request import Sequence
from quire.core.scheduler.scheduler import Progress
from quire.core.speculation.drafters import Draft
from quire.core.speculation.methods import speculator_of
from quire.core.speculation.speculator import Speculator
from quire.engine.loop.engine import Engine
from quire.spec.companion import ModelDrafts
from quire.spec.depth import DraftDepth


class AnyTokens:
    """Implements `Drafter`: guesses any tokens at all, most of which are wrong."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._vocab_size, self._random = vocab_size, Random(seed)

    def draft(self, sequence: Sequence, most: int) -> Draft:
        count = self._random.randint(0, most)
        return Draft([self._random.randrange(self._vocab_size) for _ in range(count)], 1)

    def end(self, sequence: Sequence) -> None:
        pass


class KnownAnswers:
    """Implements `Drafter`: knows each sequence's answer by its name, and errs now and then."""

    def __init__(
        self,
        answers: Mapping[str, list[int]],
        *,
        chance: float = 1.0,
        vocab_size: int,
        seed: int = 0,
    ) -> None:
        self._answers, self._chance = answers, chance
        self._vocab_size, self._random = vocab_size, Random(seed)

    def draft(self, sequence: Sequence, most: int) -> Draft:
        known = self._answers.get(sequence.name, [])
        guesses = known[sequence.num_output_tokens :][:most]
        return Draft([self._perhaps(token_id) for token_id in guesses], 1)

    def end(self, sequence: Sequence) -> None:
        pass

    def _perhaps(self, token_id: int) -> int:
        is_right = self._random.random() < self._chance
        return token_id if is_right else self._random.randrange(self._vocab_size)


def guess_with(engine: Engine, speculator: Speculator) -> Engine:
    """Have an engine without requests guess."""
    assert not engine.has_work
    engine.scheduler.look_ahead = speculator
    return engine


def level_steps(engine: Engine, step_s: float = 0.01) -> Engine:
    """Have the scheduler told that each step takes as long, however much it computes: so drafts
    pay, on whatever machine."""
    update, ends = engine.scheduler.update, count(time.monotonic(), step_s)

    def timed(plan: StepPlan, result: StepResult, now: float) -> list[Progress]:
        return update(plan, replace(result, elapsed_s=step_s), next(ends))

    engine.scheduler.update = timed  # type: ignore[method-assign]
    return engine


def by_model(config: Path, most: int = 4) -> dict[str, Any]:
    """Options of an engine for which a model drafts; see `draft_all`."""
    return {"speculative_config": {"model": str(config), "num_speculative_tokens": most}}


def by_head(method: str, config: Path | None = None, most: int = 4) -> dict[str, Any]:
    """The same of one for which a head drafts: without a config, the target's own."""
    own = {} if config is None else {"model": str(config)}
    return {"speculative_config": {"method": method, "num_speculative_tokens": most, **own}}


def model_drafts(engine: Engine) -> ModelDrafts:
    """The worker's half of an engine for which a model drafts."""
    found = engine.executor.worker.companions.of(MODELLED)  # type: ignore[attr-defined]
    assert isinstance(found, ModelDrafts)
    return found


def draft_all(engine: Engine) -> Engine:
    """Have an engine's draft model draft as many tokens as it may, and all of them verified."""
    model_drafts(engine).depth = DraftDepth(is_adaptive=False)
    config = engine.plan.config.speculation
    assert config is not None
    return guess_with(engine, speculator_of(config, None))
