"""Kernels: the operations a model and the worker need, by several back ends behind one protocol (`interface.py`).

This package knows tensors, shapes and machines, never a model's name or a request. `select_kernels` picks the best back
end that works here and says why the others were not chosen; nothing is replaced silently.
"""

from quire.kernels.selection import Selection, load, select_kernels

__all__ = ["Selection", "load", "select_kernels"]
