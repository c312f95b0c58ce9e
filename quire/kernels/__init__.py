"""Kernels: the operations a model and the worker need, by several back ends behind one protocol
(`interface.py`).

This package knows tensors, shapes and machines, never a model's name or a request. `select_kernels`
picks the best back end that works here and says why the others were not chosen; nothing is replaced
silently. The names load on first use:
weights begin to be packed by the extension (`quire.kernels.cpu`) before torch has been imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.kernels.selection import Selection, load, select_kernels

__all__ = ["Selection", "load", "select_kernels"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'quire.kernels' has no attribute {name!r}")
    from quire.kernels import selection

    return getattr(selection, name)
