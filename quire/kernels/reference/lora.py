"""Reference adapters: two matrix-vector products per row and weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.lora import LoraWeight, StepAdapters


@dataclass(frozen=True, slots=True)
class ReferenceAdapter:
    """An adapter as it came; its weights by their numbers in the program."""

    weights: Mapping[int, LoraWeight]

    @property
    def num_bytes(self) -> int:
        """Bytes of memory held."""
        return sum(
            weight.down.nbytes + weight.scales.nbytes + sum(part.up.nbytes for part in weight.parts)
            for weight in self.weights.values()
        )


def pack_adapter(weights: Mapping[int, LoraWeight], num_weights: int) -> ReferenceAdapter:
    """See `Kernels.pack_adapter`."""
    return ReferenceAdapter(dict(weights))


def add_lora(
    y: Tensor, x: Tensor, adapters: StepAdapters, number: int, first_output: int = 0
) -> None:
    """See `Kernels.add_lora`."""
    for row, index in enumerate(adapters.of_token.tolist()):
        if index < 0:
            continue
        adapter = adapters.adapters[index]
        assert isinstance(adapter, ReferenceAdapter)
        weight = adapter.weights.get(number)
        if weight is not None:
            _add_to_row(y[row], x[row].float(), weight, first_output)


def _add_to_row(y: Tensor, x: Tensor, weight: LoraWeight, first_output: int) -> None:
    """y [width], from column `first_output` of the weight on, with x float32 [K]."""
    products = torch.mv(weight.down.float(), x) * weight.scales
    for first, first_rank, up in weight.parts:
        num_outputs, rank = up.shape
        start = first - first_output
        if start < 0 or start + num_outputs > len(y):
            continue
        correction = torch.mv(up.float(), products[first_rank : first_rank + rank])
        y[start : start + num_outputs] = y[start : start + num_outputs].float() + correction
