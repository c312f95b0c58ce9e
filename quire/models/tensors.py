"""The words in which a model's tensors are declared: their names, shapes and places in a
checkpoint, and the matrix products and norms that are made of them.

Linear weights are [outputs, inputs] whatever a checkpoint stores.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class StackedPlace(NamedTuple):
    """Where a matrix lies among others of its kind, one after the other in one stored tensor."""

    name: str
    shape: tuple[int, ...]
    """Of the stored tensor; its leading dimensions together are rows."""
    first_row: int
    """Of those rows."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One logical tensor, and where a checkpoint keeps it."""

    name: str
    shape: tuple[int, ...]
    is_transposed: bool = False
    """The checkpoint stores [inputs, outputs]."""
    first_row: int = 0
    """The first of this tensor's rows within the stored one."""
    stored_rows: int | None = None
    """Rows of the stored tensor where it holds more than this one (fused weights)."""
    row_step: int = 1
    """From one of this tensor's rows to its next one, within the stored tensor."""
    centre: float = 0.0
    """What the values scatter around when they are made up (dummy weights)."""
    other_place: StackedPlace | None = None
    """Where checkpoints keep it that do not have `name`."""
    stored_as: tuple[int, ...] | None = None
    """The stored shape, where that has more dimensions (kernels of convolutions)."""
    keeps_float32: bool = False
    """Whatever the model computes in."""
    cut_from: TensorSpec | None = None
    """The tensor that these are some rows of, which one rank holds."""
    is_optional: bool = False
    """A checkpoint may lack it: then there is a bias of zeros, or another model's table."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape that the checkpoint must have under `name`."""
        if self.stored_as is not None:
            return self.stored_as
        shape = (self.stored_rows or self.shape[0], *self.shape[1:])
        return shape[::-1] if self.is_transposed else shape

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """y = x @ weight.T + bias."""

    weight: TensorSpec
    bias: TensorSpec | None = None
    keeps_floats: bool = False
    """Never quantized: so small that nothing would be saved, and much depends on it (routers)."""
    share: float = 1.0
    """Of all tokens, those that it computes: below one for an expert."""
    holds_floats: bool = False
    """In memory, whatever the checkpoint stores."""
    is_folded: bool = False
    """The transpose is what is multiplied by: the stored rows are inputs."""

    @property
    def name(self) -> str:
        """The module's, as checkpoints have it."""
        return self.weight.name.removesuffix(".weight")

    @property
    def num_outputs(self) -> int:
        return self.weight.shape[1 if self.is_folded else 0]

    @property
    def num_inputs(self) -> int:
        return self.weight.shape[0 if self.is_folded else 1]

    @property
    def stored(self) -> LinearSpec:
        """The projection that a checkpoint has, where this one is a part of it."""
        weight = self.weight
        shape = (weight.stored_rows or weight.shape[0], weight.shape[1])
        whole = dataclasses.replace(
            weight, shape=shape, first_row=0, stored_rows=None, cut_from=None
        )
        return dataclasses.replace(self, weight=whole, is_folded=False)

    @property
    def is_quantizable(self) -> bool:
        """Whether integers may take the place of floats."""
        return not (self.keeps_floats or self.holds_floats)


@dataclass(frozen=True, slots=True)
class NormSpec:
    """RMS norm, or layer norm, over the last `size` values."""

    kind: Literal["rms", "layer"]
    weight: TensorSpec
    eps: float
    bias: TensorSpec | None = None
    weight_offset: float = 0.0
    """Added to the weight: 1 where a checkpoint stores weights around zero (Gemma)."""

    @property
    def size(self) -> int:
        return self.weight.shape[0]


def linear(name: str, num_inputs: int, num_outputs: int, *, has_bias: bool = False) -> LinearSpec:
    """`name.weight` [outputs, inputs], and `name.bias` [outputs] if there is one."""
    bias = TensorSpec(f"{name}.bias", (num_outputs,)) if has_bias else None
    return LinearSpec(TensorSpec(f"{name}.weight", (num_outputs, num_inputs)), bias)


def rms_norm(name: str, size: int, eps: float, *, weight_offset: float = 0.0) -> NormSpec:
    """`name.weight` alone."""
    weight = TensorSpec(f"{name}.weight", (size,), centre=1.0 - weight_offset)
    return NormSpec("rms", weight, eps, weight_offset=weight_offset)


def layer_norm(name: str, size: int, eps: float, *, has_bias: bool = True) -> NormSpec:
    """`name.weight`, and `name.bias` if there is one."""
    weight = TensorSpec(f"{name}.weight", (size,), centre=1.0)
    bias = TensorSpec(f"{name}.bias", (size,)) if has_bias else None
    return NormSpec("layer", weight, eps, bias=bias)
