"""Room for adapters, as an engine plans it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from quire.common.numbers import format_bytes
from quire.config.engine import EngineConfig
from quire.errors import ConfigError
from quire.models.declaration import DecoderSpec

if TYPE_CHECKING:
    from quire.lora.layout import AdapterLimits
    from quire.models.pooling import PoolingSpec


class AdapterPlan(NamedTuple):
    """Room for adapters."""

    max_active: int
    """Used at once by running sequences."""
    max_loaded: int
    limits: AdapterLimits
    num_bytes: int
    """Of all that are loaded, if each changes all that it may at the highest rank."""
    reason: str


_MAX_ACTIVE = 8
"""Adapters in use at once, unless the user says how many."""


def plan_adapters(
    config: EngineConfig, spec: DecoderSpec, dtype: str, pooling: PoolingSpec | None = None
) -> AdapterPlan | None:
    """Decide; None where none are served. Raises ConfigError for numbers that cannot work."""
    if not config.enable_lora:
        return None
    from quire.lora.config import MAX_RANK
    from quire.lora.layout import AdapterLimits, adapter_bytes, expert_weights

    if config.max_lora_rank > MAX_RANK:
        raise ConfigError(
            f"max_lora_rank={config.max_lora_rank} is too high: at most {MAX_RANK} are supported"
        )
    max_active = config.max_loras or min(_MAX_ACTIVE, config.max_cpu_loras or _MAX_ACTIVE)
    max_loaded = config.max_cpu_loras or max_active
    if max_loaded < max_active:
        raise ConfigError(
            f"max_cpu_loras={max_loaded} is below max_loras={max_active}, which are in "
            "memory while they are used; raise the first or lower the second"
        )
    has_head = pooling is None or not pooling.token_ids
    limits = AdapterLimits(config.max_lora_rank, config.lora_experts, has_head)
    if limits.has_experts and not expert_weights(spec):
        raise ConfigError(
            f"lora_experts=True is for models with experts, and {spec.architecture} has none; "
            "leave it out"
        )
    bytes_each = adapter_bytes(spec, limits.max_rank, dtype, has_experts=limits.has_experts)
    reason = f"{max_loaded} of rank {limits.max_rank}, {format_bytes(bytes_each)} each"
    return AdapterPlan(max_active, max_loaded, limits, max_loaded * bytes_each, reason)
