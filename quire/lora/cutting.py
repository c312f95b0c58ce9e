"""What an adapter adds to some of a weight's outputs alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.kernels.lora import LoraPart, LoraWeight


def cut_outputs(weight: LoraWeight, ranges: Sequence[range]) -> LoraWeight | None:
    """Return an adapter for these outputs, side by side, with the products that they need; None
    where it changes none of them."""
    parts, first = list[LoraPart](), 0
    for chosen in ranges:
        for part in weight.parts:
            start = max(chosen.start, part.first_output)
            end = min(chosen.stop, part.first_output + len(part.up))
            if start < end:
                rows = slice(start - part.first_output, end - part.first_output)
                bias = None if part.bias is None else part.bias[rows]
                place = first + start - chosen.start
                parts.append(LoraPart(place, part.first_rank, part.up[rows], bias, part.replaced))
        first += len(chosen)
    return _needed(weight._replace(parts=tuple(parts), num_outputs=first)) if parts else None


def _needed(weight: LoraWeight) -> LoraWeight:
    """Leave out the products that no part takes, such as those of experts that are elsewhere."""
    is_needed = torch.zeros(len(weight.scales), dtype=torch.bool)
    for part in weight.parts:
        is_needed[part.first_rank : part.first_rank + part.up.shape[1]] = True
    if is_needed.all():
        return weight
    places = is_needed.cumsum(0) - 1
    parts = [part._replace(first_rank=int(places[part.first_rank])) for part in weight.parts]
    return weight._replace(
        down=weight.down[is_needed], scales=weight.scales[is_needed], parts=tuple(parts)
    )
