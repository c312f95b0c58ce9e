"""RoPE and the movement of keys and values into and within the paged cache, in Triton. Not run on a
GPU yet.

`rope_kernel` and `write_kernel` are the operations one by one; `enter_kernel` does all that stands
between the projection and attention in one pass (norms of single heads, RoPE, the cache write) with
the very same rounding, so the same bits. Rows of int8 and fp8 are quantized where they are written
(`kv_rows`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.interface import AttentionBatch, Weights
from quire.kernels.kv_cache import head_size_of
from quire.kernels.triton.checks import (
    check_caches,
    check_heads,
    check_indices,
    launch_options,
    require,
)
from quire.kernels.triton.gemm import finished
from quire.kernels.triton.kv_rows import kernel_view, store_row
from quire.kernels.triton.unfinished import PartialSums, source_of
from quire.program.operations import PrepareHeads

_COPY_BLOCK = 2048
"""Words of a block that one program moves."""
_COPY_BYTES = 64 << 20
"""Held at most between reading and writing, unless the blocks of one cache take more."""


@triton.jit
def turned(first, second, cos_sin, position, pairs, is_pair, NUM_PAIRS: tl.constexpr):
    """Both halves of rotated pairs, float32, by the table's cosines and sines at `position`."""
    row = cos_sin + position * (2 * NUM_PAIRS)
    cos = tl.load(row + pairs, mask=is_pair, other=0.0)
    sin = tl.load(row + NUM_PAIRS + pairs, mask=is_pair, other=0.0)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def rope_kernel(
    x, positions, cos_sin, stride, num_heads, HEAD_SIZE: tl.constexpr, NUM_PAIRS: tl.constexpr,
    START: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Token program_id(0), BLOCK_H heads at program_id(1): rotates in place, from element START of
    a head on."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    pairs = tl.arange(0, BLOCK_P)[None, :]
    is_pair = (heads < num_heads) & (pairs < NUM_PAIRS)
    start = x + token * stride + heads * HEAD_SIZE + START
    if IS_INTERLEAVED:
        first_at, second_at = start + 2 * pairs, start + 2 * pairs + 1
    else:
        first_at, second_at = start + pairs, start + NUM_PAIRS + pairs
    first = tl.load(first_at, mask=is_pair, other=0.0).to(tl.float32)
    second = tl.load(second_at, mask=is_pair, other=0.0).to(tl.float32)
    first, second = turned(
        first, second, cos_sin, tl.load(positions + token), pairs, pairs < NUM_PAIRS, NUM_PAIRS
    )
    tl.store(first_at, first.to(x.dtype.element_ty), mask=is_pair)
    tl.store(second_at, second.to(x.dtype.element_ty), mask=is_pair)


@triton.jit
def write_kernel(
    key, value, key_cache, value_cache, key_scales, value_scales, slots, key_stride, value_stride,
    num_kv_heads, BLOCK_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_PADDED: tl.constexpr,
    FORMAT: tl.constexpr, HAS_VALUES: tl.constexpr,
):  # fmt: skip
    """Token program_id(0), KV head program_id(1); keys alone, unless HAS_VALUES."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, HEAD_PADDED)
    is_dim = dims < HEAD_SIZE
    slot = tl.load(slots + token)
    row = (slot // BLOCK_SIZE * num_kv_heads + head) * BLOCK_SIZE + slot % BLOCK_SIZE
    k = tl.load(key + token * key_stride + head * HEAD_SIZE + dims, mask=is_dim, other=0.0)
    store_row(key_cache, key_scales, row, k, dims, is_dim, HEAD_SIZE, FORMAT)
    if HAS_VALUES:
        v = tl.load(value + token * value_stride + head * HEAD_SIZE + dims, mask=is_dim, other=0.0)
        store_row(value_cache, value_scales, row, v, dims, is_dim, HEAD_SIZE, FORMAT)


@triton.jit
def normed_head(x, scale, weight, elements, is_element, norm_offset, dtype: tl.constexpr):
    """Elements of a head times `scale`, its inverse RMS, and the weights of these elements plus
    `norm_offset`; rounded to dtype, as float32."""
    factors = tl.load(weight + elements, mask=is_element, other=0.0).to(tl.float32) + norm_offset
    return (x * scale * factors).to(dtype).to(tl.float32)


@triton.jit
def rotated_head(x, other, angles, dims, is_turned, NUM_PAIRS: tl.constexpr):
    """The elements of a head that RoPE turns, by the cosines and sines at `angles`; `other` has
    each one's partner."""
    pair = dims % NUM_PAIRS
    cos = tl.load(angles + pair, mask=is_turned, other=0.0)
    sin = tl.load(angles + NUM_PAIRS + pair, mask=is_turned, other=0.0)
    return tl.where(dims < NUM_PAIRS, x * cos - other * sin, x * cos + other * sin)


@triton.jit(do_not_specialize=["stride"])
def enter_kernel(
    qkv, qkv_bias, query, key_cache, value_cache, key_scales, value_scales, query_norm, key_norm,
    cos_sin, positions, slots, stride, query_eps, key_eps, norm_offset, NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, NUM_PAIRS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEAD_PADDED: tl.constexpr, HAS_NORM: tl.constexpr,
    FORMAT: tl.constexpr, NUM_SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Token program_id(0), head program_id(1) of qkv [T, heads + 2 * KV heads, D]: queries are
    normed and rotated into `query` [T, heads, D], keys normed and rotated into the cache, values
    copied there. Halves are paired; NUM_PAIRS of 0: no RoPE. qkv may be an unfinished product of
    NUM_SPLITS chunks: see `gemm.finished`.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, HEAD_PADDED)
    is_dim = dims < HEAD_SIZE
    is_query = head < NUM_HEADS
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    dtype: tl.constexpr = query.dtype.element_ty
    row, first = token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_SIZE), head * HEAD_SIZE
    x = finished(
        qkv, qkv_bias, row + first + dims, first + dims, is_dim, stride, dtype, NUM_SPLITS, HAS_BIAS
    )
    if NUM_PAIRS > 0:  # each element's partner, so that no element has to move between threads
        partner = tl.where(dims < NUM_PAIRS, dims + NUM_PAIRS, dims - NUM_PAIRS)
        is_turned = dims < 2 * NUM_PAIRS
        other = finished(
            qkv, qkv_bias, row + first + partner, first + partner, is_turned, stride, dtype,
            NUM_SPLITS, HAS_BIAS,
        )  # fmt: skip
    if HAS_NORM:
        weight = query_norm if is_query else key_norm
        eps = query_eps if is_query else key_eps
        scale = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(x * x, axis=0), HEAD_SIZE * 1.0) + eps))
        y = normed_head(x, scale, weight, dims, is_dim, norm_offset, dtype)
        x = tl.where(is_value, x, y)
        if NUM_PAIRS > 0:
            y = normed_head(other, scale, weight, partner, is_turned, norm_offset, dtype)
            other = tl.where(is_value, other, y)
    if NUM_PAIRS > 0:
        angles = cos_sin + tl.load(positions + token) * (2 * NUM_PAIRS)
        rotated = rotated_head(x, other, angles, dims, is_turned, NUM_PAIRS)
        x = tl.where(is_turned & (not is_value), rotated, x)
    if is_query:
        tl.store(query + (token * NUM_HEADS + head) * HEAD_SIZE + dims, x.to(dtype), mask=is_dim)
    else:
        kv_head = tl.where(is_value, head - NUM_HEADS - NUM_KV_HEADS, head - NUM_HEADS)
        slot = tl.load(slots + token)
        place = (slot // BLOCK_SIZE * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
        if is_value:
            store_row(
                value_cache, value_scales, place, x.to(dtype), dims, is_dim, HEAD_SIZE, FORMAT
            )
        else:
            store_row(key_cache, key_scales, place, x.to(dtype), dims, is_dim, HEAD_SIZE, FORMAT)


@triton.jit(do_not_specialize=["num_copies"])
def move_kernel(
    addresses, held, blocks, num_copies, num_words, IS_WRITE: tl.constexpr, BLOCK: tl.constexpr
):
    """A chunk of words of block `blocks[program_id(0)]` of the cache at
    `addresses[program_id(1)]` to `held`, or back."""
    copy, cache = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    words = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    is_word = words < num_words
    base = tl.load(addresses + cache).to(tl.pointer_type(held.dtype.element_ty))
    there = base + tl.load(blocks + copy) * num_words + words
    here = held + (cache * num_copies + copy) * num_words + words
    if IS_WRITE:
        tl.store(there, tl.load(here, mask=is_word), mask=is_word)
    else:
        tl.store(here, tl.load(there, mask=is_word), mask=is_word)


def enter(
    projected: Tensor | PartialSums, operation: PrepareHeads, weights: Weights,
    batch: AttentionBatch,
    caches: tuple[Tensor, Tensor],
) -> Tensor:  # fmt: skip
    """Norms, RoPE and the cache write of `projected` [T, (heads + 2 * KV heads) * D]; gives the
    queries [T, heads * D].

    Norms are RMS norms of single heads, both there or neither, with one offset.
    """
    source, heads = source_of(projected), operation.heads
    key_cache, value_cache = caches
    check_caches(key_cache, value_cache)
    num_tokens = projected.shape[0]
    query = torch.empty(
        (num_tokens, heads.query_width), dtype=projected.dtype, device=source.values.device
    )
    query_norm, key_norm = operation.norm_of("queries"), operation.norm_of("keys")
    table = None if operation.rope is None else operation.rope.table
    rope = None if table is None else weights.ropes[table]
    (keys, key_scales, form), (values, value_scales, _) = (
        kernel_view(key_cache),
        kernel_view(value_cache),
    )
    if num_tokens:
        enter_kernel[(num_tokens, heads.num_queries + 2 * heads.num_keys)](
            source.values, source.bias, query, keys, values, key_scales, value_scales,
            query if query_norm is None else weights.vectors[query_norm.weight],
            query if key_norm is None else weights.vectors[key_norm.weight],
            query if rope is None else rope, batch.positions, batch.slots,
            num_tokens * projected.shape[1],
            0.0 if query_norm is None else query_norm.eps,
            0.0 if key_norm is None else key_norm.eps,
            0.0 if key_norm is None else key_norm.weight_offset,
            NUM_HEADS=heads.num_queries, NUM_KV_HEADS=heads.num_keys, HEAD_SIZE=heads.head_dim,
            NUM_PAIRS=0 if rope is None else rope.shape[-1], BLOCK_SIZE=key_cache.shape[2],
            HEAD_PADDED=triton.next_power_of_2(heads.head_dim), HAS_NORM=query_norm is not None,
            FORMAT=form,
            NUM_SPLITS=source.num_splits, HAS_BIAS=source.has_bias, **launch_options(1),
        )  # fmt: skip
    return query


def rope(
    x: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    *,
    interleaved: bool = False,
    start: int = 0,
) -> None:
    """See `Kernels.rope`."""
    check_heads(x, "x")
    check_indices(positions, "positions", x.shape[0])
    num_tokens, num_heads, head_size = x.shape
    num_pairs = cos_sin.shape[-1]
    fits = (
        cos_sin.dim() == 3
        and cos_sin.shape[1] == 2
        and 0 <= start <= head_size - 2 * num_pairs
        and cos_sin.dtype == torch.float32
    )
    require(
        fits and cos_sin.is_contiguous(),
        f"rope: expected float32 [P, 2, R / 2], R at most {head_size}",
        cos_sin,
    )
    if x.numel() and num_pairs:
        block_h = min(8, triton.next_power_of_2(num_heads))
        rope_kernel[(num_tokens, triton.cdiv(num_heads, block_h))](
            x, positions, cos_sin, x.stride(0), num_heads, HEAD_SIZE=head_size, NUM_PAIRS=num_pairs,
            START=start, BLOCK_H=block_h, BLOCK_P=triton.next_power_of_2(num_pairs),
            IS_INTERLEAVED=interleaved, **launch_options(2),
        )  # fmt: skip


def write_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    """See `Kernels.write_kv`."""
    check_heads(key, "key")
    check_heads(value, "value")
    check_caches(key_cache, value_cache)
    num_tokens = key.shape[0]
    check_indices(slots, "slots", num_tokens)
    num_kv_heads, block_size, head_size = (
        key_cache.shape[1],
        key_cache.shape[2],
        head_size_of(key_cache),
    )
    (keys, key_scales, form), (values, value_scales, _) = (
        kernel_view(key_cache),
        kernel_view(value_cache),
    )
    fits = (
        key.shape == (num_tokens, num_kv_heads, head_size)
        and value.shape == key.shape
        and value.dtype == key.dtype
    )
    require(fits, "write_kv: key and value do not fit the cache", key, value, key_cache)
    if key.numel():
        write_kernel[(num_tokens, num_kv_heads)](
            key, value, keys, values, key_scales, value_scales, slots, key.stride(0),
            value.stride(0), num_kv_heads, BLOCK_SIZE=block_size, HEAD_SIZE=head_size,
            HEAD_PADDED=triton.next_power_of_2(head_size), FORMAT=form,
            HAS_VALUES=value_cache is not key_cache, **launch_options(1),
        )  # fmt: skip


def copy_blocks(caches: list[Tensor], sources: Tensor, destinations: Tensor) -> None:
    """See `Kernels.copy_blocks`: many caches by two launches,
    one that reads and one that writes."""
    num_copies = sources.numel()
    check_indices(sources, "sources", num_copies)
    check_indices(destinations, "destinations", num_copies)
    alike: dict[int, list[Tensor]] = {}
    for cache in caches:
        require(cache.is_contiguous(), "copy_blocks: a cache is not contiguous", cache)
        alike.setdefault(cache[0].nbytes if cache.shape[0] else 0, []).append(cache)
    for num_bytes, group in alike.items():
        at_once = max(1, _COPY_BYTES // max(1, num_bytes * num_copies))
        for first in range(0, len(group) if num_bytes and num_copies else 0, at_once):
            _copy_alike(group[first : first + at_once], num_bytes, sources, destinations)


def _copy_alike(
    caches: list[Tensor], num_bytes: int, sources: Tensor, destinations: Tensor
) -> None:
    """Copy blocks of `num_bytes` each within each cache."""
    is_even = num_bytes % 4 == 0
    num_copies, num_words = sources.numel(), num_bytes // 4 if is_even else num_bytes
    pinned = torch.tensor(
        [cache.data_ptr() for cache in caches], dtype=torch.int64, pin_memory=sources.is_cuda
    )
    # else the host would wait for the steps launched before
    addresses = pinned.to(sources.device, non_blocking=True)
    shape = (len(caches), num_copies, num_words)
    held = torch.empty(shape, dtype=torch.int32 if is_even else torch.uint8, device=sources.device)
    for is_write, blocks in ((False, sources), (True, destinations)):
        move_kernel[(num_copies, len(caches), triton.cdiv(num_words, _COPY_BLOCK))](
            addresses,
            held,
            blocks,
            num_copies,
            num_words,
            IS_WRITE=is_write,
            BLOCK=_COPY_BLOCK,
            **launch_options(4),
        )
