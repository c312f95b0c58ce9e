"""Which back end runs: the best that can serve a device and a dtype, with the reasons why better
ones cannot.

Owns the order of preference and nothing of the back ends themselves; each answers
`reasons_against(device, dtype)`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.errors import ConfigError
from quire.kernels.interface import Kernels

REFERENCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Selection:
    """The back end chosen, and for each better one that was not, why: "cpu:
    the extension was not built ..."."""

    kernels: Kernels
    reasons: tuple[str, ...] = ()


def load(
    name: str,
    device: str = "cpu",
    *,
    is_invariant: bool = True,
    attention_module: str | None = None,
) -> Kernels:
    """Return the back end called `name` ("cpu", "triton" or "reference") for a device; ConfigError
    where it cannot run there.

    Only "triton" has anything faster to offer where results may depend on batch composition, that
    is not `is_invariant`; and only it takes a library for attention.
    """
    if name == "reference":
        from quire.kernels.reference import ReferenceKernels

        if device != "cpu":
            raise ConfigError(f"the reference kernels compute on the CPU, not on {device}")
        return ReferenceKernels()
    if name == "triton":
        from quire.kernels import triton

        return triton.load(device, is_invariant=is_invariant, attention_module=attention_module)
    if name == "cpu":
        from quire.kernels import cpu

        return cpu.load(device)
    raise ConfigError(f"there are no kernels called {name!r}; choose cpu, triton or reference")


def select_kernels(
    device: str,
    dtype: torch.dtype,
    *,
    is_invariant: bool = True,
    attention_module: str | None = None,
) -> Selection:
    """Return the best back end for tensors of `dtype` on `device` ("cpu", "cuda:0").

    Raises ConfigError where no back end can serve them. A GPU is served by the Triton kernels or
    not at all: a user who requests one does not want the reference there.
    """
    if device.partition(":")[0] != "cpu":
        from quire.kernels import triton

        if reasons := triton.reasons_against(device, dtype):
            raise ConfigError(f"no kernels can compute on {device}: " + "; ".join(reasons))
        return Selection(
            triton.load(device, is_invariant=is_invariant, attention_module=attention_module)
        )
    from quire.kernels import cpu

    reasons = cpu.reasons_against(device, dtype)
    if not reasons:
        return Selection(cpu.load())
    explained = tuple(f"cpu: {reason}" for reason in reasons)
    if dtype not in REFERENCE_DTYPES:
        names = ", ".join(str(each).removeprefix("torch.") for each in REFERENCE_DTYPES)
        raise ConfigError(f"no kernels compute in {dtype}; choose one of {names}")
    return Selection(load("reference"), explained)
