"""Processors: both calling conventions, unique names, and their inputs being theirs alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.core.plan import RowSampling
from quire.errors import InvalidParameterError
from quire.sampling.processors import ProcessorTable
from quire.sampling.rows import RowError, SampledRow

ROW = SampledRow(RowSampling(), position=3, prompt_token_ids=[7, 8], output_token_ids=[9])


def test_both_conventions() -> None:
    seen: list[Any] = []

    def two(output: list[int], logits: Tensor) -> Tensor:
        seen.append(output)
        return logits

    class Three:
        def __call__(self, prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
            seen.append((prompt, output))
            return logits + 1

    table = ProcessorTable()
    names = [table.register(two), table.register(Three())]
    assert names == ["two#1", "Three#2"]
    logits = torch.zeros(4)
    assert torch.equal(table.apply(names[0], ROW, logits), logits)
    assert torch.equal(table.apply(names[1], ROW, logits), logits + 1)
    assert seen == [[9], ([7, 8], [9])]


def test_names_are_unique_and_forgotten() -> None:
    table = ProcessorTable()
    first, second = (table.register(len) for _ in range(2))
    assert first != second and len(table) == 2
    table.unregister(first)
    assert len(table) == 1
    with pytest.raises(RowError, match="not registered"):
        table.apply(first, ROW, torch.zeros(4))


def test_only_callables() -> None:
    with pytest.raises(InvalidParameterError, match="callable"):
        ProcessorTable().register(3)  # type: ignore[arg-type]


def test_logits_given_are_a_copy_and_logits_returned_are_float32() -> None:
    def write(output: list[int], logits: Tensor) -> Tensor:
        logits[0] = 5.0
        return logits.to(torch.bfloat16)

    table, logits = ProcessorTable(), torch.zeros(4)
    changed = table.apply(table.register(write), ROW, logits)
    assert changed.dtype is torch.float32 and changed[0] == 5.0
    assert torch.equal(logits, torch.zeros(4))
