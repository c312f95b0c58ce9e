"""The Triton kernels under test: interpreted on the CPU, or with QUIRE_TEST_DEVICE=cuda on a GPU
(`make gpu-test`).

Triton decides when it is first imported whether to interpret kernels: see `tests/conftest.py`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from quire.kernels import load
from quire.kernels.interface import Kernels

if TYPE_CHECKING:
    from tests.kernels.conftest import Paged

DEVICE = os.environ.get("QUIRE_TEST_DEVICE", "cpu")
HAS_TRITON = importlib.util.find_spec("triton") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Numpy warns of what a GPU does silently; and without Triton there is nothing to test."""
    for item in items:
        if "kernels/triton" in item.path.as_posix():
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
            if not HAS_TRITON:
                item.add_marker(pytest.mark.skip("triton is not installed (pip install triton)"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels under test compute."""
    if DEVICE != "cpu" and not torch.cuda.is_available():
        pytest.skip("there is no GPU that torch can use")
    return torch.device(DEVICE)


@pytest.fixture(scope="session")
def kernels(device: torch.device) -> Kernels:
    """The back end under test."""
    if not HAS_TRITON:
        pytest.skip("triton is not installed (pip install triton)")
    return load("triton", str(device))


def moved(batch: Any, device: torch.device) -> Any:
    """A record of tensors, with its tensors on the device."""
    tensors = {
        f.name: getattr(batch, f.name)
        for f in fields(batch)
        if isinstance(getattr(batch, f.name), Tensor)
    }
    return replace(batch, **{name: tensor.to(device) for name, tensor in tensors.items()})


@pytest.fixture
def move(device: torch.device) -> Callable[[Any], Any]:
    """`moved` to the device under test."""
    return lambda record: moved(record, device)


@pytest.fixture
def attend(device: torch.device) -> Callable[..., Tensor]:
    """Attention of a back end over a `Paged` case: results on the CPU,
    wherever they were computed."""

    def run(
        kernels: Kernels, case: Paged, query: Tensor, block_size: int = 16, **options: Any
    ) -> Tensor:
        where = torch.device("cpu") if kernels.name == "reference" else device
        keys, values, batch = case.pages(block_size, options.pop("kv_format", None))
        scale = query.shape[2] ** -0.5
        out = kernels.paged_attention(
            query.to(where),
            keys.to(where),
            values.to(where),
            moved(batch, where),
            scale=scale,
            **options,
        )
        return out.cpu()

    return run
