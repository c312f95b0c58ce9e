"""Projections that a checkpoint keeps as one: their places in the tensor that it stores."""

from __future__ import annotations

import dataclasses

from quire.models.tensors import LinearSpec, TensorSpec


def fused(name: str, num_inputs: int, *sizes: int) -> tuple[LinearSpec, ...]:
    """Return several projections of the same input that a checkpoint keeps as one `name.weight`,
    stacked by outputs."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(
        LinearSpec(
            TensorSpec(
                f"{name}.weight", (size, num_inputs), first_row=start, stored_rows=sum(sizes)
            )
        )
        for start, size in zip(starts, sizes, strict=True)
    )


def conv1d(name: str, num_inputs: int, *sizes: int) -> tuple[LinearSpec, ...]:
    """Return projections as `fused` does, in GPT-2's own layout: `name.weight` is [inputs,
    outputs], and there is a bias."""
    return tuple(
        LinearSpec(
            dataclasses.replace(part.weight, is_transposed=True),
            TensorSpec(
                f"{name}.bias",
                (part.num_outputs,),
                first_row=part.weight.first_row,
                stored_rows=part.weight.stored_rows,
            ),
        )
        for part in fused(name, num_inputs, *sizes)
    )
