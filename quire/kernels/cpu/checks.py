"""What stands between a tensor and a raw pointer: every check of device, dtype, shape and layout,
in one place.

A failed check is a bug of the caller's, hence TypeError and ValueError. The functions are small
because a step calls them some fifty times a layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT_CODES = {torch.float32: 0, torch.bfloat16: 1}


def float_code(tensor: Tensor, name: str) -> int:
    """Return the extension's number for the dtype; TypeError unless float32 or bfloat16."""
    code = FLOAT_CODES.get(tensor.dtype)
    if code is None:
        raise TypeError(f"{name} is {tensor.dtype}; the CPU kernels take float32 and bfloat16")
    return code


def address(tensor: Tensor, name: str) -> int:
    """Return the address of a contiguous CPU tensor."""
    if not tensor.is_cpu:
        raise ValueError(f"{name} is on {tensor.device}, not on the CPU")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} {list(tensor.shape)} is not contiguous (strides {list(tensor.stride())})"
        )
    return tensor.data_ptr()


def heads_address(tensor: Tensor, name: str) -> int:
    """Return the address of a CPU tensor [T, heads, D] whose last two dimensions are contiguous."""
    if not tensor.is_cpu:
        raise ValueError(f"{name} is on {tensor.device}, not on the CPU")
    if tensor.dim() != 3:
        raise ValueError(f"{name} is {list(tensor.shape)}; expected [T, heads, D]")
    _, heads, head_size = tensor.shape
    _, head_stride, stride = tensor.stride()
    if (stride != 1 and head_size > 1) or (head_stride != head_size and heads > 1):
        raise ValueError(
            f"{name}: heads and their elements are not contiguous (strides {list(tensor.stride())})"
        )
    return tensor.data_ptr()


def indices_address(tensor: Tensor, name: str, count: int) -> int:
    """Return the address of an int64 vector of `count` elements."""
    if tensor.dtype != torch.int64:
        raise TypeError(f"{name} is {tensor.dtype}; expected int64")
    if tensor.shape != (count,):
        raise ValueError(f"{name} is {list(tensor.shape)}; expected [{count}]")
    return address(tensor, name)


def int32_address(tensor: Tensor, name: str) -> int:
    """Return the address of a contiguous int32 tensor."""
    if tensor.dtype != torch.int32:
        raise TypeError(f"{name} is {tensor.dtype}; expected int32")
    return address(tensor, name)


def require(condition: bool, message: str, *tensors: Tensor | None) -> None:
    """ValueError with `message` and the shapes of `tensors` unless `condition`."""
    if not condition:
        shapes = ", ".join(
            "None" if tensor is None else str(list(tensor.shape)) for tensor in tensors
        )
        raise ValueError(f"{message}; got {shapes}" if shapes else message)


def vector_address(tensor: Tensor, name: str, dtype: torch.dtype, count: int) -> int:
    """Return the address of a tensor [count] of this dtype."""
    if tensor.dtype != dtype or tensor.shape != (count,):
        raise TypeError(
            f"{name} is {tensor.dtype} {list(tensor.shape)}; expected {dtype} [{count}]"
        )
    return address(tensor, name)
