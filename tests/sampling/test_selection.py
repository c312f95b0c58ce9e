"""Which sampling kernels run, and that falling back is explained."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.kernels import cpu, load
from quire.sampling import select_sampling


def beside(name: str) -> Any:
    return SimpleNamespace(name=name, device=torch.device("cpu"))


def test_the_reference_stays_with_the_reference() -> None:
    assert select_sampling(load("reference")).name == "reference"


@pytest.mark.skipif(cpu.IMPORT_ERROR is not None, reason="the native extension is not built")
def test_the_native_kernels_are_preferred() -> None:
    assert select_sampling(beside("cpu")).name == "cpu"


def test_a_missing_extension_is_explained(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu, "IMPORT_ERROR", "no such module")
    assert select_sampling(beside("cpu")).name == "reference"
    assert "no such module" in caplog.text
