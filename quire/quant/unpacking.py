"""From stored tensors to weights: the arithmetic of the public formats.

Every unpacker gives a `QuantizedWeight` that stands for exactly the weights that are stored, or
float32 [N, K] where the format has no such form. All of them read a projection's tensors whole (a
part of a stacked one is cut out afterwards) and keep nothing. Sources: the packing code of AutoGPTQ
and AutoAWQ, and the compressed-tensors format as its library writes it; words of 32 bits, the
lowest bits first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from quire.errors import CheckpointError
from quire.kernels.interface import QuantizedWeight
from quire.models.tensors import LinearSpec
from quire.quant.integers import rows_of
from quire.quant.linears import WeightUnpacker
from quire.quant.mxfp4 import E2M1, E8M0_HALVES, MAX_EXPONENT
from quire.quant.storage import (
    MXFP4_BLOCK,
    AwqStorage,
    CheckpointStorage,
    CompressedStorage,
    Fp8Storage,
    GptqStorage,
    LinearStorage,
    Mxfp4Storage,
)

logger = logging.getLogger(__name__)

# Place of a nibble in AWQ's word to the column that it belongs to.
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
_E2M1_PAIRS = torch.stack([E2M1.repeat(16), E2M1.repeat_interleave(16)], dim=1).view(torch.int16)
"""Twice the numbers that a byte's two halves stand for, the lower bits first, as one number."""
_MIN_REGULAR_GROUP = 16
"""Groups finer than this cost more memory in scales than they save against 8 bits."""


class TensorReader(Protocol):
    """Gives stored tensors by name."""

    def read(self, name: str) -> Tensor | None: ...


def unpack_weight(
    storage: LinearStorage, reader: TensorReader, linear: LinearSpec
) -> QuantizedWeight | Tensor:
    """Unpack the weights of one projection. Raises CheckpointError for tensors
    that contradict each other."""
    whole = _UNPACKERS[type(storage)](storage, _Module(reader, linear))
    first = linear.weight.first_row
    if linear.weight.stored_rows is None or isinstance(storage, Mxfp4Storage):
        return whole
    chosen = torch.arange(first, first + linear.num_outputs)
    return whole[chosen] if isinstance(whole, Tensor) else rows_of(whole, chosen)


def unpacker(storage: CheckpointStorage, reader: TensorReader) -> WeightUnpacker:
    """Return the unpacker of a whole checkpoint; it says in the log, once,
    what does not stay as it is stored."""
    said: set[str] = set()

    def say(message: str) -> None:
        if message not in said:
            said.add(message)
            logger.warning("%s: %s", storage.name, message)

    def unpack_stored(linear: LinearSpec) -> QuantizedWeight | Tensor | None:
        kind = storage.by_name.get(linear.weight.name)
        if kind is None:
            return None
        weight = unpack_weight(kind, reader, linear)
        if isinstance(weight, Tensor):
            held = kind.held(linear)
            target = "the compute dtype" if held is None else f"{held.bits}-bit integers"
            say(
                "weights without an integer form here (FP8, or groups scattered by "
                f"act-order) are turned into {target}"
            )
        return weight

    return unpack_stored


class _Module:
    """The stored tensors of one projection by their short names."""

    def __init__(self, reader: TensorReader, linear: LinearSpec) -> None:
        self._reader = reader
        self.name = linear.name
        self.place = linear.weight.other_place
        self.num_outputs = linear.weight.stored_rows or linear.num_outputs
        self.num_inputs = linear.num_inputs
        self.has_bias = linear.bias is not None
        first, step = linear.weight.first_row, linear.weight.row_step
        self.rows = slice(first, first + step * linear.num_outputs, step)
        """The projection's own, of all that are stored."""

    def optional(self, name: str) -> Tensor | None:
        return self._reader.read(f"{self.name}.{name}")

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.optional(name)
        if tensor is None:
            raise CheckpointError(f"{self.name}.{name} is missing")
        return tensor

    def scales(self, name: str) -> Tensor:
        """float32, checked to be finite."""
        scales: Tensor = self[name].float()
        if not scales.isfinite().all():
            raise CheckpointError(f"{self.name}.{name} holds numbers that are not finite")
        return scales


def unpack(words: Tensor, bits: Literal[4, 8]) -> Tensor:
    """int32 [A, B] to int16 [A, B * 32 / bits] of unsigned values: each word's,
    the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    values: Tensor = (words[:, :, None] >> shifts) & (2**bits - 1)
    return values.to(torch.int16).view(words.shape[0], -1)


def _gptq(storage: GptqStorage, module: _Module) -> QuantizedWeight | Tensor:
    bits, middle = storage.bits, 1 << (storage.bits - 1)
    _require_zero_bias(module)
    values = unpack(module["qweight"].T.contiguous(), bits) - middle  # [N, K]
    # [N, groups]
    zeros = unpack(module["qzeros"], bits).T.contiguous() + storage.zero_shift - middle
    scales = module.scales("scales").T.contiguous()
    size = module.num_inputs // scales.shape[1]
    groups = module.optional("g_idx")
    if groups is None:
        return _affine(values, scales, zeros, storage, module)
    if not 0 <= int(groups.min()) <= int(groups.max()) < scales.shape[1]:
        raise CheckpointError(f"{module.name}.g_idx names groups that do not exist")
    while size >= _MIN_REGULAR_GROUP and module.num_inputs % size == 0:
        blocks = groups.view(-1, size)
        if (blocks == blocks[:, :1]).all():
            order = blocks[:, 0].long()
            return _affine(values, scales[:, order], zeros[:, order], storage, module)
        size //= 2
    if not storage.is_ordered:
        raise CheckpointError(
            f"{module.name}.g_idx scatters groups over the inputs, and "
            "quantization_config.desc_act=False says that none are"
        )
    order = groups.long()
    return (values - zeros[:, order]) * scales[:, order]


def _require_zero_bias(module: _Module) -> None:
    """Old writers add a bias of zeros to every projection."""
    bias = None if module.has_bias else module.optional("bias")
    if bias is not None and bias.any():
        raise CheckpointError(f"{module.name}.bias is not zero, and the model has no such bias")


def _awq(storage: AwqStorage, module: _Module) -> QuantizedWeight:
    columns = torch.tensor(_AWQ_COLUMNS)

    def in_order(name: str) -> Tensor:
        """[A, N] as stored to [N, A], around zero."""
        found = unpack(module[name], 4).view(-1, module.num_outputs // 8, 8)
        ordered = torch.empty_like(found)
        ordered[:, :, columns] = found
        return ordered.view(-1, module.num_outputs).T.contiguous() - 8

    scales = module.scales("scales").T.contiguous()
    return _affine(in_order("qweight"), scales, in_order("qzeros"), storage, module)


def _compressed(storage: CompressedStorage, module: _Module) -> QuantizedWeight:
    groups = 1 if storage.group_size is None else module.num_inputs // storage.group_size
    scales = module.scales("weight_scale").view(-1, groups)
    scales = scales.expand(module.num_outputs, -1).contiguous()
    if storage.is_packed:
        shape = module.optional("weight_shape")
        if shape is not None and shape.tolist() != [module.num_outputs, module.num_inputs]:
            raise CheckpointError(
                f"{module.name}.weight_shape is {shape.tolist()}, not what config.json implies"
            )
        middle = 1 << (storage.bits - 1)
        values = unpack(module["weight_packed"], storage.bits) - middle
        zeros = (
            None
            if storage.is_symmetric
            else unpack(module["weight_zero_point"].T.contiguous(), storage.bits) - middle
        )
        return _affine(
            values,
            scales,
            None if zeros is None else zeros.T[: module.num_outputs].contiguous(),
            storage,
            module,
        )
    values = module["weight"].to(torch.int16)
    if storage.bits == 4 and not (int(values.min()) >= -8 and int(values.max()) <= 7):
        raise CheckpointError(f"{module.name}.weight has values that 4 bits do not hold")
    if storage.is_symmetric:
        return _affine(values, scales, None, storage, module)
    zeros = module["weight_zero_point"].to(torch.int16).view(-1, groups)
    return _affine(values, scales, zeros.expand_as(scales), storage, module)


def _fp8(storage: Fp8Storage, module: _Module) -> QuantizedWeight | Tensor:
    weight, scales = module["weight"], module.scales(storage.scale_name)
    scales = scales if scales.dim() == 2 else scales.view(-1, 1)
    tall, wide = (1, weight.shape[1]) if storage.block is None else storage.block
    rows = scales.repeat_interleave(tall, 0)[: weight.shape[0]].expand(weight.shape[0], -1)
    if storage.is_kept and storage.requantized is None and weight.shape[1] % wide == 0:
        return QuantizedWeight(weight, rows.contiguous(), None, 8, wide, storage.activations)
    return weight.float() * rows.repeat_interleave(wide, 1)[:, : weight.shape[1]]


def _mxfp4(storage: Mxfp4Storage, module: _Module) -> QuantizedWeight:
    """Of the projection's own rows alone: unpacking takes longer than reading."""
    blocks, exponents = (module[name][module.rows] for name in ("blocks", "scales"))
    if int(exponents.max()) > MAX_EXPONENT:
        assert module.place is not None
        raise CheckpointError(
            f"{module.place.name}_scales has the byte {int(exponents.max())} for {module.name}: "
            "numbers of that block are not finite"
        )
    pairs = _E2M1_PAIRS.index_select(0, blocks.flatten().int())
    values = pairs.view(torch.int8).view(len(exponents), -1)
    scales = E8M0_HALVES[exponents.int()]
    return QuantizedWeight(values, scales, None, 4, MXFP4_BLOCK, "float", is_mxfp4=True)


_IntegerStorage = GptqStorage | AwqStorage | CompressedStorage


def _affine(
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    storage: _IntegerStorage,
    module: _Module,
) -> QuantizedWeight:
    """`(values - zeros) * scales`, values int16 [N, K] that int8 holds, scales and zeros [N,
    groups]."""
    offsets = None if zeros is None or not zeros.any() else -(zeros * scales)
    if offsets is not None and not offsets.isfinite().all():
        raise CheckpointError(f"{module.name}: a scale times its zero point is not finite")
    size = values.shape[1] // scales.shape[1]
    return QuantizedWeight(
        values.to(torch.int8), scales, offsets, storage.bits, size, storage.activations
    )


_UNPACKERS: dict[type[Any], Callable[[Any, _Module], QuantizedWeight | Tensor]] = {
    GptqStorage: _gptq,
    AwqStorage: _awq,
    CompressedStorage: _compressed,
    Fp8Storage: _fp8,
    Mxfp4Storage: _mxfp4,
}
