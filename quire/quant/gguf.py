"""GGUF's tensors as weights: the block encodings of llama.cpp, brought to `QuantizedWeight` without
loss.

Scales are products of a float16 and an integer, exact in float32. Q4 encodings stay 4 bits; those
of 5, 6 and 8 bits are held as bytes. Encodings without offsets, and Q5_1 and Q5_K, keep every
number to the bit; in Q4_1 and Q4_K the integers are moved to -8 ... 7 and the offsets with them,
which is exact but for one rounding in float32. Embeddings and norms are dequantized. Source: the
format's description and the block layouts of ggml.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.common.file_states import FileState
from quire.errors import CheckpointError
from quire.kernels.interface import QuantizedWeight
from quire.models.cutting import rows_within
from quire.models.tensors import LinearSpec, TensorSpec
from quire.quant.gguf_formats import GgufStorage
from quire.quant.integers import dequantize, rows_of
from quire.quant.mxfp4 import E2M1, E8M0_HALVES, MAX_EXPONENT
from quire.weights.gguf.file import GgufTensor
from quire.weights.gguf.model import GgufModel
from quire.weights.source import WeightSource


class GgufWeights(WeightSource):
    """The weights of a GGUF file: a `WeightSource`, and a `Decoder` for `CheckpointLinears`. A
    context manager.

    The file is read tensor by tensor; nothing is kept.
    """

    def __init__(self, storage: GgufStorage) -> None:
        self._storage = storage
        self._model: GgufModel = storage.model
        self._path = self._model.file.path
        try:
            self._file = self._path.open("rb")
        except OSError as error:
            raise CheckpointError(f"{self._path} cannot be read: {error}") from error
        try:
            self._check_unchanged()
        except CheckpointError:
            self._file.close()
            raise

    def __enter__(self) -> GgufWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def fill(self, out: Tensor, tensor: TensorSpec) -> None:
        """See `WeightSource.fill`."""
        weight = self._read(tensor)
        floats = dequantize(weight) if isinstance(weight, QuantizedWeight) else weight
        if self._model.has_shifted_norms and tensor.name.endswith("norm.weight"):
            floats = floats - 1
        out.copy_(floats.reshape(out.shape))

    def __call__(self, linear: LinearSpec) -> QuantizedWeight | Tensor | None:
        """Return the integers of a projection, None where the file has floats."""
        if linear.weight.name not in self._storage.by_name:
            return None
        return self._read(linear.weight)

    def _read(self, tensor: TensorSpec) -> QuantizedWeight | Tensor:
        """Integers or float32, with the rows that the declaration means, in its order."""
        if tensor.cut_from is not None:
            whole, part = self._read(tensor.cut_from), rows_within(tensor)
            if isinstance(whole, Tensor):
                return whole.view(tensor.cut_from.shape)[part]
            return rows_of(whole, torch.arange(part.start, part.stop))
        name, shape, first, is_turned = self._model.place_of(tensor)
        stored = self._model.file.tensors[name]
        if is_turned:
            turned = self._decode(_rows_of(stored, first, tensor.shape[::-1]))
            return (dequantize(turned) if isinstance(turned, QuantizedWeight) else turned).T
        if len(shape) > len(tensor.shape) or tensor.stored_rows is not None:
            return self._decode(_rows_of(stored, first, tensor.shape))
        weight = self._decode(stored)
        if not self._model.is_reordered(tensor):
            return weight
        rows = _halves_apart(torch.arange(tensor.shape[0]), self._storage.head_dim)
        return weight[rows] if isinstance(weight, Tensor) else rows_of(weight, rows)

    def _decode(self, stored: GgufTensor) -> QuantizedWeight | Tensor:
        try:
            self._file.seek(stored.offset)
            data = np.fromfile(self._file, dtype=np.uint8, count=stored.num_bytes)
        except OSError as error:
            raise CheckpointError(
                f"{self._path}: tensor {stored.name} cannot be read: {error}"
            ) from error
        if len(data) != stored.num_bytes:
            raise CheckpointError(f"{self._path}: tensor {stored.name} is truncated")
        self._check_unchanged()
        raw = torch.from_numpy(data)
        if stored.encoding.name in _FLOATS:
            return raw.view(_FLOATS[stored.encoding.name]).float().view(stored.shape)
        weight = decode(raw, stored, self._storage.activations)
        if not all(
            part.isfinite().all() for part in (weight.scales, weight.offsets) if part is not None
        ):
            raise CheckpointError(
                f"{self._path}: tensor {stored.name} has scales that are not finite"
            )
        return weight

    def _check_unchanged(self) -> None:
        if FileState.of(os.fstat(self._file.fileno())) != self._model.file.state:
            raise CheckpointError(f"{self._path} has changed while it was being loaded")


def _rows_of(stored: GgufTensor, first: int, shape: tuple[int, ...]) -> GgufTensor:
    """Describe rows of a tensor as one of their own; its leading dimensions are rows."""
    row_bytes = stored.num_bytes // math.prod(stored.shape[:-1])
    return dataclasses.replace(stored, shape=shape, offset=stored.offset + first * row_bytes)


class _Parts(NamedTuple):
    """Blocks taken apart: values int8 [blocks, block length], scales and offsets float32 [blocks,
    groups]."""

    values: Tensor
    scales: Tensor
    offsets: Tensor | None = None


_FLOATS: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def decode(
    raw: Tensor, stored: GgufTensor, activations: Literal["int8", "float"]
) -> QuantizedWeight:
    """uint8 bytes of a tensor [N, K] (or [K]) of blocks to its integers."""
    parts = _DECODERS[stored.encoding.name](raw.view(-1, stored.encoding.block_bytes))
    num_inputs = stored.shape[-1]
    grid = (-1, num_inputs * parts.scales.shape[1] // stored.encoding.block_len)
    offsets = None if parts.offsets is None else parts.offsets.view(grid)
    is_mxfp4 = stored.encoding.name == "MXFP4"
    bits: Literal[4, 8] = 4 if is_mxfp4 or stored.encoding.name.startswith("Q4") else 8
    size = stored.encoding.block_len // parts.scales.shape[1]
    return QuantizedWeight(
        parts.values.view(-1, num_inputs), parts.scales.view(grid), offsets, bits, size,
        "float" if is_mxfp4 else activations, is_mxfp4,
    )  # fmt: skip


def _halves_apart(rows: Tensor, head_dim: int) -> Tensor:
    """Rows as Hugging Face orders them to rows of the file, where a head's two halves alternate."""
    within = rows % head_dim
    return rows - within + within % (head_dim // 2) * 2 + within // (head_dim // 2)


def _half(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 at a byte of every block: float32 [blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(data: Tensor) -> Tensor:
    """uint8 [..., B] to int8 [..., 2 * B]: all low halves, then all high ones."""
    return torch.cat([data & 15, data >> 4], dim=-1).to(torch.int8)


def _fifth_bits(data: Tensor) -> Tensor:
    """uint8 [blocks, 4] to int8 [blocks, 32]: 0 or 16."""
    bits = (data[:, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.view(-1, 32).to(torch.int8) * 16


def _q4_0(blocks: Tensor) -> _Parts:
    return _Parts(_nibbles(blocks[:, 2:]) - 8, _half(blocks, 0))


def _q4_1(blocks: Tensor) -> _Parts:
    scales = _half(blocks, 0)
    return _Parts(_nibbles(blocks[:, 4:]) - 8, scales, _half(blocks, 2) + 8 * scales)


def _q5_0(blocks: Tensor) -> _Parts:
    return _Parts(_nibbles(blocks[:, 6:]) + _fifth_bits(blocks[:, 2:6]) - 16, _half(blocks, 0))


def _q5_1(blocks: Tensor) -> _Parts:
    return _Parts(
        _nibbles(blocks[:, 8:]) + _fifth_bits(blocks[:, 4:8]), _half(blocks, 0), _half(blocks, 2)
    )


def _q8_0(blocks: Tensor) -> _Parts:
    return _Parts(blocks[:, 2:].contiguous().view(torch.int8), _half(blocks, 0))


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eight 6-bit scales and minima of a K block, times its two float16: float32
    [blocks, 8] each."""
    low, high, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([low & 63, (rest & 15) | (low >> 6) << 4], dim=1)
    minima = torch.cat([high & 63, (rest >> 4) | (high >> 6) << 4], dim=1)
    return _half(blocks, 0) * scales, _half(blocks, 2) * minima


def _q4_k(blocks: Tensor) -> _Parts:
    scales, minima = _scales_and_minima(blocks)
    values = _nibbles(blocks[:, 16:].view(-1, 4, 32)).view(-1, 256)
    return _Parts(values - 8, scales, 8 * scales - minima)


def _q5_k(blocks: Tensor) -> _Parts:
    scales, minima = _scales_and_minima(blocks)
    places = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = ((blocks[:, None, 16:48] >> places) & 1).to(torch.int8) * 16  # [blocks, 8 groups, 32]
    return _Parts(
        _nibbles(blocks[:, 48:].view(-1, 4, 32)).view(-1, 256) + fifth.view(-1, 256),
        scales,
        -minima,
    )


def _q6_k(blocks: Tensor) -> _Parts:
    low = _nibbles(blocks[:, :128].view(-1, 2, 64))  # [blocks, 2, 128]
    places = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = (blocks[:, 128:192].view(-1, 2, 1, 32) >> places) & 3  # [blocks, 2, 4, 32]
    values = low + high.view(-1, 2, 128).to(torch.int8) * 16 - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float() * _half(blocks, 208)
    return _Parts(values.view(-1, 256), scales)


def _mxfp4(blocks: Tensor) -> _Parts:
    """A byte of a scale, and numbers whose doubles are small integers."""
    exponents = blocks[:, :1].int()
    scales = E8M0_HALVES[exponents.clamp(max=MAX_EXPONENT)]
    scales = torch.where(exponents > MAX_EXPONENT, torch.inf, scales)
    return _Parts(E2M1[_nibbles(blocks[:, 1:]).int()], scales)


_DECODERS: Mapping[str, Callable[[Tensor], _Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}
