"""What libraries of attention are called with,
held to the reference by stand-ins that read the arguments as documented."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from quire.kernels.interface import AttentionBatch, Kernels
from quire.kernels.reference.attention import paged_attention

if TYPE_CHECKING:
    from tests.kernels.conftest import Paged


def attended(
    query: Tensor,
    caches: tuple[Tensor, Tensor],
    arrays: tuple[Tensor, Tensor, Tensor],
    scale: float,
    **options: Any,
) -> Tensor:
    """The reference's, of (query_start, context_len, block_tables)."""
    unused = torch.zeros(len(query), dtype=torch.int64)
    batch = AttentionBatch(*arrays, unused, unused, 0, int(arrays[1].max()))
    keys, values = (cache.contiguous() for cache in caches)
    return paged_attention(query, keys, values, batch, scale=scale, **options)


def seen(window_size: tuple[int, int], softcap: float) -> dict[str, Any]:
    left, right = window_size
    assert (left, right) == (-1, -1) or (left >= 0 and right == 0)
    return {"window": None if left < 0 else left + 1, "soft_cap": softcap or None}


def flash_2(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, key_starts: Tensor, max_q: int, max_k: int, *,
    softmax_scale: float, causal: bool, window_size: tuple[int, int], softcap: float,
    block_table: Tensor,
) -> Tensor:  # fmt: skip
    lengths = key_starts.diff()
    assert (
        causal
        and max_q == int(starts.diff().max())
        and max_k == int(lengths.max())
        and key_starts.dtype == torch.int32
    )
    caches = (k.transpose(1, 2), v.transpose(1, 2))
    return attended(
        q, caches, (starts, lengths, block_table), softmax_scale, **seen(window_size, softcap)
    )


def flash_3(
    q: Tensor, k: Tensor, v: Tensor, *, cache_seqlens: Tensor, page_table: Tensor,
    cu_seqlens_q: Tensor, max_seqlen_q: int, softmax_scale: float, causal: bool,
    window_size: tuple[int, int], softcap: float,
) -> Tensor:  # fmt: skip
    assert causal and max_seqlen_q == int(cu_seqlens_q.diff().max())
    caches = (k.transpose(1, 2), v.transpose(1, 2))
    return attended(
        q,
        caches,
        (cu_seqlens_q, cache_seqlens, page_table),
        softmax_scale,
        **seen(window_size, softcap),
    )


class Wrapper:
    """FlashInfer's, as far as it is used."""

    num_plans = 0

    def __init__(self, workspace: Tensor, *, kv_layout: str) -> None:
        assert kv_layout == "HND" and workspace.dtype == torch.uint8

    def plan(
        self, starts: Tensor, page_starts: Tensor, pages: Tensor, last_len: Tensor, heads: int,
        kv_heads: int, size: int, page_size: int, *, causal: bool, sm_scale: float,
        window_left: int, logits_soft_cap: float, q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        Wrapper.num_plans += 1
        assert (
            causal
            and q_data_type == kv_data_type == torch.bfloat16
            and (heads, kv_heads, size) == (4, 2, 64)
        )
        counts = page_starts.diff()
        tables = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32)
        for row, part in zip(tables, pages.split(counts.tolist()), strict=True):  # type: ignore[no-untyped-call]
            row[: len(part)] = part
        self.arrays = (starts, ((counts - 1) * page_size + last_len).int(), tables)
        self.scale, self.options = (
            sm_scale,
            seen((window_left, -1 if window_left < 0 else 0), logits_soft_cap),
        )

    def run(self, query: Tensor, caches: tuple[Tensor, Tensor]) -> Tensor:
        return attended(query, caches, self.arrays, self.scale, **self.options)


STAND_INS: dict[str, dict[str, Any]] = {
    "flash_attn": {"flash_attn_varlen_func": flash_2},
    "flash_attn_interface": {"flash_attn_with_kvcache": flash_3},
    "flashinfer": {"BatchPrefillWithPagedKVCacheWrapper": Wrapper},
}


@pytest.mark.parametrize("module", STAND_INS)
def test_a_library_is_asked_for_what_the_reference_computes(
    module: str,
    reference: Kernels,
    paged: type[Paged],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if device.type != "cpu":
        pytest.skip("stand-ins are for the CPU")
    from quire.kernels.triton import load

    library = ModuleType(module)
    library.__dict__.update(STAND_INS[module])
    monkeypatch.setitem(sys.modules, module, library)
    kernels = load("cpu", is_invariant=False, attention_module=module)
    case = paged.random(((1, 40), (3, 16), (5, 21)), 2, 64, torch.bfloat16)
    query = torch.randn(9, 8, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)[
        :, 2:6
    ]
    keys, values, batch = case.pages(16)
    keys, values = keys.nan_to_num(0.0), values.nan_to_num(0.0)
    num_plans = Wrapper.num_plans
    attend: Callable[..., Tensor] = kernels.paged_attention
    cases: list[dict[str, Any]] = [{}, {"window": 5, "soft_cap": 3.0}, {}]
    for options in cases:
        want = reference.paged_attention(query, keys, values, batch, scale=0.2, **options)
        assert torch.equal(attend(query, keys, values, batch, scale=0.2, **options), want)
    # one a kind of layer
    assert Wrapper.num_plans - num_plans == (2 if module == "flashinfer" else 0)
