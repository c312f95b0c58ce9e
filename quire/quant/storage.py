"""How a quantized checkpoint keeps its projections, torch-free: one record per projection of the
public formats (GPTQ, AWQ, compressed-tensors, FP8, MXFP4), which says what tensors are stored for
it and how it will be held in memory. `quire.quant.quantization_config` reads which it is,
`quire.quant.unpacking` has the arithmetic.

Weights of GPTQ, AWQ and compressed-tensors W4A16 keep the activations as they are, since their
integers were chosen for that; W8A8 quantizes the activations token by token, as its config says.
Asking for quantization="int4" (or "int8", whichever has the bits of the checkpoint) quantizes the
activations of the former kind, too, which is faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from quire.common.numbers import ceil_div
from quire.errors import ConfigError
from quire.models.tensors import LinearSpec, StackedPlace
from quire.quant.formats import IntegerFormat, WeightFormats
from quire.weights.checkpoint import ExpectedTensor, Layout

Activations = Literal["int8", "float"]
_INT32 = frozenset({"I32"})
_BYTES = frozenset({"U8"})


class LinearStorage(Protocol):
    """How one projection is stored."""

    def tensors(self, linear: LinearSpec) -> tuple[ExpectedTensor, ...]:
        """Return what is stored in place of its weight. Raises ConfigError where the sizes cannot
        be."""
        ...

    def held(self, linear: LinearSpec) -> IntegerFormat | None:
        """Return the form that it will have in memory, at most; None for floating point."""
        ...


@dataclass(frozen=True, slots=True)
class GptqStorage:
    """Integers packed along the inputs, zero points along the outputs,
    one scale per group and output."""

    bits: Literal[4, 8]
    group_size: int | None
    zero_shift: int
    """Added to stored zero points: 1 in the usual format, 0 in "gptq_v2"."""
    is_ordered: bool
    """Groups may be scattered over the inputs (desc_act)."""
    activations: Activations = "float"

    def tensors(self, linear: LinearSpec) -> tuple[ExpectedTensor, ...]:
        module, num_outputs, num_inputs = linear.name, _stored_outputs(linear), linear.num_inputs
        groups = num_inputs // _group_size(self.group_size, linear)
        per_word = 32 // self.bits
        _divide(linear, per_word, num_inputs, num_outputs)
        has_no_bias = linear.bias is None
        return (
            ExpectedTensor(f"{module}.qweight", ((num_inputs // per_word, num_outputs),), _INT32),
            ExpectedTensor(f"{module}.qzeros", ((groups, num_outputs // per_word),), _INT32),
            ExpectedTensor(f"{module}.scales", ((groups, num_outputs),)),
            ExpectedTensor(
                f"{module}.g_idx", ((num_inputs,),), _INT32, is_optional=not self.is_ordered
            ),
            *(
                [ExpectedTensor(f"{module}.bias", ((num_outputs,),), is_optional=True)]
                * has_no_bias
            ),
        )

    def held(self, linear: LinearSpec) -> IntegerFormat | None:
        size = _group_size(self.group_size, linear)
        return IntegerFormat(
            8 if self.is_ordered else self.bits,
            size,
            self.activations,
            has_offsets=not self.is_ordered,
        )


@dataclass(frozen=True, slots=True)
class AwqStorage:
    """4-bit integers packed along the outputs in the order of AWQ's GEMM kernel."""

    group_size: int | None
    activations: Activations = "float"
    bits: Literal[4, 8] = 4

    def tensors(self, linear: LinearSpec) -> tuple[ExpectedTensor, ...]:
        module, num_outputs, num_inputs = linear.name, _stored_outputs(linear), linear.num_inputs
        groups = num_inputs // _group_size(self.group_size, linear)
        _divide(linear, 8, num_outputs)
        return (
            ExpectedTensor(f"{module}.qweight", ((num_inputs, num_outputs // 8),), _INT32),
            ExpectedTensor(f"{module}.qzeros", ((groups, num_outputs // 8),), _INT32),
            ExpectedTensor(f"{module}.scales", ((groups, num_outputs),)),
        )

    def held(self, linear: LinearSpec) -> IntegerFormat | None:
        return IntegerFormat(
            4, _group_size(self.group_size, linear), self.activations, has_offsets=True
        )


@dataclass(frozen=True, slots=True)
class CompressedStorage:
    """compressed-tensors integers: "int-quantized" (a byte each)
    or "pack-quantized" (packed along the inputs)."""

    bits: Literal[4, 8]
    group_size: int | None
    """None: one scale per output."""
    is_packed: bool
    is_symmetric: bool
    activations: Activations

    def tensors(self, linear: LinearSpec) -> tuple[ExpectedTensor, ...]:
        module, num_outputs, num_inputs = linear.name, _stored_outputs(linear), linear.num_inputs
        groups = num_inputs // _group_size(self.group_size, linear)
        scale_shapes = ((num_outputs, groups), *(((num_outputs,), (1,), ()) if groups == 1 else ()))
        scale = ExpectedTensor(f"{module}.weight_scale", scale_shapes)
        zero = f"{module}.weight_zero_point"
        if not self.is_packed:
            zeros = (
                ()
                if self.is_symmetric
                else (ExpectedTensor(zero, scale_shapes, frozenset({"I8", "I32"})),)
            )
            return (
                ExpectedTensor(f"{module}.weight", ((num_outputs, num_inputs),), frozenset({"I8"})),
                scale,
                *zeros,
            )
        _divide(linear, 32 // self.bits, num_inputs)
        packed_zeros = ExpectedTensor(
            zero, ((ceil_div(num_outputs * self.bits, 32), groups),), _INT32
        )
        return (
            ExpectedTensor(
                f"{module}.weight_packed", ((num_outputs, num_inputs * self.bits // 32),), _INT32
            ),
            scale,
            ExpectedTensor(
                f"{module}.weight_shape", ((2,),), frozenset({"I64", "I32"}), is_optional=True
            ),
            *(() if self.is_symmetric else (packed_zeros,)),
        )

    def held(self, linear: LinearSpec) -> IntegerFormat | None:
        size = _group_size(self.group_size, linear)
        return IntegerFormat(self.bits, size, self.activations, has_offsets=not self.is_symmetric)


@dataclass(frozen=True, slots=True)
class Fp8Storage:
    """Floating point of 8 bits (e4m3) with scales per tensor, output or block.
    Only some back ends have kernels for it."""

    block: tuple[int, int] | None
    """Outputs and inputs that share a scale; None: one scale per tensor or per output."""
    scale_name: str
    activations: Literal["fp8", "float"] = "fp8"
    """What inputs are multiplied as where the weights stay e4m3."""
    is_kept: bool = False
    """Weights stay e4m3, unless requantized, or their blocks are ragged along the inputs."""
    requantized: IntegerFormat | None = None
    """What it is turned into; None: the compute dtype. A group size of 0 means all inputs."""

    def tensors(self, linear: LinearSpec) -> tuple[ExpectedTensor, ...]:
        module, num_outputs, num_inputs = linear.name, _stored_outputs(linear), linear.num_inputs
        shapes: tuple[tuple[int, ...], ...] = ((), (1,), (num_outputs, 1), (num_outputs,))
        if self.block is not None:
            shapes = ((ceil_div(num_outputs, self.block[0]), ceil_div(num_inputs, self.block[1])),)
        return (
            ExpectedTensor(
                f"{module}.weight", ((num_outputs, num_inputs),), frozenset({"F8_E4M3"})
            ),
            ExpectedTensor(f"{module}.{self.scale_name}", shapes),
            ExpectedTensor(f"{module}.input_scale", ((), (1,)), is_optional=True),
        )

    def held(self, linear: LinearSpec) -> IntegerFormat | None:
        size = linear.num_inputs if self.block is None else self.block[1]
        if self.requantized is None and self.is_kept and linear.num_inputs % size == 0:
            return IntegerFormat(8, size, self.activations, is_fp8=True)
        return self.requantized


MXFP4_BLOCK = 32


@dataclass(frozen=True, slots=True)
class Mxfp4Storage:
    """Blocks of 32 e2m1 numbers along the inputs, two to a byte, with a scale of a byte (e8m0), of
    matrices that lie in one tensor: `*_blocks` [E, N, K / 32, 16] and `*_scales` [E, N, K / 32] in
    place of [E, K, N]."""

    scale_bytes: int = 1
    """Of a scale in memory: as stored, but where a back end has another form."""

    def tensors(self, linear: LinearSpec) -> tuple[ExpectedTensor, ...]:
        place, num_outputs = linear.weight.other_place, _stored_outputs(linear)
        assert place is not None and linear.weight.is_transposed
        num_blocks = linear.num_inputs // _group_size(MXFP4_BLOCK, linear)
        count, first = place.shape[0], place.first_row // linear.num_inputs * num_outputs
        rows, stacked = (num_outputs, num_blocks), (count, num_outputs, num_blocks)
        return (
            ExpectedTensor(
                f"{linear.name}.blocks", ((*rows, MXFP4_BLOCK // 2),), _BYTES,
                place=StackedPlace(
                    f"{place.name}_blocks", (*stacked, MXFP4_BLOCK // 2), first * num_blocks
                ),
            ),
            ExpectedTensor(
                f"{linear.name}.scales", (rows,), _BYTES,
                place=StackedPlace(f"{place.name}_scales", stacked, first),
            ),
        )  # fmt: skip

    def held(self, linear: LinearSpec) -> IntegerFormat | None:
        return IntegerFormat(4, MXFP4_BLOCK, "float", is_mxfp4=True, scale_bytes=self.scale_bytes)


@dataclass(frozen=True, slots=True)
class CheckpointStorage:
    """Every projection of a checkpoint that is not stored as plain floating point,
    by the name of its weight."""

    name: str
    """As people call the format."""
    by_name: Mapping[str, LinearStorage]
    linears: Mapping[str, LinearSpec]

    @property
    def layout(self) -> Layout:
        """For `SafetensorsCheckpoint`."""
        return {name: storage.tensors(self.linears[name]) for name, storage in self.by_name.items()}

    @property
    def formats(self) -> WeightFormats:
        """For the plan."""
        held = {
            name: storage.held(self.linears[name])
            for name, storage in self.by_name.items()
            if self.linears[name].is_quantizable
        }
        integers = {name: each for name, each in held.items() if each is not None}
        sizes = {
            (
                "fp8" if each.is_fp8 else "mxfp4" if each.is_mxfp4 else f"{each.bits}-bit",
                each.activations,
            )
            for each in integers.values()
        }
        kinds = sorted(f"{size} weights, activations {activations}" for size, activations in sizes)
        return WeightFormats(
            integers, f"{self.name}: {'; '.join(kinds) or 'turned into the compute dtype'}"
        )


def _group_size(size: int | None, linear: LinearSpec) -> int:
    """Return the inputs that share a scale. Raises ConfigError where they do
    not divide the projection's."""
    size = linear.num_inputs if size is None else size
    if linear.num_inputs % size:
        raise ConfigError(
            f"{linear.name} has {linear.num_inputs} inputs, which groups of {size} do not divide"
        )
    return size


def _divide(linear: LinearSpec, per_word: int, *sizes: int) -> None:
    if any(size % per_word for size in sizes):
        raise ConfigError(
            f"{linear.name} has sizes that {per_word} values a word do not divide: {list(sizes)}"
        )


def _stored_outputs(linear: LinearSpec) -> int:
    return linear.weight.stored_rows or linear.num_outputs
