"""What the compiler makes of the Triton kernels as batches change, for 9.0, without a GPU: prints
JSON.

`variants`: how many versions of each kernel a layer needs for steps of all sizes.
`instructions`: the matrix instructions, with their shapes, of attention in each height of tile, and
of projections.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from gpu_compiler import compiling, describe
from gpu_launches import BF16, KERNELS, batch

from quire.kernels.triton.kernels import TritonKernels

STEPS = (
    (1, 100),
    (1, 256),
    (1, 1100),
    (1, 2048),
    (2, 2048),
    (16, 256),
    (16, 5000),
    (17, 1100),
    (64, 4096),
    (256, 16_368),
)
"""(sequences, context) of decodes: ones, multiples of 16 and others,
in all that varies with the batch."""


def decode(kernels: TritonKernels, num_sequences: int, context: int) -> None:
    query = torch.zeros(num_sequences, 32, 128, dtype=BF16)
    keys = torch.zeros(8, 8, 16, 128, dtype=BF16)
    kernels.paged_attention(
        query, keys, keys.clone(), batch([1] * num_sequences, [context] * num_sequences), scale=0.1
    )
    x, weight = torch.zeros(num_sequences, 4096, dtype=BF16), torch.zeros(4096, dtype=BF16)
    narrow = kernels.pack_linear(torch.zeros(1024, 4096, dtype=BF16))
    kernels.add_rms_norm(x, x, weight, 1e-6)
    kernels.linear(x, narrow)
    kernels.gated_linear(x, narrow, "silu")


def variants() -> dict[str, int]:
    with compiling(90) as compiled:
        for step in STEPS:
            decode(KERNELS, *step)
    return dict(Counter(name.partition("-")[0] for name in compiled))


def shapes_of(compiled: dict[str, Any], kernel: str) -> list[list[str]]:
    return [
        sorted(describe(name, each).shapes)
        for name, each in compiled.items()
        if name.startswith(kernel)
    ]


def columns_of_warps(compiled: dict[str, Any], kernel: str) -> list[int]:
    """Of each layout of a matrix product, over how many parts of its columns the warps are spread:
    rows are summed in order where that is one.
    """
    layouts = [each.asm["ttgir"] for name, each in compiled.items() if name.startswith(kernel)]
    return [
        int(found)
        for text in layouts
        for found in re.findall(r"nvidia_mma<.*?warpsPerCTA = \[\d+, (\d+)\]", text)
    ]


def instructions() -> dict[str, list[list[str]]]:
    found, cache = {}, torch.zeros(8, 8, 16, 128, dtype=BF16)
    for height in ("low", "tall"):
        tile = getattr(KERNELS.tuning.attention, height)
        figures = replace(KERNELS.tuning.attention, low=tile, tall=tile)
        kernels = TritonKernels(torch.device("cpu"), replace(KERNELS.tuning, attention=figures))
        with compiling(90) as compiled:
            query = torch.zeros(64, 32, 128, dtype=BF16)
            for context in (100, 3000):
                kernels.paged_attention(
                    query, cache, cache.clone(), batch([64], [context]), scale=0.1
                )
        found[height] = shapes_of(compiled, "attention_kernel")
        found[f"{height}, columns of warps"] = [
            [str(each)] for each in columns_of_warps(compiled, "attention_kernel")
        ]
    packed = KERNELS.pack_linear(torch.zeros(6144, 4096, dtype=BF16))
    for name, num_rows in (("few rows", 32), ("many rows", 512)):
        with compiling(90) as compiled:
            KERNELS.linear(torch.zeros(num_rows, 4096, dtype=BF16), packed)
            KERNELS.gated_linear(torch.zeros(num_rows, 4096, dtype=BF16), packed, "silu")
        found[name] = shapes_of(compiled, "linear_kernel")
    return found


if __name__ == "__main__":
    print(json.dumps({"variants": variants(), "instructions": instructions()}))
