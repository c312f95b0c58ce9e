"""Adapters on the CPU, packed in the order in which they are read (csrc/cpu/dispatch.hpp): `down`
in blocks of ranks, `up` in panels of neighbouring outputs, rank by rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quire.common.numbers import align_up
from quire.kernels.cpu import _native
from quire.kernels.cpu.checks import (
    FLOAT_CODES,
    address,
    float_code,
    indices_address,
    require,
    vector_address,
)
from quire.kernels.host_memory import empty_bytes
from quire.kernels.lora import LoraWeight, StepAdapters

PANEL: int = _native.LORA_PANEL
RANKS: int = _native.LORA_RANKS
CHUNK: int = _native.LORA_CHUNK
_ALIGNMENT = 64


class CpuAdapter:
    """A packed adapter, in one piece of memory. Implements `PackedAdapter`."""

    __slots__ = (
        "__weakref__", "_constants", "_memory", "_num_used", "native", "num_bytes", "numbers"
    )  # fmt: skip

    def __init__(self, weights: Mapping[int, LoraWeight], num_weights: int) -> None:
        factors = [each for weight in weights.values() for each in _factors(weight)]
        dtypes = {tensor.dtype for tensor in factors}
        require(len(dtypes) <= 1, f"pack_adapter: expected one dtype, got {dtypes}")
        self._memory = empty_bytes(sum(align_up(each.nbytes, _ALIGNMENT) for each in factors))
        self._num_used = 0
        self.numbers = frozenset(weights)
        self._constants: list[Tensor] = []
        """Scales and biases; those of the model that are replaced among them, which are no memory
        of the adapter's."""
        # of a stage none of whose weights it changes, any
        dtype = FLOAT_CODES[factors[0].dtype if factors else torch.float32]
        self.native = _native.Adapter(dtype, num_weights)
        for number, weight in weights.items():
            self._add(number, weight)
        self.num_bytes = self._memory.nbytes + sum(map(_num_own_bytes, weights.values()))

    def _add(self, number: int, weight: LoraWeight) -> None:
        num_ranks, num_inputs = weight.down.shape
        if weight.is_embedding:
            down = self._kept(weight.down.t().reshape(-1))
        else:
            down = self._kept(_blocks(weight.down))
        parts = []
        for first_output, first_rank, up, bias, replaced in weight.parts:
            require(up.dim() == 2, "pack_adapter: expected `up` [outputs, rank]", up)
            num_outputs, rank = up.shape
            constants = self._constant(bias, num_outputs), self._constant(replaced, num_outputs)
            parts.append(
                (first_output, num_outputs, first_rank, rank, self._kept(_panels(up)), *constants)
            )
        scales = self._constant(weight.scales, num_ranks)
        self.native.set_weight(
            number, num_ranks, num_inputs, weight.num_outputs, down, scales, parts
        )

    def _constant(self, vector: Tensor | None, size: int) -> int:
        """The address of a vector, which is kept; 0: there is none."""
        if vector is None:
            return 0
        self._constants.append(vector)
        return vector_address(vector, "scales or a bias", torch.float32, size)

    def _kept(self, packed: Tensor) -> int:
        """The address of a copy behind what is there already."""
        start, end = self._num_used, self._num_used + packed.nbytes
        place = self._memory[start:end].view(packed.dtype)
        place.copy_(packed)
        self._num_used = align_up(end, _ALIGNMENT)
        return address(place, "an adapter")


def _num_own_bytes(weight: LoraWeight) -> int:
    biases = (part.bias for part in weight.parts if part.bias is not None)
    return weight.scales.nbytes + sum(each.nbytes for each in biases)


def _factors(weight: LoraWeight) -> list[Tensor]:
    return [weight.down, *(part.up for part in weight.parts)]


def _blocks(down: Tensor) -> Tensor:
    """[ranks, inputs] as whole blocks of RANKS ranks and what is left: each [RANKS, CHUNK] for
    every whole chunk of inputs, and then [RANKS, what is left]."""
    whole = down.shape[0] // RANKS * RANKS
    found = [
        _chunks(part, RANKS if place == 0 else len(part))
        for place, part in enumerate((down[:whole], down[whole:]))
        if len(part)
    ]
    return torch.cat(found)


def _chunks(down: Tensor, num_ranks: int) -> Tensor:
    """Of blocks that are all whole."""
    num_inputs = down.shape[1] // CHUNK * CHUNK
    chunks = down[:, :num_inputs].reshape(-1, num_ranks, num_inputs // CHUNK, CHUNK)
    rest = down[:, num_inputs:].reshape(len(chunks), -1)
    return torch.cat((chunks.transpose(1, 2).reshape(len(chunks), -1), rest), 1).reshape(-1)


def _panels(up: Tensor) -> Tensor:
    """[outputs, rank] as [rank, PANEL] for each whole panel, and then [rank, what is left]."""
    whole = up.shape[0] // PANEL * PANEL
    panels = up[:whole].reshape(-1, PANEL, up.shape[1]).transpose(1, 2)
    return torch.cat((panels.reshape(-1), up[whole:].t().reshape(-1)))


def pack_adapter(weights: Mapping[int, LoraWeight], num_weights: int) -> CpuAdapter:
    """See `Kernels.pack_adapter`; the result keeps the scales."""
    return CpuAdapter(weights, num_weights)


def native_adapters(adapters: StepAdapters, num_tokens: int) -> tuple[list[_native.Adapter], int]:
    """What the extension takes: the adapters, and the address of `of_token`."""
    natives = []
    for adapter in adapters.adapters:
        if not isinstance(adapter, CpuAdapter):
            raise TypeError(f"an adapter was packed by another back end ({type(adapter).__name__})")
        natives.append(adapter.native)
    return natives, vector_address(adapters.of_token, "of_token", torch.int32, num_tokens)


def add_lora(
    y: Tensor, x: Tensor, adapters: StepAdapters, number: int, first_output: int = 0
) -> None:
    """See `Kernels.add_lora`."""
    num_rows, num_inputs = x.shape
    require(
        y.dim() == 2 and y.shape[0] == num_rows,
        "add_lora: expected as many rows of x as of y",
        x,
        y,
    )
    natives, of_token = native_adapters(adapters, num_rows)
    _native.add_lora(
        natives,
        of_token,
        number,
        address(x, "x"),
        float_code(x, "x"),
        num_rows,
        num_inputs,
        address(y, "y"),
        float_code(y, "y"),
        first_output,
        y.shape[1],
    )


def add_lora_embedding(y: Tensor, token_ids: Tensor, adapters: StepAdapters, number: int) -> None:
    """See `Kernels.add_lora_embedding`."""
    num_rows = token_ids.numel()
    require(
        y.dim() == 2 and y.shape[0] == num_rows,
        "add_lora_embedding: expected as many tokens as rows of y",
        y,
    )
    natives, of_token = native_adapters(adapters, num_rows)
    ids = indices_address(token_ids, "token_ids", num_rows)
    _native.add_lora_embedding(
        natives, of_token, number, ids, num_rows, address(y, "y"), float_code(y, "y"), y.shape[1]
    )
