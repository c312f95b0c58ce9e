"""The training loop: what its options change, and what its budget counts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from examples.train_storyteller.batches import Batch
from examples.train_storyteller.train import CLOCKS, Trainer, TrainingData, TrainingOptions


def _batch() -> Batch:
    ids = torch.arange(3, 11)[None]
    return Batch(ids, ids + 1, torch.ones(1, 8))


class _OneBatch:
    """A pool with one batch, during which a clock goes on by a second."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def batches(self, _index: int, _progress: float) -> list[Batch]:
        self.seconds += 1.0
        return [_batch()]

    def clock(self) -> float:
        return self.seconds


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_the_factor_reaches_every_learning_rate(tmp_path: Path, rate: float) -> None:
    trainer = Trainer(tmp_path, 60.0, TrainingOptions(rate=rate))
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    trainer._step(_batch())
    same = {
        name
        for name, weight in trainer.model.state_dict().items()
        if torch.equal(weight, before[name])
    }
    assert same == (set(before) if rate == 0.0 else {"cos", "sin"} & set(before))


@pytest.mark.slow
def test_the_budget_is_counted_by_the_clock_that_is_given(tmp_path: Path) -> None:
    pool = _OneBatch()
    trainer = Trainer(tmp_path, 3.0, TrainingOptions(clock=pool.clock))
    trainer.train(TrainingData(pool, [_batch()]))  # type: ignore[arg-type]
    assert trainer.state.num_steps == 3
    assert trainer.state.elapsed_s == 3.0


def test_a_pause_is_no_processor_time() -> None:
    walls, clock = CLOCKS["wall"], CLOCKS["processor"]
    began, began_running = walls(), clock()
    time.sleep(0.5)
    assert clock() - began_running < 0.5 <= walls() - began + 1e-3
