"""Cuts declared tensors to the rows that one rank holds. What is cut is read like any part of a
stored tensor, so that a rank reads no more than its own."""

from __future__ import annotations

from collections.abc import Sequence

from quire.common.frozen_record import replace
from quire.models.declaration import DecoderSpec
from quire.models.tensors import LinearSpec, TensorSpec
from quire.program.sharding import Ranges, within


def cut(tensor: TensorSpec, rows: range) -> TensorSpec:
    """Return some neighbouring rows of a tensor."""
    return replace(
        tensor,
        shape=(len(rows), *tensor.shape[1:]),
        first_row=tensor.first_row + rows.start * tensor.row_step,
        stored_rows=tensor.stored_rows or tensor.shape[0],
        cut_from=tensor,
    )


def cut_outputs(parts: Sequence[LinearSpec], ranges: Ranges) -> tuple[LinearSpec, ...]:
    """Return the parts of a stacked projection that some of its outputs lie in, cut to these."""
    sizes = [part.num_outputs for part in parts]
    return tuple(
        replace(
            parts[place],
            weight=cut(parts[place].weight, rows),
            bias=None if (bias := parts[place].bias) is None else cut(bias, rows),
        )
        for place, rows in within(sizes, ranges)
    )


def rows_within(tensor: TensorSpec) -> slice:
    """Return which rows of `cut_from` a tensor is."""
    assert tensor.cut_from is not None
    first = (tensor.first_row - tensor.cut_from.first_row) // tensor.row_step
    return slice(first, first + tensor.shape[0])


def divisible_tokens(spec: DecoderSpec) -> int | None:
    """Return the vocabulary's size, where ranks can divide the table and the head by it; None where
    rows of types of text are added to the table (BERT)."""
    return None if spec.token_types is not None else spec.vocab_size
