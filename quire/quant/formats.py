"""Which projections of a decoder are held as integers, and in what form: a transform over the
declaration.

Owns the choice (group sizes, the head) and the arithmetic of memory. Knows no tensor and imports no
torch, so that `quire plan` and the memory check see what the loader will do. Embedding tables are
never quantized: one row a token is read from them, so that integers would save memory and no time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from quire.models.declaration import DecoderSpec
from quire.models.tensors import DTYPE_BYTES, LinearSpec

Activations = Literal["int8", "fp8", "float"]
"""What inputs are multiplied as, by the names of `quire.kernels.interface.InputFormat`."""
GROUP_SIZES: Final = (128, 64, 32)
_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class IntegerFormat:
    """How one projection is held: the torch-free half of
    `quire.kernels.interface.QuantizedWeight`."""

    bits: Literal[4, 8]
    group_size: int
    """Inputs that share a scale; all of them for one scale per output."""
    activations: Activations
    has_offsets: bool = False
    is_fp8: bool = False
    """e4m3 numbers in place of integers."""
    is_mxfp4: bool = False
    """e2m1 numbers in place of integers."""
    scale_bytes: int = _SCALE_BYTES
    """Of a scale, or an offset, in memory."""

    def num_bytes(self, num_outputs: int, num_inputs: int) -> int:
        """Return bytes of values, scales and offsets."""
        per_group = self.scale_bytes * (2 if self.has_offsets else 1)
        return num_outputs * (
            num_inputs * self.bits // 8 + num_inputs // self.group_size * per_group
        )


@dataclass(frozen=True, slots=True)
class WeightFormats:
    """The format of every projection by the name of its weight;
    those that are absent stay floating point."""

    by_name: Mapping[str, IntegerFormat] = dataclasses.field(default_factory=dict)
    summary: str = "as the checkpoint"
    """For people: what is done to the weights."""

    def of(self, parts: Sequence[LinearSpec]) -> IntegerFormat | None:
        """Return the one format that parts of a stacked projection get, None for floating point.

        Parts of different formats are brought to the narrowest that holds them all without loss;
        for e4m3 beside integers that is floating point.
        """
        found = [self.by_name.get(part.weight.name) for part in parts]
        formats = [each for each in found if each is not None]
        is_alike = len(formats) == len(found) and len({each.is_fp8 for each in formats}) == 1
        return join(formats) if is_alike else None

    def weight_bytes(self, spec: DecoderSpec, dtype: str) -> int:
        """Return memory of all weights: those that stay floating point count in `dtype`. Integers
        of a tied head come on top of the embedding, which stays as it is.
        """
        total = spec.weight_bytes(dtype)
        for parts in spec.projections:
            if (held := self.of(parts)) is not None:
                num_outputs, num_inputs = (
                    sum(part.num_outputs for part in parts),
                    parts[0].num_inputs,
                )
                is_on_top = spec.is_tied and parts == (spec.head,)
                replaced = 0 if is_on_top else num_outputs * num_inputs * DTYPE_BYTES[dtype]
                total += held.num_bytes(num_outputs, num_inputs) - replaced
        return total

    def token_bytes(self, spec: DecoderSpec, dtype: str) -> int:
        """Count what one token alone reads of the weights: of experts, the chosen ones."""
        return round(
            sum(parts[0].share * self.part_bytes(parts, dtype) for parts in spec.projections)
        )

    def part_bytes(self, parts: Sequence[LinearSpec], dtype: str) -> int:
        """Return the memory of one stacked projection, without biases."""
        held = self.of(parts)
        num_outputs, num_inputs = sum(part.num_outputs for part in parts), parts[0].num_inputs
        if held is None:
            return num_outputs * num_inputs * DTYPE_BYTES[dtype]
        return held.num_bytes(num_outputs, num_inputs)

    @property
    def has_integers(self) -> bool:
        """Whether anything is quantized."""
        return bool(self.by_name)


class FormSupport(NamedTuple):
    """What forms kernels hold weights in where the model runs; by default on a CPU."""

    keeps_fp8: bool = False
    """Whether there are kernels for e4m3."""
    mxfp4_scale_bytes: int = 1


GPU_MXFP4_SCALE_BYTES = 4
"""Scales are float32 there."""


def join(formats: Iterable[IntegerFormat]) -> IntegerFormat:
    """Return the format that holds weights of all of `formats` exactly: the widest integers,
    the finest groups. e2m1 numbers beside integers are integers of 8 bits."""
    listed = list(formats)
    is_alike = len({each.is_mxfp4 for each in listed}) == 1
    return IntegerFormat(
        bits=8 if not is_alike or any(each.bits == 8 for each in listed) else 4,
        group_size=math.gcd(*(each.group_size for each in listed)),
        activations=listed[0].activations
        if len({each.activations for each in listed}) == 1
        else "float",
        has_offsets=any(each.has_offsets for each in listed),
        is_fp8=all(each.is_fp8 for each in listed),
        is_mxfp4=is_alike and listed[0].is_mxfp4,
        scale_bytes=max(each.scale_bytes for each in listed) if is_alike else _SCALE_BYTES,
    )


def formats_at_load(spec: DecoderSpec, method: str) -> WeightFormats:
    """Quantize a floating-point decoder while it is loaded ("int8" or "int4"): every projection,
    with activations of 8 bits.

    int8: one scale per output. int4: the largest group of 128, 64 or 32 inputs that divides them; a
    projection that none divides, and the head, whose errors fall on the logits themselves, are
    int8. (On the shipped model int8 in the head moves the distribution by a mean KL of 0.0001,
    where int4 moves it by 0.02.)
    """
    by_name = {
        part.weight.name: _int8(part) if method == "int8" or parts == (spec.head,) else _int4(part)
        for parts in spec.projections
        for part in parts
        if part.is_quantizable
    }
    summary = "weights int8 per output, activations int8 per token"
    if method == "int4":
        sizes = sorted(
            {each.group_size for each in by_name.values() if each.bits == 4}, reverse=True
        )
        groups = " and ".join(map(str, sizes))
        num_wide = sum(
            each.bits == 8
            for name, each in by_name.items()
            if spec.head is None or name != spec.head.weight.name
        )
        wide = f" and {num_wide} projections whose inputs no group divides" if num_wide else ""
        summary = (
            f"weights int4 in groups of {groups}, activations int8 per token; the head{wide} int8"
        )
    return WeightFormats(by_name, summary)


def _int8(linear: LinearSpec) -> IntegerFormat:
    return IntegerFormat(8, linear.num_inputs, "int8")


def _int4(linear: LinearSpec) -> IntegerFormat:
    size = next((size for size in GROUP_SIZES if linear.num_inputs % size == 0), None)
    return _int8(linear) if size is None else IntegerFormat(4, size, "int8")
