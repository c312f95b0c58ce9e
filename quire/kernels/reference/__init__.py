"""The reference back end: plain torch, slow, obviously right, and the specification of every other
back end.

Owns the meaning of each operation in `quire.kernels.interface.Kernels`. It computes row by row (a
projection) or sequence by sequence and query row by query row (attention), in float32, so that a
row's arithmetic cannot depend on what else is in the call. It never looks for speed, and runs on
any torch device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.kernels.reference.kernels import ReferenceKernels

__all__ = ["ReferenceKernels"]


def __getattr__(name: str) -> object:
    """Load the back end on its first use: others use single functions of this folder."""
    if name != "ReferenceKernels":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from quire.kernels.reference.kernels import ReferenceKernels

    return ReferenceKernels
