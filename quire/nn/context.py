"""What one forward pass needs beyond token ids: passed explicitly, never through globals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from quire.kernels.interface import AttentionBatch


@dataclass(frozen=True, slots=True)
class StepContext:
    """The step's ragged batch, and the KV cache of every layer."""

    batch: AttentionBatch
    kv_caches: Sequence[tuple[Tensor, Tensor]]
    """One (keys, values) pair per layer, each [blocks, KV heads, block size,
    head size] in the compute dtype."""
    num_wanted: Tensor | None = None
    """Hidden states that are wanted, as `ForwardPass` takes it."""
    rows: Sequence[int] | None = None
    """The worker's row of each sequence; None where there is no worker."""
