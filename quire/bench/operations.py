"""The exact work of steps: operations and bytes, counted from the plans that were carried out and
the model's declaration.

What counts: matrix products with weights, attention over each token's own context, the output head
for sampled rows, and of the last layer only keys and values for tokens whose hidden states are not
needed; bytes of weights once a step, of the KV that is read and written. Norms, activations and
sampling are left out (below one per cent).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from quire.core.plan import RowWork
from quire.models.declaration import DecoderSpec
from quire.models.tensors import DTYPE_BYTES


class StepCost(NamedTuple):
    """What one step must do at least."""

    flops: int
    num_bytes: int
    num_tokens: int


class CostModel:
    """Counts for one model in one dtype."""

    def __init__(self, spec: DecoderSpec, dtype: str, kv_format: str | None = None) -> None:
        self._flops = spec.flops_per_token()
        self._layer_bytes = self._flops.layers // 2 * DTYPE_BYTES[dtype]
        self._head_bytes = self._flops.head // 2 * DTYPE_BYTES[dtype]
        self._kv_layers = [
            (layer.bytes_per_token(kv_format or dtype), layer.window) for layer in spec.kv_layers
        ]
        self._attention_flops = lru_cache(maxsize=None)(spec.attention_flops)

    def step(self, work: Sequence[RowWork]) -> StepCost:
        """Return the cost of one plan's work."""
        num_tokens = sum(item.num_tokens for item in work)
        num_heads = sum(1 for item in work if item.tasks)
        num_others = num_tokens - sum(item.num_wanted for item in work)
        linear = (
            num_tokens * self._flops.layers
            - num_others * self._flops.outputs
            + num_heads * self._flops.head
        )
        flops = linear + sum(map(self._attention, work))
        weights = self._layer_bytes * bool(work) + self._head_bytes * bool(num_heads)
        kv = sum(self._kv_bytes(item.start + item.num_tokens, item.num_tokens) for item in work)
        return StepCost(flops, weights + kv, num_tokens)

    def _attention(self, work: RowWork) -> int:
        end = work.start + work.num_tokens
        first_wanted = end - work.num_wanted
        return sum(
            self._attention_flops(i + 1, is_wanted=i >= first_wanted)
            for i in range(work.start, end)
        )

    def _kv_bytes(self, context_len: int, num_new: int) -> int:
        """Read of the context (once for all new tokens of the row), and write of the new ones."""
        return sum(
            size
            * ((context_len if window is None else min(context_len, window + num_new)) + num_new)
            for size, window in self._kv_layers
        )
