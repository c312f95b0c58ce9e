"""Whose attention a GPU computes with, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quire.engine.plan.attention import AttentionNeeds, choose, module_for, reasons_against
from quire.errors import ConfigError

NEEDS = AttentionNeeds("bfloat16", "bfloat16", 256, frozenset({128}), (9, 0), is_invariant=False)


def everything(module: str) -> bool:
    return True


def nothing(module: str) -> bool:
    return False


def test_no_library_is_taken_unasked() -> None:
    name, reason = choose("auto", NEEDS, everything)
    assert name == "triton"
    assert (
        "flashinfer: fits, but must be chosen by name" in reason
        and "flash-attention: fits" in reason
    )
    assert choose("triton", NEEDS, nothing)[1].count("not installed") == 2
    assert choose("flashinfer", NEEDS, everything)[0] == "flashinfer"


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("flashinfer", {"is_invariant": True}, "batch_invariant"),
        ("flashinfer", {"dtype": "float32"}, "not for float32"),
        ("flash-attention", {"kv_format": "fp8"}, "a KV cache of fp8"),
        ("flashinfer", {"head_sizes": frozenset({128, 80})}, "no heads of 80"),
        ("flash-attention", {"head_sizes": frozenset({12})}, "no heads of 12"),
        (
            "flash-attention",
            {"block_size": 16, "capability": (8, 0)},
            "multiples of 256 tokens, not of 16",
        ),
    ],
)
def test_reasons_against_libraries(name: str, changes: dict[str, Any], reason: str) -> None:
    needs = replace(NEEDS, **changes)
    [found] = reasons_against(name, needs, everything)
    assert reason in found
    with pytest.raises(ConfigError, match=f"attention_backend='{name}' cannot be used"):
        choose(name, needs, everything)
    assert reason in choose("auto", needs, everything)[1]


def test_version_3_is_for_hopper() -> None:
    assert module_for("flash-attention", NEEDS, everything) == "flash_attn_interface"
    assert (
        module_for("flash-attention", replace(NEEDS, capability=(8, 9)), everything) == "flash_attn"
    )
    assert (
        module_for("flash-attention", NEEDS, lambda module: module == "flash_attn") == "flash_attn"
    )
    assert not reasons_against("flash-attention", replace(NEEDS, block_size=16), everything)
    assert module_for("flashinfer", NEEDS, nothing) is None
