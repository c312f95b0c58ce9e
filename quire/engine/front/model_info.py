"""What is known of a model before its weights are loaded."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.engine.assembly.fingerprint import fingerprint
from quire.engine.assembly.preparation import PreparedModel


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the model before its weights are loaded."""

    name: str
    """As given on the command line."""
    folder: str
    """Where its files lie; never to be shown to a client."""
    max_model_len: int
    vocab_size: int
    max_logprobs: int
    """Most alternatives a request may want; -1 allows the whole vocabulary."""
    eos_token_ids: tuple[int, ...]
    generation_config: dict[str, Any]
    """For `SamplingParams.from_generation_config`."""
    num_kv_slots: int
    """Tokens that the KV cache holds."""
    kv: dict[str, str] = {}
    """What describes the KV cache: `block_size`, `num_gpu_blocks` (all blocks, wherever they are),
    `cache_dtype`, ..."""
    generates: bool = True
    """Whether it makes text; else vectors or classes alone."""
    max_loras: int = 0
    """Adapters that running requests may use at once."""
    platform: str | None = None
    """Of another package, whose kernels compute."""
    policy: str = "fcfs"
    """The order of service, as the operator named it."""
    fingerprint: str
    """Changes whenever answers to the same request and seed may change;
    for `system_fingerprint`."""


def model_info(prepared: PreparedModel) -> ModelInfo:
    """Return what a server may know of a model that is not loaded yet."""
    plan = prepared.planned.plan
    return ModelInfo(
        name=plan.config.model,
        platform=plan.config.platform,
        folder=str(prepared.planned.folder),
        max_model_len=plan.limits.max_model_len,
        vocab_size=plan.spec.vocab_size,
        max_logprobs=plan.config.max_logprobs,
        eos_token_ids=tuple(sorted(prepared.eos_token_ids)),
        generation_config=dict(prepared.generation_config),
        num_kv_slots=plan.limits.num_slots,
        kv={
            "block_size": str(plan.limits.block_size),
            "num_gpu_blocks": str(plan.limits.num_blocks),
            "cache_dtype": plan.config.kv_cache_dtype,
            "enable_prefix_caching": str(plan.limits.enable_prefix_caching),
        },
        generates=plan.generates,
        max_loras=0 if plan.adapters is None else plan.adapters.max_active,
        policy=plan.limits.policy,
        fingerprint=fingerprint(plan, prepared.planned.files),
    )
