"""Which back end runs: the best that can serve a device and a dtype, with the reasons why better ones cannot.

Owns the order of preference and nothing of the back ends themselves; each answers `reasons_against(device, dtype)`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.errors import ConfigError
from quire.kernels.interface import Kernels

REFERENCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Selection:
    """The back end chosen, and for each better one that was not, why: "cpu: the extension was not built ..."."""

    kernels: Kernels
    reasons: tuple[str, ...] = ()


def load(name: str) -> Kernels:
    """The back end called `name` ("cpu" or "reference"); ConfigError where it cannot run or does not exist."""
    if name == "reference":
        from quire.kernels.reference import ReferenceKernels

        return ReferenceKernels()
    if name == "cpu":
        from quire.kernels import cpu

        return cpu.load()
    raise ConfigError(f"there are no kernels called {name!r}; choose cpu or reference")


def select_kernels(device: str, dtype: torch.dtype) -> Selection:
    """The best back end for tensors of `dtype` on `device` ("cpu", "cuda:0").

    Raises ConfigError where no back end can serve them.
    """
    from quire.kernels import cpu

    reasons = cpu.reasons_against(device, dtype)
    if not reasons:
        return Selection(cpu.load())
    explained = tuple(f"cpu: {reason}" for reason in reasons)
    if dtype not in REFERENCE_DTYPES:
        names = ", ".join(str(each).removeprefix("torch.") for each in REFERENCE_DTYPES)
        raise ConfigError(f"no kernels compute in {dtype}; choose one of {names}")
    return Selection(load("reference"), explained)
