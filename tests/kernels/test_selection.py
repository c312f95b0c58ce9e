"""Which back end is chosen, and what is said of the others."""

from __future__ import annotations

import pytest
import torch

from quire.errors import ConfigError
from quire.kernels import cpu, load, select_kernels


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_native_kernels_come_first(dtype: torch.dtype) -> None:
    selection = select_kernels("cpu", dtype)
    assert selection.kernels.name == "cpu"
    assert selection.reasons == ()


def test_what_was_not_chosen_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    selection = select_kernels("cpu", torch.float16)
    assert selection.kernels.name == "reference"
    assert selection.reasons == ("cpu: computes in float32 and bfloat16, not in float16",)
    monkeypatch.setattr(cpu, "IMPORT_ERROR", "no such file")
    selection = select_kernels("cuda:0", torch.float32)
    assert selection.kernels.name == "reference"
    assert [("not on cuda:0" in each, "not built" in each) for each in selection.reasons] == [(True, False), (False, True)]


def test_no_back_end_computes_in_integers() -> None:
    with pytest.raises(ConfigError, match="int8; choose one of float32, bfloat16, float16"):
        select_kernels("cpu", torch.int8)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="'cuda'; choose cpu or reference"):
        load("cuda")
