"""Paged attention by FlashAttention or FlashInfer, in place of `attention`, over the same caches
and batches.

Owns the translation of an `AttentionBatch` into their arguments. Both are optional packages,
imported when an engine is built that uses one (`quire.engine.plan.attention`). Written after their
documentation and tested with stand-ins for them: neither has been run on a GPU by this project yet.
Only bfloat16; the bits may depend on the batch.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.kernels.interface import AttentionBatch

_WORKSPACE_BYTES = 128 << 20
"""What FlashInfer's documentation recommends."""


class LibraryAttention(Protocol):
    """Attention as `Kernels.paged_attention` means it."""

    def __call__(
        self, query: Tensor, caches: tuple[Tensor, Tensor], batch: AttentionBatch, *, scale: float,
        window: int | None, soft_cap: float | None,
    ) -> Tensor: ...  # fmt: skip


def load_attention(module: str, device: torch.device) -> LibraryAttention:
    """Load a library by the name of its module: `flash_attn_interface` (version 3), `flash_attn`
    (version 2) or `flashinfer`."""
    library = importlib.import_module(module)
    if module == "flashinfer":
        return FlashInfer(library, device)
    return (
        FlashAttention3(library) if module == "flash_attn_interface" else FlashAttention2(library)
    )


class FlashAttention2:
    """`flash_attn_varlen_func`, which takes pages as [blocks, block size, KV heads, D],
    of any strides."""

    def __init__(self, library: Any) -> None:
        self._attend = library.flash_attn_varlen_func

    def __call__(
        self, query: Tensor, caches: tuple[Tensor, Tensor], batch: AttentionBatch, *, scale: float,
        window: int | None, soft_cap: float | None,
    ) -> Tensor:  # fmt: skip
        keys, values = (cache.transpose(1, 2) for cache in caches)
        key_start = torch.nn.functional.pad(batch.context_len.cumsum(0, dtype=torch.int32), (1, 0))
        found: Tensor = self._attend(
            query, keys, values, batch.query_start, key_start, batch.max_query_len,
            batch.max_context_len,
            softmax_scale=scale, causal=True, window_size=_reach(window), softcap=soft_cap or 0.0,
            block_table=batch.block_tables,
        )  # fmt: skip
        return found


class FlashAttention3:
    """`flash_attn_with_kvcache` of version 3, with pages as in version 2, of any size."""

    def __init__(self, library: Any) -> None:
        self._attend = library.flash_attn_with_kvcache

    def __call__(
        self, query: Tensor, caches: tuple[Tensor, Tensor], batch: AttentionBatch, *, scale: float,
        window: int | None, soft_cap: float | None,
    ) -> Tensor:  # fmt: skip
        keys, values = (cache.transpose(1, 2) for cache in caches)
        found: Tensor = self._attend(
            query, keys, values, cache_seqlens=batch.context_len, page_table=batch.block_tables,
            cu_seqlens_q=batch.query_start, max_seqlen_q=batch.max_query_len, softmax_scale=scale,
            causal=True, window_size=_reach(window), softcap=soft_cap or 0.0,
        )  # fmt: skip
        return found


class FlashInfer:
    """`BatchPrefillWithPagedKVCacheWrapper`, whose pages [blocks, KV heads, block size, D] ("HND")
    are the caches as they are.

    It plans a batch before it computes, which waits for the device: once for all layers that are
    alike.
    """

    def __init__(self, library: Any, device: torch.device) -> None:
        self._library = library
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._batch: AttentionBatch | None = None
        self._plans: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self, query: Tensor, caches: tuple[Tensor, Tensor], batch: AttentionBatch, *, scale: float,
        window: int | None, soft_cap: float | None,
    ) -> Tensor:  # fmt: skip
        if self._batch is not batch:
            self._batch = batch
            self._plans.clear()
        kind = (query.shape[1:], caches[0].shape[1:], scale, window, soft_cap)
        if kind not in self._plans:
            self._plans[kind] = self._planned(query, caches, batch, scale, window, soft_cap)
        found: Tensor = self._plans[kind].run(query.contiguous(), caches)
        return found

    def _planned(
        self, query: Tensor, caches: tuple[Tensor, Tensor], batch: AttentionBatch, scale: float,
        window: int | None, soft_cap: float | None,
    ) -> Any:  # fmt: skip
        num_kv_heads, block_size, head_size = caches[0].shape[1:]
        counts = (batch.context_len + block_size - 1) // block_size
        columns = torch.arange(batch.block_tables.shape[1], device=query.device)
        wrapper = self._library.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace, kv_layout="HND"
        )
        wrapper.plan(
            batch.query_start,
            torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0)),
            batch.block_tables[columns < counts[:, None]],
            batch.context_len - (counts - 1) * block_size,
            query.shape[1], num_kv_heads, head_size, block_size,
            causal=True, sm_scale=scale, window_left=_reach(window)[0],
            logits_soft_cap=soft_cap or 0.0,
            q_data_type=query.dtype, kv_data_type=caches[0].dtype,
        )  # fmt: skip
        return wrapper


def _reach(window: int | None) -> tuple[int, int]:
    """Return positions to the left and to the right of a query that it sees beside its own; -1 for
    all, as far as causality allows."""
    return (-1, -1) if window is None else (window - 1, 0)
