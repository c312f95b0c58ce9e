"""What an adapter adds to some of a weight's outputs alone."""

from __future__ import annotations

from collections.abc import Sequence

from quire.kernels.lora import LoraPart, LoraWeight


def cut_outputs(weight: LoraWeight, ranges: Sequence[range]) -> LoraWeight:
    """Return an adapter for these outputs, side by side. Every product of its rank is kept: each is
    computed wherever outputs need it."""
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
    return LoraWeight(weight.down, weight.scales, tuple(parts), first)
