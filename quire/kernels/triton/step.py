"""A decoder in one call for the GPU: the operations of `quire.nn.layers`, fused where a pass over memory is saved.

Between the projection and attention stands one kernel (`cache.enter_kernel`): norms of single heads, RoPE and the cache write.
It rounds where the operations one by one round, so the bits are theirs. It has not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.interface import (
    AttentionBatch,
    AttentionWeights,
    BlockWeights,
    DecoderWeights,
    Kernels,
    MlpWeights,
    NormWeights,
)
from quire.kernels.triton.cache import enter


class CompiledDecoder:
    """Implements `ForwardPass`."""

    def __init__(self, decoder: DecoderWeights, kernels: Kernels) -> None:
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
        """See `ForwardPass`. All hidden states are computed, whoever asks for them."""
        decoder, kernels = self._decoder, self._kernels
        total = kernels.embedding(token_ids, decoder.embedding)
        if decoder.embedding_scale != 1.0:
            total = total * decoder.embedding_scale
        if decoder.position_embedding is not None:
            total = total + kernels.embedding(positions, decoder.position_embedding)
        pending: Tensor | None = None
        for block, caches in zip(decoder.blocks, kv_caches, strict=True):
            total, pending = self._block(block, (total, pending), batch, caches)
        return total if pending is None else total + pending

    def _block(
        self, block: BlockWeights, stream: tuple[Tensor, Tensor | None], batch: AttentionBatch, caches: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        x, total = self._enter(block.attention_norm, *stream)
        x = self._attention(block.attention, x, batch, caches)
        if block.post_attention_norm is not None:
            x = self._norm(block.post_attention_norm, x)
        x, total = self._enter(block.mlp_norm, total, x)
        x = self._mlp(block.mlp, x)
        if block.post_mlp_norm is not None:
            x = self._norm(block.post_mlp_norm, x)
        return total, x

    def _enter(self, norm: NormWeights | None, total: Tensor, pending: Tensor | None) -> tuple[Tensor, Tensor]:
        """What the next sublayer reads, and the stream's value with nothing pending."""
        if pending is None:
            return (total if norm is None else self._norm(norm, total)), total
        if norm is not None and norm.kind == "rms":
            offset = norm.weight_offset
            return self._kernels.add_rms_norm(pending, total, norm.weight, norm.eps, weight_offset=offset)
        total = total + pending
        return (total if norm is None else self._norm(norm, total)), total

    def _norm(self, norm: NormWeights, x: Tensor) -> Tensor:
        if norm.kind == "layer":
            return self._kernels.layer_norm(x, norm.weight, norm.bias, norm.eps)
        return self._kernels.rms_norm(x, norm.weight, norm.eps, weight_offset=norm.weight_offset)

    def _attention(self, weights: AttentionWeights, x: Tensor, batch: AttentionBatch, caches: tuple[Tensor, Tensor]) -> Tensor:
        projected = self._kernels.linear(x, weights.qkv)
        query = enter(projected, weights, batch, caches)
        attended = self._kernels.paged_attention(
            query, *caches, batch, scale=weights.scale, window=weights.window, soft_cap=weights.soft_cap
        )
        return self._kernels.linear(attended.view(x.shape[0], -1), weights.output)

    def _mlp(self, weights: MlpWeights, x: Tensor) -> Tensor:
        if weights.is_gated:
            raised = self._kernels.gated_linear(x, weights.up, weights.activation)
        else:
            raised = self._kernels.activate(self._kernels.linear(x, weights.up), weights.activation)
        return self._kernels.linear(raised, weights.down)


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
