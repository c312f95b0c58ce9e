"""How a projection comes into memory: as floats, or quantized on the way.

`LinearLoader` is all that the builder of a decoder knows of quantization. A loader deals with one
(stacked) projection at a time and keeps nothing of it, so that never two copies of a model exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quire.errors import CheckpointError
from quire.kernels.interface import Kernels, PackedLinear, QuantizedWeight
from quire.models.tensors import LinearSpec
from quire.quant.formats import WeightFormats
from quire.quant.integers import dequantize, stack
from quire.quant.rounding import quantize
from quire.weights.source import WeightSource


class LinearLoader(Protocol):
    """Loads projections, packed for a back end's GEMM."""

    def load(self, parts: Sequence[LinearSpec]) -> PackedLinear:
        """Stack the parts, which have the same inputs, by outputs into one packed weight."""
        ...

    def load_tied(self, head: LinearSpec, table: Tensor) -> PackedLinear:
        """Return the head that shares the embedding's `table` [V, H], which is in memory already,
        in the compute dtype."""
        ...


@dataclass(frozen=True, slots=True)
class FloatLinears:
    """Weights in the compute dtype. Implements `LinearLoader`."""

    weights: WeightSource
    kernels: Kernels
    dtype: torch.dtype

    def load(self, parts: Sequence[LinearSpec]) -> PackedLinear:
        return self.kernels.pack_linear(
            self.stacked(parts, self.dtype, self.kernels.device), self.bias(parts)
        )

    def load_tied(self, head: LinearSpec, table: Tensor) -> PackedLinear:
        return self.kernels.pack_linear(table)

    def stacked(
        self, parts: Sequence[LinearSpec], dtype: torch.dtype, device: torch.device | None = None
    ) -> Tensor:
        """Return the parts' weights in one tensor [sum of outputs, inputs],
        on the CPU unless a device is named."""
        weight = torch.empty(
            sum(part.num_outputs for part in parts), parts[0].num_inputs, dtype=dtype, device=device
        )
        for part, rows in zip(
            parts, weight.split_with_sizes([part.num_outputs for part in parts]), strict=True
        ):
            if part.is_folded:
                stored = torch.empty(part.weight.shape, dtype=dtype, device=device)
                self.weights.fill(stored, part.weight)
                rows.copy_(stored.T)
            else:
                self.weights.fill(rows, part.weight)
        return weight

    def bias(self, parts: Sequence[LinearSpec]) -> Tensor | None:
        """Return the parts' biases in one tensor, zero where a part has none; None if no part has
        any."""
        if all(part.bias is None for part in parts):
            return None
        bias = torch.zeros(sum(part.num_outputs for part in parts), dtype=self.dtype)
        for part, rows in zip(
            parts, bias.split_with_sizes([part.num_outputs for part in parts]), strict=True
        ):
            if part.bias is not None:
                self.weights.fill(rows, part.bias)
        return bias


@dataclass(frozen=True, slots=True)
class QuantizingLinears:
    """Floating-point weights, quantized while they are loaded. Implements `LinearLoader`."""

    floats: FloatLinears
    formats: WeightFormats
    source_dtype: torch.dtype
    """What the weights are rounded from: the checkpoint's own dtype, whatever is computed in."""

    def load(self, parts: Sequence[LinearSpec]) -> PackedLinear:
        if self.formats.of(parts) is None:
            return self.floats.load(parts)
        return self.pack(parts, self.floats.stacked(parts, self.source_dtype))

    def load_tied(self, head: LinearSpec, table: Tensor) -> PackedLinear:
        return (
            self.floats.load_tied(head, table)
            if self.formats.of([head]) is None
            else self.load([head])
        )

    def pack(self, parts: Sequence[LinearSpec], weight: Tensor) -> PackedLinear:
        """Return the stacked floats [sum of outputs, inputs] of `parts`,
        packed in the format that is planned for them."""
        held = self.formats.of(parts)
        if held is None:
            return self.floats.kernels.pack_linear(
                weight.to(self.floats.dtype), self.floats.bias(parts)
            )
        try:
            quantized = quantize(weight, held)
        except CheckpointError as error:
            raise CheckpointError(
                f"{', '.join(part.weight.name for part in parts)}: {error}"
            ) from error
        return self.floats.kernels.pack_quantized(quantized, self.floats.bias(parts))


@dataclass(frozen=True, slots=True)
class PagingLinears:
    """Projections of which some leave memory as soon as they are packed. Implements
    `LinearLoader`."""

    inner: LinearLoader
    keep: Callable[[Sequence[LinearSpec], PackedLinear], PackedLinear]
    """Puts a weight where it is read from, and returns what stands for it."""

    def load(self, parts: Sequence[LinearSpec]) -> PackedLinear:
        return self.keep(parts, self.inner.load(parts))

    def load_tied(self, head: LinearSpec, table: Tensor) -> PackedLinear:
        return self.inner.load_tied(head, table)


class WeightUnpacker(Protocol):
    """Gives the weights of projections that a checkpoint keeps as integers
    (or in any form of its own)."""

    def __call__(self, linear: LinearSpec) -> QuantizedWeight | Tensor | None:
        """Integers, or floats [N, K], or None for a projection that is
        stored as plain floating point."""
        ...


@dataclass(frozen=True, slots=True)
class CheckpointLinears:
    """Projections of a quantized checkpoint. Implements `LinearLoader`.

    Integers stay as they are, the parts of a stacked projection brought to a form that holds them
    all. Where a part is no integer, the stack becomes floating point, or what the plan says (see
    `QuantizingLinears.pack`).
    """

    rounded: QuantizingLinears
    unpack: WeightUnpacker

    def load(self, parts: Sequence[LinearSpec]) -> PackedLinear:
        if parts[0].holds_floats:
            return self._load_floats(parts)
        unpacked = [self.unpack(part) for part in parts]
        if all(each is None for each in unpacked):
            return self.rounded.load(parts)
        integers = [each for each in unpacked if isinstance(each, QuantizedWeight)]
        floats = self.rounded.floats
        if len(integers) == len(unpacked) and len({each.is_fp8 for each in integers}) == 1:
            return floats.kernels.pack_quantized(stack(integers), floats.bias(parts))
        return self.rounded.pack(
            parts, torch.cat([self._floats(*each) for each in zip(parts, unpacked, strict=True)])
        )

    def load_tied(self, head: LinearSpec, table: Tensor) -> PackedLinear:
        return (
            self.rounded.load_tied(head, table)
            if self.rounded.formats.of([head]) is None
            else self.load([head])
        )

    def _load_floats(self, parts: Sequence[LinearSpec]) -> PackedLinear:
        """Pack parts of one stored tensor, which is unpacked once, as floats."""
        stored = parts[0].stored
        unpacked = self.unpack(stored)
        if unpacked is None:
            return self.rounded.load(parts)
        rows = self._floats(stored, unpacked)
        chosen = [rows.narrow(0, part.weight.first_row, part.weight.shape[0]) for part in parts]
        folded = [
            each.T if part.is_folded else each for part, each in zip(parts, chosen, strict=True)
        ]
        return self.rounded.pack(parts, torch.cat(folded))

    def _floats(self, part: LinearSpec, unpacked: QuantizedWeight | Tensor | None) -> Tensor:
        """float32 [N, K]"""
        if unpacked is None:
            return self.rounded.floats.stacked([part], torch.float32)
        if isinstance(unpacked, QuantizedWeight):
            return dequantize(unpacked)
        return unpacked
