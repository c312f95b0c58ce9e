"""Functions whose last bit differs from one processor, or version of torch or numpy, to the next,
in a form that does not.

Torch computes them for tables of RoPE, soft caps of logits, int4 weights and the reference kernels;
numpy for Triton's interpreter. Each becomes a number of operations of float64 that every machine
rounds alike, or a function of float64 whose error disappears when its result is rounded to float32;
sums have one order. A function that is known to differ and has no such form here is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ELEMENTWISE = {"cos", "sin", "tanh", "exp", "pow", "rsqrt", "silu", "gelu"}
_REFUSED = {
    "mm", "addmm", "bmm", "baddbmm", "addmv", "dot", "vdot", "matmul", "linear", "einsum",
    "tensordot",
    "scaled_dot_product_attention", "layer_norm", "native_layer_norm", "rms_norm", "log_softmax",
    "_log_softmax", "logsumexp", "log", "log1p", "log2", "log10", "exp2", "expm1", "erf", "sigmoid",
    "tan", "sinh", "cosh", "cumsum", "prod", "var", "std", "norm", "linalg_vector_norm",
}  # fmt: skip


class ExactFunctions(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Where it is active, in its thread, torch computes the same bits on every machine."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.replaced: set[str] = set()
        """Names of the functions that were called and replaced."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would guard each call against its compiler, which nothing here uses, and whose
        import takes seconds."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kind = _kind(func)
        if kind is None:
            return func(*args, **(kwargs or {}))
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        first = next((each for each in args if isinstance(each, Tensor)), None)
        if first is None or first.dtype not in (torch.float32, torch.bfloat16):
            return func(*args, **kwargs)
        assert kind != "refused", (
            f"{name} differs from machine to machine: give it a form that does not, in {__name__}"
        )
        if kind == "elementwise":
            plain = name.removesuffix("_")
            self.replaced.add(plain)
            wide = [each.double() if isinstance(each, Tensor) else each for each in args]
            result = func(*wide, **kwargs).to(first.dtype)
            return result if name == plain else first.copy_(result)
        self.replaced.add(name)
        return _SUMS[name](first.double(), *args[1:], **kwargs).to(first.dtype)


@cache
def _kind(func: Any) -> str | None:
    """How an operation is replaced, None where it is not: hundreds of thousands are asked about."""
    name = func.overloadpacket.__name__
    plain = name.removesuffix("_")
    if plain in _REFUSED:
        return "refused"
    if plain in _ELEMENTWISE:
        return "elementwise"
    return "sum" if name in _SUMS else None


def _sum(
    x: Tensor, dims: list[int] | None = None, keepdim: bool = False, dtype: object = None
) -> Tensor:
    """By halves: neighbours, then neighbouring pairs, and so on."""
    assert dims is not None and len(dims) == 1 and dtype is None, (dims, dtype)
    x = x.movedim(dims[0], -1)
    while x.shape[-1] > 1:
        if x.shape[-1] % 2:
            x = torch.nn.functional.pad(x, (0, 1))
        x = x[..., 0::2] + x[..., 1::2]
    return x.movedim(-1, dims[0]) if keepdim else x[..., 0]


def _mean(x: Tensor, dims: list[int], keepdim: bool = False, dtype: object = None) -> Tensor:
    return _sum(x, dims, keepdim, dtype) / x.shape[dims[0]]


def _mv(matrix: Tensor, vector: Tensor) -> Tensor:
    return _sum(matrix * vector, [-1])


def _softmax(x: Tensor, dim: int, dtype: object = None) -> Tensor:
    assert not dtype
    powers = (x - x.amax(dim, keepdim=True)).exp()
    return powers / _sum(powers, [dim], keepdim=True)


_SUMS: dict[str, Callable[..., Tensor]] = {
    "sum": _sum,
    "mean": _mean,
    "mv": _mv,
    "softmax": _softmax,
    "_softmax": _softmax,
}


class _ExactNumpy:
    """Numpy, as Triton's interpreter uses it."""

    def __getattr__(self, name: str) -> Any:
        assert name not in ("cos", "sin", "log", "log2", "cumprod"), (
            f"{name} has no exact form in {__name__}"
        )
        return getattr(np, name)

    def exp(self, x: NDArray[Any]) -> NDArray[Any]:
        return np.asarray(np.exp(x, dtype=np.float64), x.dtype)

    def exp2(self, x: NDArray[Any]) -> NDArray[Any]:
        return np.asarray(np.exp2(x, dtype=np.float64), x.dtype)

    def sum(self, x: NDArray[Any], axis: int | None, keepdims: bool) -> NDArray[Any]:
        if not np.issubdtype(x.dtype, np.floating):
            return np.asarray(np.sum(x, axis=axis, keepdims=keepdims))
        assert axis is not None
        return _sum(torch.from_numpy(x).double(), [axis], keepdims).numpy().astype(x.dtype)

    def cumsum(self, x: NDArray[Any], axis: int) -> NDArray[Any]:
        assert not np.issubdtype(x.dtype, np.floating)
        return np.cumsum(x, axis=axis)

    def matmul(self, a: NDArray[Any], b: NDArray[Any], dtype: Any) -> NDArray[Any]:
        if not np.issubdtype(dtype, np.floating):
            return np.asarray(np.matmul(a, b, dtype=dtype))
        wide = a.astype(np.float64)[..., :, :, None] * b.astype(np.float64)[..., None, :, :]
        return _sum(torch.from_numpy(wide), [-2]).numpy().astype(dtype)


@contextmanager
def exact_interpreter() -> Iterator[None]:
    """Triton's interpreter computes the same bits on every machine."""
    from triton.runtime import interpreter

    from quire.kernels.triton import interpretation

    exact = _ExactNumpy()
    with patch.object(interpreter, "np", exact), patch.object(interpretation, "np", exact):
        yield
