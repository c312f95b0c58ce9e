"""Triton's interpreter put right where it computes something else than a GPU would. Compiled
kernels never see this module.

Triton 3.6 keeps bfloat16 as 16-bit integers, multiplies those integers in `tl.dot`, and cuts
float32 off where it should round to nearest even. It computes `tl.dot` with one matrix product, and
a BLAS may sum a row in another order when more rows are multiplied with it (OpenBLAS does on
processors with AVX2 only), where a GPU's matrix instructions do not. It takes numbers out of arrays
of one element in a way that numpy 2.4 refuses. It prepares the whole language anew at each call of
a function within a kernel, which takes longer than all the rest; once is enough. It computes every
sum and product of integers a second time, in 64 bits, for an assertion against overflow that is
only made in a debugging mode. It lists all of numpy's types wherever it needs one. And for each
value that it computes it checks the sizes of its block anew, and wraps each of them in objects.
It makes each constant twice wherever it occurs, and walks the sizes of blocks that are alike.
"""

from __future__ import annotations

import math
import os
from functools import cache
from typing import Any

import numpy as np


def is_interpreted() -> bool:
    """Return whether Triton will interpret kernels on the CPU: its own variable,
    read when a kernel is defined."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


@cache
def correct_interpreter() -> None:
    """Put the interpreter right, once in a process."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    plain_cast = builder.cast_impl

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        return handle(dot(operand(a), operand(b), d.data), d.dtype.scalar)

    def operand(each: Any) -> Any:
        if each.dtype.scalar == tl.bfloat16:
            return bits_to_float32(each.data)
        if each.dtype.primitive_bitwidth == 8 and each.dtype.is_floating():
            return interpreter._convert_float(each.data, each.dtype, tl.float16, None).view(
                np.float16
            )
        return each.data

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if target == tl.bfloat16 and source == tl.float32:
            return handle(float32_to_bits(src.data), target)
        if source == tl.bfloat16 and target == tl.float32:
            return handle(bits_to_float32(src.data), target)
        return plain_cast(self, src, dst_type)

    plain_patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        plain_patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    prepared: set[str] = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__ not in prepared:
            interpreter._patch_lang(self.fn)
            prepared.add(self.fn.__module__)
        return self.rewrite()(*args, **kwargs)

    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )
    interpreter.InterpretedFunction.__call__ = call
    builder.create_dot, builder.cast_impl = create_dot, cast_impl
    interpreter._patch_lang_tensor = patch_lang_tensor
    _keep_types(tl, interpreter)
    _shorten_operations(tl)


def _keep_types(tl: Any, interpreter: Any) -> None:
    """Have numpy's dtypes and the shapes of blocks made once for all values that have them."""
    numpy_type, init_block = interpreter._get_np_dtype, tl.block_type.__init__
    dtypes: dict[Any, Any] = {}
    blocks: dict[tuple[int, ...], tuple[Any, ...]] = {}
    shapes: dict[int, tuple[Any, ...]] = {}

    def get_np_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        if isinstance(scalar, tl.pointer_type):  # which has no hash
            return numpy_type(scalar)
        if scalar not in dtypes:
            dtypes[scalar] = numpy_type(scalar)
        return dtypes[scalar]

    def new_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(each.value if isinstance(each, tl.constexpr) else each for each in shape)
        if sizes not in blocks:
            init_block(self, element_ty, shape)
            blocks[sizes] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, named = blocks[sizes]
        self.name = f"<{named}, {element_ty}>"

    def new_tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = type.shape if type.is_block() else ()
        if id(sizes) not in shapes:  # kept with the rest, so that nothing else gets its id
            wrapped = [tl.constexpr(each) for each in sizes]
            shapes[id(sizes)] = tl.tuple(wrapped), tl.constexpr(math.prod(sizes)), sizes
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel, _ = shapes[id(sizes)]

    interpreter._get_np_dtype = get_np_dtype
    tl.block_type.__init__, tl.tensor.__init__ = new_block, new_tensor


def _shorten_operations(tl: Any) -> None:
    """Have constants made once, and operands of the same shape taken as they are."""
    from triton.language import core, semantic

    operations = semantic.TritonSemantic
    plain_unwrap = core._unwrap_if_constexpr
    plain_constant, plain_broadcast = operations.scalar_constant, operations.broadcast_impl_value
    constants: dict[tuple[Any, ...], Any] = {}

    def unwrap(value: Any) -> Any:
        kind = type(value)
        if kind is tl.constexpr:
            return value.value
        return value if kind is tl.tensor or kind is int else plain_unwrap(value)

    def scalar_constant(self: Any, value: Any, dtype: Any) -> Any:
        if dtype is None or type(value) not in (int, float):
            return plain_constant(self, value, dtype)
        key = dtype.name, type(value), value
        if key not in constants:
            if len(constants) >= _MAX_CONSTANTS:
                constants.clear()
            constants[key] = plain_constant(self, value, dtype)
            constants[key].handle.data.flags.writeable = False
        return constants[key]

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        # `_keep_types` has one object for each shape; numbers have the empty one.
        if lhs.shape is rhs.shape:
            return lhs, rhs
        return plain_broadcast(self, lhs, rhs)

    core._unwrap_if_constexpr = unwrap
    operations.scalar_constant, operations.broadcast_impl_value = scalar_constant, broadcast


_MAX_CONSTANTS = 4096


def dot(a: Any, b: Any, sums: Any) -> Any:
    """`sums` [..., m, n] plus `a` [..., m, k] times `b` [..., k, n], in the dtype of `sums`.

    Each row is multiplied in a BLAS call of its own, so that its bits do not depend on the other
    rows.
    """
    rows, columns = (
        np.ascontiguousarray(a)[..., :, None, :],
        np.ascontiguousarray(b)[..., None, :, :],
    )
    return np.matmul(rows, columns, dtype=sums.dtype)[..., 0, :] + sums


def bits_to_float32(bits: Any) -> Any:
    """uint16 of any shape to the float32 that bfloat16 stands for."""
    return (np.asarray(bits, dtype=np.uint32) << 16).view(np.float32)


def float32_to_bits(values: Any) -> Any:
    """float32 of any shape to bfloat16, to nearest even; NaN stays NaN."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
