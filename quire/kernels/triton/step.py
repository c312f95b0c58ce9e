"""A decoder in one call for the GPU: the operations of `quire.nn.layers`, fused where a pass over memory is saved.

Between the projection and attention stands one kernel (`cache.enter_kernel`): norms of single heads, RoPE and the cache write.
Of few rows it, and the norm that follows a sublayer, also add up the stretches of the projection before (`unfinished`).
It rounds where the operations one by one round, so the bits are theirs. Of the last layer, tokens whose hidden states nobody
asks for get their keys and values alone. It has not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.interface import (
    AttentionBatch,
    AttentionWeights,
    BlockWeights,
    DecoderWeights,
    MlpWeights,
    NormWeights,
)
from quire.kernels.triton.cache import enter
from quire.kernels.triton.unfinished import FinishingKernels, UnfinishedProduct


class Wanted(NamedTuple):
    """The tokens whose hidden states are asked for: the last ones of their sequences."""

    rows: Tensor
    """Their places in the batch, int64 [W], ascending."""
    batch: AttentionBatch
    """The batch with these queries alone."""


def wanted_tokens(num_wanted: Tensor, batch: AttentionBatch) -> Wanted | None:
    """Of each sequence the last `num_wanted`, int32 [S] on the host; None where these are all, or most.

    Waits for nothing: how many there are is known on the host, and where they are is found on the device.
    """
    count, num_tokens = int(num_wanted.sum()), batch.positions.numel()
    if 2 * count > num_tokens:
        return None
    device = batch.query_start.device
    counts = (num_wanted.pin_memory() if device.type == "cuda" else num_wanted).to(device, non_blocking=True)
    ends = counts.cumsum(0, dtype=torch.int32)
    shifts = torch.repeat_interleave(batch.query_start[1:] - ends, counts, output_size=count)
    rows = shifts + torch.arange(count, dtype=torch.int64, device=device)
    starts = torch.nn.functional.pad(ends, (1, 0))
    return Wanted(rows, replace(batch, query_start=starts, max_query_len=int(num_wanted.max()), shared=None))


class CompiledDecoder:
    """Implements `ForwardPass`."""

    def __init__(self, decoder: DecoderWeights, kernels: FinishingKernels) -> None:
        self._decoder = decoder
        self._kernels = kernels

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        kv_caches: Sequence[tuple[Tensor, Tensor]],
        num_wanted: Tensor | None = None,
    ) -> Tensor:
        """See `ForwardPass`."""
        decoder, kernels = self._decoder, self._kernels
        total = kernels.embedding(token_ids, decoder.embedding)
        if decoder.embedding_scale != 1.0:
            total = total * decoder.embedding_scale
        if decoder.position_embedding is not None:
            total = total + kernels.embedding(positions, decoder.position_embedding)
        wanted = None if num_wanted is None else wanted_tokens(num_wanted, batch)
        pending: Tensor | UnfinishedProduct | None = None
        last = decoder.blocks[-1]
        for block, caches in zip(decoder.blocks, kv_caches, strict=True):
            x, before = self._enter(block.attention_norm, total, pending)
            total, pending = self._block(block, (x, before), batch, caches, wanted if block is last else None)
        assert pending is not None
        total = total + kernels.finish(pending)
        return total if wanted is None else before.index_copy(0, wanted.rows, total)

    def _block(
        self,
        block: BlockWeights,
        stream: tuple[Tensor, Tensor],
        batch: AttentionBatch,
        caches: tuple[Tensor, Tensor],
        wanted: Wanted | None,
    ) -> tuple[Tensor, Tensor | UnfinishedProduct]:
        """The stream behind a block, and what is to be added to it; of the wanted tokens alone, if any are named."""
        x, total = stream
        attended = self._attention(block.attention, x, batch, caches, wanted)
        if wanted is not None:
            total = total.index_select(0, wanted.rows)
        x, total = self._enter(block.mlp_norm, total, self._leave(block.post_attention_norm, attended))
        return total, self._leave(block.post_mlp_norm, self._mlp(block.mlp, x))

    def _leave(self, norm: NormWeights | None, x: Tensor | UnfinishedProduct) -> Tensor | UnfinishedProduct:
        """What a sublayer adds to the stream."""
        return x if norm is None else self._norm(norm, self._kernels.finish(x))

    def _enter(
        self, norm: NormWeights | None, total: Tensor, pending: Tensor | UnfinishedProduct | None
    ) -> tuple[Tensor, Tensor]:
        """What the next sublayer reads, and the stream's value with nothing pending."""
        if pending is None:
            return (total if norm is None else self._norm(norm, total)), total
        if norm is not None and norm.kind == "rms":
            offset = norm.weight_offset
            return self._kernels.add_rms_norm(pending, total, norm.weight, norm.eps, weight_offset=offset)
        total = total + self._kernels.finish(pending)
        return (total if norm is None else self._norm(norm, total)), total

    def _norm(self, norm: NormWeights, x: Tensor) -> Tensor:
        if norm.kind == "layer":
            return self._kernels.layer_norm(x, norm.weight, norm.bias, norm.eps)
        return self._kernels.rms_norm(x, norm.weight, norm.eps, weight_offset=norm.weight_offset)

    def _attention(
        self,
        weights: AttentionWeights,
        x: Tensor,
        batch: AttentionBatch,
        caches: tuple[Tensor, Tensor],
        wanted: Wanted | None,
    ) -> Tensor | UnfinishedProduct:
        projected = self._kernels.unfinished_linear(x, weights.qkv)
        query = enter(projected, weights, batch, caches)
        if wanted is not None:
            query, batch = query.index_select(0, wanted.rows), wanted.batch
        attended = self._kernels.paged_attention(
            query, *caches, batch, scale=weights.scale, window=weights.window, soft_cap=weights.soft_cap
        )
        return self._kernels.unfinished_linear(attended.flatten(1), weights.output)

    def _mlp(self, weights: MlpWeights, x: Tensor) -> Tensor | UnfinishedProduct:
        if weights.is_gated:
            raised = self._kernels.gated_linear(x, weights.up, weights.activation)
        else:
            raised = self._kernels.activate(self._kernels.linear(x, weights.up), weights.activation)
        return self._kernels.unfinished_linear(raised, weights.down)


def reason_against(decoder: DecoderWeights) -> str | None:
    """Which part of the decoder the fused step has not; None where it has all."""
    for block in decoder.blocks:
        weights = block.attention
        norms = (weights.query_norm, weights.key_norm)
        if (norms[0] is None) != (norms[1] is None):
            return "a norm of queries without one of keys"
        for norm in filter(None, norms):
            if norm.kind != "rms" or norm.weight.shape[0] != weights.head_dim:
                return "norms over all heads of a token, or layer norms of heads"
        if norms[0] is not None and norms[1] is not None and norms[0].weight_offset != norms[1].weight_offset:
            return "norms of queries and keys with different offsets"
        if decoder.embedding.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"activations in {decoder.embedding.dtype}"
    return None
