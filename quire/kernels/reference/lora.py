"""Reference adapters: two matrix-vector products per row and weight."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
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
            weight.down.nbytes
            + weight.scales.nbytes
            + sum(
                part.up.nbytes + (0 if part.bias is None else part.bias.nbytes)
                for part in weight.parts
            )
            for weight in self.weights.values()
        )

    @property
    def numbers(self) -> Collection[int]:
        """See `PackedAdapter.numbers`."""
        return self.weights.keys()


def pack_adapter(weights: Mapping[int, LoraWeight], num_weights: int) -> ReferenceAdapter:
    """See `Kernels.pack_adapter`."""
    return ReferenceAdapter(dict(weights))


def add_lora(
    y: Tensor, x: Tensor, adapters: StepAdapters, number: int, first_output: int = 0
) -> None:
    """See `Kernels.add_lora`."""
    for row, weight in _adapted(adapters, number):
        products = torch.mv(weight.down.float(), x[row].float())
        _add_to_row(y[row], products, weight, first_output)


def add_lora_embedding(y: Tensor, token_ids: Tensor, adapters: StepAdapters, number: int) -> None:
    """See `Kernels.add_lora_embedding`."""
    for row, weight in _adapted(adapters, number):
        _add_to_row(y[row], weight.down[:, token_ids[row]].float(), weight, 0)


def weight_of(adapters: StepAdapters, row: int, number: int) -> LoraWeight | None:
    """Return what a token's adapter adds to a weight; None where it has none, or adds nothing."""
    index = int(adapters.of_token[row])
    if index < 0:
        return None
    adapter = adapters.adapters[index]
    assert isinstance(adapter, ReferenceAdapter)
    return adapter.weights.get(number)


def add_to_row(y: Tensor, x: Tensor, weight: LoraWeight, first_output: int) -> None:
    """y [width], from column `first_output` of the weight on, with x [K]."""
    _add_to_row(y, torch.mv(weight.down.float(), x.float()), weight, first_output)


def _adapted(adapters: StepAdapters, number: int) -> Iterator[tuple[int, LoraWeight]]:
    for row in range(len(adapters.of_token)):
        weight = weight_of(adapters, row, number)
        if weight is not None:
            yield row, weight


def _add_to_row(y: Tensor, products: Tensor, weight: LoraWeight, first_output: int) -> None:
    """`products` are float32 [R], not scaled yet."""
    products = products * weight.scales
    for first, first_rank, up, bias, replaced in weight.parts:
        num_outputs, rank = up.shape
        start = first - first_output
        if start < 0 or start + num_outputs > len(y):
            continue
        correction = torch.mv(up.float(), products[first_rank : first_rank + rank])
        if bias is not None:
            correction = correction + (bias if replaced is None else bias - replaced)
        y[start : start + num_outputs] = y[start : start + num_outputs].float() + correction
