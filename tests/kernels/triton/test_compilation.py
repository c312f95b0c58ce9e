"""What a GPU would be given, read from the compiler's output for 9.0: no GPU is needed,
nor is the interpreter used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.slow


def compiled() -> dict[str, Any]:
    pytest.importorskip("triton")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = f"{ROOT / 'tests' / 'support'}:{ROOT}"
    command = [sys.executable, str(ROOT / "tests" / "support" / "gpu_variants.py")]
    found: dict[str, Any] = json.loads(
        subprocess.run(command, env=env, capture_output=True, check=True, timeout=300).stdout
    )
    return found


def test_a_row_meets_the_same_kernel_and_instructions_in_any_company() -> None:
    """No batch needs a kernel of its own: a compilation takes a second, in which every request
    waits.

    Tiles of either height, one split or several; projections of few rows and of many, gated or
    not. And no row of attention is spread over warps, whose sums would be added in another
    order.
    """
    found = compiled()
    most = {
        "attention_kernel": 3,
        "merge_kernel": 1,
        "linear_kernel": 3,
        "finish_kernel": 2,
        "norm_kernel": 1,
    }
    assert found["variants"] == most, (
        "attention in one split, in several, and side by side; projections likewise"
    )
    instructions = found["instructions"]
    for height in ("low", "tall"):
        spread = instructions[f"{height}, columns of warps"]
        assert len(spread) > 1 and all(each == ["1"] for each in spread)
    for one, other, kernel in (
        ("low", "tall", "HGMMA.64x64x16"),
        ("few rows", "many rows", "HGMMA.64x128x16"),
    ):
        shapes = [each for kind in (one, other) for each in instructions[kind]]
        assert len(shapes) > 2 and all(each == shapes[0] for each in shapes)
        assert any(shape.startswith(kernel) for shape in shapes[0])
