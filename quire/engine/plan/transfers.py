"""What transfers of keys and values take of an engine, and what they cannot be combined with."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from quire.common.numbers import format_bytes
from quire.config.engine import EngineConfig
from quire.errors import ConfigError, NotAvailableError
from quire.models.declaration import DecoderSpec

if TYPE_CHECKING:
    from quire.config.transfer import KVTransferConfig


class TransferPlan(NamedTuple):
    """One engine's part in transfers."""

    config: KVTransferConfig
    num_bytes: int
    """Of the memory that the pool is in, at most."""
    reason: str


def plan_transfers(config: EngineConfig, spec: DecoderSpec, is_host: bool) -> TransferPlan | None:
    """Decide; None where nothing is transferred. `is_host` says whether the pool is in host memory
    itself. Raises ConfigError or NotAvailableError for what cannot work."""
    found = config.kv_transfer
    if found is None:
        return None
    from quire.config.transfer import NAME

    if not config.enable_prefix_caching or spec.is_encoder:
        why = "the model keeps nothing of a text" if spec.is_encoder else "it is off"
        raise ConfigError(f"{NAME} fills the prefix cache, and {why}; leave it out")
    if not config.batch_invariant:
        raise ConfigError(
            f"{NAME} needs batch_invariant: without it, two engines compute other bits of the same "
            "prompt; leave one of them out"
        )
    if config.speculation is not None and config.speculation.head is not None:
        raise NotAvailableError(
            f"{NAME} is not available beside a draft head yet, which would lack the model's states "
            "of what comes; take a draft model, or the method 'suffix' or 'ngram', or leave it out"
        )
    buffer = int(found.kv_buffer_size) if found.gives else 0
    host, port = found.address
    where = f"{host}:{port}" if port else host
    kept = f"at most {format_bytes(buffer)} are kept for others, at {where}"
    reason = kept if found.gives else "prompts are fetched from where requests say"
    return TransferPlan(found, buffer if is_host else 0, reason)
