"""Which sampling kernels run: the native ones where they can, else the reference. Both give the same bits."""

from __future__ import annotations

import torch

from quire.kernels import cpu
from quire.kernels.reference.sampling import ReferenceSampling
from quire.kernels.sampling import SamplingKernels


def select_sampling(device: str) -> tuple[SamplingKernels, list[str]]:
    """The best kernels for logits on `device` ("cpu", "cuda:0"), and why the native ones cannot serve it, if so."""
    reasons = cpu.reasons_against(device, torch.float32)
    if not reasons and not hasattr(cpu._native, "sampling_penalise"):
        reasons = ["the extension is from a build without sampling; reinstall"]
    if reasons:
        return ReferenceSampling(), reasons
    from quire.kernels.cpu.sampling import NativeSampling

    return NativeSampling(), []
