"""Which sampling kernels run beside a back end. All give the same bits,
so only speed is at stake."""

from __future__ import annotations

import logging

import torch

from quire.kernels import cpu
from quire.kernels.interface import Kernels
from quire.kernels.sampling import SamplingKernels

logger = logging.getLogger(__name__)


def select_sampling(beside: Kernels) -> SamplingKernels:
    """Return the best sampling kernels for logits that `beside` computes; a warning says why,
    where it is the slow reference."""
    if beside.name == "reference":
        return _reference()
    if beside.name == "triton":
        from quire.kernels.triton.sampling import TritonSampling

        return TritonSampling()
    reasons = cpu.reasons_against(str(beside.device), torch.float32)
    for reason in reasons:
        logger.warning("slow reference sampling is used: %s", reason)
    if reasons:
        return _reference()
    from quire.kernels.cpu.sampling import NativeSampling

    return NativeSampling()


def _reference() -> SamplingKernels:
    from quire.kernels.reference.sampling import ReferenceSampling

    return ReferenceSampling()
