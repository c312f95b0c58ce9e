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
    assert "not built" in select_kernels("cpu", torch.float32).reasons[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nothing_stands_in_for_a_gpu_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="no kernels can compute on cuda:0: "):
        select_kernels("cuda:0", torch.float32)
    with pytest.raises(ConfigError, match="cannot run on cuda"):
        load("triton", "cuda")
    for name in ("cpu", "reference"):
        with pytest.raises(ConfigError, match="not on cuda"):
            load(name, "cuda")


def test_no_back_end_computes_in_integers() -> None:
    with pytest.raises(ConfigError, match="int8; choose one of float32, bfloat16, float16"):
        select_kernels("cpu", torch.int8)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="'cuda'; choose cpu, triton or reference"):
        load("cuda")
