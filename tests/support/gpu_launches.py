"""Launches of every Triton kernel with the shapes of real models, for `gpu_compiler`:
`python gpu_launches.py 90 [NAME ...]`.

Prints one line for each kernel: registers a thread, bytes of stack, shared memory, matrix
instructions. Without names, all. Fails where a kernel wants more shared memory than a program can
have, which the assembler does not notice but a launch does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from gpu_compiler import compiling, describe

from quire.kernels.interface import AttentionBatch, QuantizedWeight, SharedPrefixes, Weights
from quire.kernels.kv_cache import empty_cache
from quire.kernels.sampling import Filters, Keys, Penalties, ScaledRows, Thresholds
from quire.kernels.triton import elementwise
from quire.kernels.triton.cache import enter
from quire.kernels.triton.kernels import TritonKernels
from quire.kernels.triton.linear import ProductOptions
from quire.kernels.triton.sampling import TritonSampling
from quire.kernels.triton.tuning import FOLDER, Tuning
from quire.program.operations import (
    Heads,
    NormHeads,
    NormWeights,
    PrepareHeads,
    Rope,
    Routing,
    WriteKV,
)

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}
"""Of one program, by compute capability: CUDA C++ programming guide, technical specifications."""

KERNELS = TritonKernels(torch.device("cpu"), Tuning.read(FOLDER / "default.json"))
BF16 = torch.bfloat16


def batch(query_lens: list[int], context_lens: list[int], block_size: int = 16) -> AttentionBatch:
    starts = torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32)
    tables = torch.zeros(len(query_lens), -(-max(context_lens) // block_size), dtype=torch.int32)
    ids = torch.zeros(sum(query_lens), dtype=torch.int64)
    lengths = torch.tensor(context_lens, dtype=torch.int32)
    return AttentionBatch(
        starts, lengths, tables, ids, ids.clone(), max(query_lens), max(context_lens)
    )


def attention(dtype: torch.dtype = BF16, head_sizes: tuple[int, ...] = (64, 128, 256)) -> None:
    one = torch.zeros(1, 4, head_sizes[0], dtype=dtype)
    cache = torch.zeros(8, 2, 16, head_sizes[0], dtype=dtype)
    for context in (1, 3000):  # one sequence, one token: Triton makes constants of a 1
        KERNELS.paged_attention(one, cache, cache.clone(), batch([1], [context]), scale=0.1)
    for head_size in head_sizes:
        keys, values = (torch.zeros(8, 8, 16, head_size, dtype=dtype) for _ in range(2))
        wide, narrow = (torch.zeros(n, 32, head_size, dtype=dtype) for n in (512, 2))
        KERNELS.paged_attention(wide, keys, values, batch([256, 256], [256, 300]), scale=0.1)
        KERNELS.paged_attention(wide, keys, values, batch([256, 256], [256, 3000]), scale=0.1)
        KERNELS.paged_attention(
            narrow, keys, values, batch([1, 1], [100, 3000]), scale=0.1, window=1000, soft_cap=30.0
        )
        sinks = torch.zeros(32, dtype=dtype)
        for contexts in ([100, 3000], [100, 200]):
            KERNELS.paged_attention(
                narrow, keys, values, batch([1, 1], contexts), scale=0.1, sinks=sinks
            )
        # decodes that go through their splits one by one
        many = torch.zeros(64, 32, head_size, dtype=dtype)
        KERNELS.paged_attention(many, keys, values, batch([1] * 64, [3000] * 64), scale=0.1)


def latents() -> None:
    """DeepSeek V2 Lite's attention, a prompt and decodes, from floats and from bytes; the weights of
    its heads, and V3's routing."""
    for heads, form in ((16, "bfloat16"), (128, "bfloat16"), (16, "int8"), (16, "fp8")):
        cache = empty_cache(8, 1, 16, 576, form)
        for queries, contexts in (([256], [300]), ([1], [3000]), ([1] * 64, [3000] * 64)):
            query = torch.zeros(sum(queries), heads, 576, dtype=BF16)
            KERNELS.paged_attention(
                query, cache, cache, batch(queries, contexts), scale=0.1, value_size=512
            )
        KERNELS.write_kv(query[:, :1], query[:, :1], cache, cache, torch.zeros(64).long())
    weight = KERNELS.pack_linear(torch.zeros(16 * 512, 128, dtype=BF16))
    KERNELS.head_linear(torch.zeros(2, 16, 192, dtype=BF16), weight)
    angles, ids = torch.zeros(4, 2, 32), torch.zeros(64, dtype=torch.int64)
    KERNELS.rope(query, ids, angles, interleaved=True, start=512)
    routing = Routing(256, 8, True, "sigmoid", 8, 4, "best_two", 2.5)
    KERNELS.choose_experts(torch.zeros(2, 256), routing, torch.zeros(256))


def cascade() -> None:
    """Both parts of attention over a shared prefix."""
    tables, lengths = (
        torch.zeros(1, 128, dtype=torch.int32),
        torch.tensor([2048], dtype=torch.int32),
    )
    starts = torch.tensor([0, 2], dtype=torch.int32)
    shared = SharedPrefixes(starts, lengths + 2, tables, lengths, lengths.repeat(2))
    query, cache = torch.zeros(2, 32, 128, dtype=BF16), torch.zeros(8, 8, 16, 128, dtype=BF16)
    KERNELS.paged_attention(
        query, cache, cache.clone(), replace(batch([1, 1], [2100, 3000]), shared=shared), scale=0.1
    )


def quantized_cache() -> None:
    """int8 and fp8: both kinds of attention, and both writers."""
    ids, table = torch.zeros(32, dtype=torch.int64), torch.zeros(64, 2, 64)
    for kv_format in ("int8", "fp8"):
        cache = empty_cache(8, 8, 16, 128, kv_format)
        wide, narrow = (torch.zeros(n, 32, 128, dtype=BF16) for n in (512, 2))
        KERNELS.paged_attention(
            wide, cache, cache.clone(), batch([256, 256], [256, 300]), scale=0.1
        )
        KERNELS.paged_attention(narrow, cache, cache.clone(), batch([1, 1], [100, 3000]), scale=0.1)
        many = torch.zeros(64, 32, 128, dtype=BF16)
        KERNELS.paged_attention(many, cache, cache.clone(), batch([1] * 64, [3000] * 64), scale=0.1)
        both = torch.zeros(32, 48, 128, dtype=BF16)
        KERNELS.write_kv(both[:, 32:40], both[:, 40:], cache, cache.clone(), ids)
        enter(
            both.view(32, -1),
            *preparation(table),
            batch([1] * 32, [1] * 32),
            (cache, cache.clone()),
        )


def preparation(
    table: torch.Tensor, norm: torch.Tensor | None = None
) -> tuple[PrepareHeads, Weights]:
    """What happens to 32 heads and 8 KV heads of 128: RoPE, the cache write and, with its weights,
    a norm of heads."""
    heads, values = Heads(32, 8, 128), ((0,), (1,))
    weights = NormWeights("rms", 0, None, 1e-6, 0.0, 128)
    norms = (
        ()
        if norm is None
        else (
            NormHeads(*values, heads, "queries", weights),
            NormHeads(*values, heads, "keys", weights),
        )
    )
    parts = (*norms, Rope(*values, heads, 0), WriteKV(*values, heads, 0))
    return PrepareHeads(*values, heads, parts), Weights(
        (), (), () if norm is None else (norm,), (table,), len(table)
    )


def linear(dtype: torch.dtype = BF16) -> None:
    packed = KERNELS.pack_linear(torch.zeros(6144, 4096, dtype=dtype))
    for num_rows in (1, 32, 512):  # Triton makes a constant of a 1
        x = torch.zeros(num_rows, 4096, dtype=dtype)
        KERNELS.linear(x, packed)
        KERNELS.gated_linear(x, packed, "silu")
    KERNELS.linear_argmax(x, KERNELS.pack_linear(torch.zeros(32000, 4096, dtype=dtype)))


def unfinished() -> None:
    """Projections of few rows that a norm, and the way into attention, finish."""
    x, weight = torch.zeros(32, 4096, dtype=BF16), torch.zeros(4096, dtype=BF16)
    square, wide = (
        KERNELS.pack_linear(torch.zeros(n, 4096, dtype=BF16), torch.zeros(n, dtype=BF16))
        for n in (4096, 6144)
    )
    KERNELS.add_rms_norm(KERNELS.unfinished_linear(x, square), x, weight, 1e-6)
    norm, table = torch.zeros(128, dtype=BF16), torch.zeros(64, 2, 64)
    cache = torch.zeros(8, 8, 16, 128, dtype=BF16)
    projected = KERNELS.unfinished_linear(x, wide)
    enter(projected, *preparation(table, norm), batch([1] * 32, [1] * 32), (cache, cache.clone()))


def integers() -> None:
    few, many = (torch.zeros(n, 4096, dtype=BF16) for n in (32, 512))
    kinds = (
        (8, 4096, "int8"),
        (8, 128, "int8"),
        (4, 128, "int8"),
        (4, 128, "float"),
        (4, 32, "float"),
        (8, 4096, "float"),
    )
    for bits, group, activations in kinds:
        values, scales = torch.zeros(1024, 4096, dtype=torch.int8), torch.zeros(1024, 4096 // group)
        weight: Any = QuantizedWeight(values, scales, None, bits, group, activations)  # type: ignore[arg-type]
        packed = KERNELS.pack_quantized(weight)
        for x in (few, many):
            KERNELS.linear(x, packed)
            KERNELS.gated_linear(x, packed, "silu")


def fp8() -> None:
    """Weights of e4m3 per output and in blocks, with inputs of e4m3 and bfloat16."""
    few, many = (torch.zeros(n, 4096, dtype=BF16) for n in (32, 512))
    for group, activations in ((4096, "fp8"), (128, "fp8"), (128, "float")):
        values, scales = (
            torch.zeros(1024, 4096, dtype=torch.float8_e4m3fn),
            torch.zeros(1024, 4096 // group),
        )
        packed = KERNELS.pack_quantized(
            QuantizedWeight(values, scales, None, 8, group, activations)  # type: ignore[arg-type]
        )
        for x in (few, many):
            KERNELS.linear(x, packed)
            KERNELS.gated_linear(x, packed, "silu")


def integer_experts() -> None:
    """Of gpt-oss's number and in its format, and in those of other checkpoints."""
    kinds = ((8, 0, "int8", False), (4, 128, "int8", False), (4, 32, "float", True))
    for bits, size, activations, is_mxfp4 in kinds:
        up, down = (
            KERNELS.pack_quantized(
                QuantizedWeight(
                    torch.zeros(shape, dtype=torch.int8),
                    torch.zeros(shape[0], shape[1] // (size or shape[1])),
                    None, bits, size or shape[1], activations, is_mxfp4,  # type: ignore[arg-type]
                ),
                torch.zeros(shape[0], dtype=BF16),
            )
            for shape in ((32 * 2 * 512, 512), (32 * 512, 512))
        )  # fmt: skip
        choice = KERNELS.choose_experts(torch.zeros(8, 32), Routing(32, 4, True))
        x = torch.zeros(8, 512, dtype=BF16)
        KERNELS.apply_experts(x, up, down, choice, "clamped_swish")


def experts() -> None:
    """Of Mixtral's inner width and DeepSeek's number, by an eighth of the hidden size."""
    up = KERNELS.pack_linear(torch.zeros(64 * 2 * 1024, 512, dtype=BF16))
    down = KERNELS.pack_linear(torch.zeros(64 * 512, 1024, dtype=BF16))
    for num_tokens in (1, 64):
        choice = KERNELS.choose_experts(torch.zeros(num_tokens, 64), Routing(64, 6, False))
        x = torch.zeros(num_tokens, 512, dtype=BF16)
        KERNELS.apply_experts(x, up, down, choice, "silu")
    KERNELS.choose_experts(torch.zeros(2, 256), Routing(256, 8, True))


def small(dtype: torch.dtype = BF16) -> None:
    x, weight = torch.zeros(32, 4096, dtype=dtype), torch.zeros(4096, dtype=dtype)
    KERNELS.rms_norm(x, weight, 1e-6)
    KERNELS.add_rms_norm(x, x, weight, 1e-6)
    KERNELS.layer_norm(x, weight, weight, 1e-6)
    KERNELS.activate(x, "gelu")
    KERNELS.gated(x, "gelu_tanh")
    ids = torch.zeros(32, dtype=torch.int64)
    elementwise.embedding(ids, x)
    elementwise.is_finite(x)
    both, cache = torch.zeros(32, 48, 128, dtype=dtype), torch.zeros(8, 8, 16, 128, dtype=dtype)
    table = torch.zeros(64, 2, 64)
    KERNELS.rope(both, ids, table)
    KERNELS.write_kv(both[:, 32:40], both[:, 40:], cache, cache.clone(), ids)
    KERNELS.copy_blocks([cache, cache.clone()], ids[:2], ids[2:4])
    for norm in (None, torch.zeros(128, dtype=dtype)):
        enter(
            both.view(32, -1),
            *preparation(table, norm),
            batch([1] * 32, [1] * 32),
            (cache, cache.clone()),
        )


def sampling() -> None:
    logits, ids = torch.zeros(4, 128_000), torch.zeros(3, dtype=torch.int64)
    floats, kernels = torch.zeros(3), TritonSampling()
    rows, thresholds = ScaledRows(ids, floats, floats), Thresholds(floats, ids)
    kernels.argmax(logits)
    kernels.thresholds(logits, rows, Filters(ids, floats.double(), floats))
    for limit in (None, thresholds):
        kernels.draw(logits, rows, limit, Keys(ids, ids))
        kernels.score(logits, rows, limit, ids, num_top=20)
    starts, tokens = torch.zeros(4, dtype=torch.int64), torch.zeros(9, dtype=torch.int32)
    kernels.penalise(logits, Penalties(ids, tokens, starts, ids, floats, floats, floats))


def single() -> None:
    """A lone token, for a quick look."""
    x, ids = torch.zeros(1, 256, dtype=BF16), torch.zeros(1, dtype=torch.int64)
    packed = KERNELS.pack_linear(torch.zeros(512, 256, dtype=BF16))
    KERNELS.linear(x, packed)
    KERNELS.gated_linear(x, packed, "silu")
    KERNELS.linear_argmax(x, KERNELS.pack_linear(torch.zeros(32000, 256, dtype=BF16)))
    weight: Any = QuantizedWeight(
        torch.zeros(512, 256, dtype=torch.int8), torch.zeros(512, 2), None, 4, 128, "int8"
    )
    KERNELS.linear(x, KERNELS.pack_quantized(weight))
    one, cache = torch.zeros(1, 4, 64, dtype=BF16), torch.zeros(8, 1, 1, 64, dtype=BF16)
    KERNELS.paged_attention(one, cache, cache.clone(), batch([1], [1], 1), scale=0.1)
    KERNELS.rope(one[:, :1], ids, torch.zeros(1, 2, 1))
    KERNELS.write_kv(one[:, :1], one[:, 1:2], cache, cache.clone(), ids)


GROUPS: dict[str, Callable[[], None]] = {
    "attention": attention,
    "cascade": cascade,
    "latents": latents,
    "quantized-cache": quantized_cache,
    "attention-float32": lambda: attention(torch.float32, (128,)),
    "linear": linear,
    "unfinished": unfinished,
    "linear-float32": lambda: linear(torch.float32),
    "integers": integers,
    "fp8": fp8,
    "experts": experts,
    "integer-experts": integer_experts,
    "small": small,
    "small-float32": lambda: small(torch.float32),
    "sampling": sampling,
    "single": single,
}


def main(arguments: list[str]) -> None:
    capability, *names = arguments
    KERNELS.options = ProductOptions(has_fp8=int(capability) >= 89)
    if int(capability) // 10 != 9:
        KERNELS.tuning = KERNELS.tuning.of_one_height()
    for name in names or GROUPS:
        with compiling(int(capability)) as compiled:
            GROUPS[name]()
        for key, kernel in compiled.items():
            found = describe(key, kernel)
            sizes = f"{found.num_registers:4} {found.stack_bytes:5} {found.shared_bytes:7}"
            print(
                f"{name:18} {found.name:20} {sizes}  {', '.join(sorted(found.instructions)) or '-'}"
            )
            if found.shared_bytes > SHARED_BYTES[int(capability)]:
                sys.exit(
                    f"{found.name} wants more shared memory than there is "
                    f"({SHARED_BYTES[int(capability)]} bytes)"
                )


if __name__ == "__main__":
    main(sys.argv[1:])
