"""The search for tile sizes without a GPU: the choice, and the file that comes of it."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed (pip install triton)", allow_module_level=True)

from quire.bench import tuning
from quire.bench.gpu_kernels import Case
from quire.kernels.triton.kernels import TritonKernels
from quire.kernels.triton.tuning import FOLDER, AttentionTuning, Tuning, tuning_for

BASE = Tuning.read(FOLDER / "default.json")
CPU = torch.device("cpu")


def test_the_least_cost_wins_and_ties_change_nothing() -> None:
    asked: list[str] = []

    def cost(kernels: TritonKernels, entry: str) -> float:
        asked.append(entry)
        if entry == "integer":
            return 1.0
        if entry == "wide_attention":
            return math.inf  # nothing runs
        figures = getattr(kernels.tuning, entry)
        if isinstance(figures, AttentionTuning):
            return float(abs(figures.split_len - 2048) + figures.num_stages)
        return float(abs(figures.block_m - 128) + abs(figures.block_n - 64) + figures.num_stages)

    found = tuning.tune(BASE, CPU, cost)
    assert (found.linear.block_m, found.linear.block_n, found.linear.num_stages) == (128, 64, 3)
    assert (found.attention.split_len, found.attention.num_stages) == (2048, 2)
    assert found.integer == BASE.integer and found.wide_attention == BASE.wide_attention
    assert set(asked) == set(tuning.CANDIDATES) and len(asked) == sum(
        len(each) + 1 for each in tuning.CANDIDATES.values()
    )


@pytest.mark.parametrize(("torch_wins_from", "least"), [(1, 64), (300, 512), (5000, None)])
def test_the_library_has_to_win_for_all_larger_numbers(
    monkeypatch: pytest.MonkeyPatch, torch_wins_from: int, least: int | None
) -> None:
    monkeypatch.setattr(tuning, "median_s", lambda call, device: call())

    def make(kernels: TritonKernels, num_rows: int) -> Case:
        theirs: Any = lambda: 0.5 if num_rows >= torch_wins_from else 2.0  # noqa: E731
        return Case("", lambda: 1.0, 0, 0, theirs)

    assert tuning.library_rows(TritonKernels(CPU, BASE), make) == least


def test_a_written_file_is_read_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "default.json"
    BASE.write(path)
    assert Tuning.read(path) == BASE
    assert tuning.names_of(BASE.attention).startswith("low=Tile(block_m=64, num_warps=4), tall=")


def test_tiles_that_would_differ_in_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="unlike numbers of rows a warp"):
        replace(BASE.attention, tall=replace(BASE.attention.tall, num_warps=4))
    with pytest.raises(ValueError, match="no multiple of 64 keys"):
        replace(BASE.attention, split_len=1000)


@pytest.mark.parametrize(
    ("capability", "heights"), [((8, 0), 1), ((8, 9), 1), ((9, 0), 2), ((12, 0), 1)]
)
def test_tall_tiles_are_for_capability_9(
    capability: tuple[int, int], heights: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.kernels.triton.tuning.is_interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA X")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = tuning_for(torch.device("cuda"))
    assert len({found.attention.low, found.attention.tall}) == heights
