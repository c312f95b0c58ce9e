"""What is kept of the KV cache besides the pool: room in host memory and on disk, as an engine
plans it."""

from __future__ import annotations

from typing import NamedTuple

from quire.common.kv_formats import KV_FORMATS, ByteForm
from quire.common.numbers import format_bytes, parse_bytes
from quire.config.engine import EngineConfig
from quire.errors import ConfigError, NotAvailableError
from quire.models.declaration import DecoderSpec

DEFAULT_DISK_BYTES = 10 << 30
_GIB = 1 << 30


class TierPlan(NamedTuple):
    """Where blocks are kept that the pool has no room for."""

    folder: str | None
    """None where nothing is kept on disk."""
    disk_bytes: int
    host_bytes: int
    """0 where nothing is kept in host memory."""
    host_form: ByteForm | None
    """What is kept there in place of the pool's own elements."""
    payload_bytes: int
    """Of the blocks of all groups of layers at one place."""
    num_bytes: int
    """Of the memory that the pool is in."""
    reason: str

    @property
    def sizes(self) -> str:
        """For people."""
        form = "" if self.host_form is None else f" as {self.host_form}"
        kept = ((self.disk_bytes, "on disk"), (self.host_bytes, f"in host memory{form}"))
        return ", ".join(f"{format_bytes(size)} {where}" for size, where in kept if size)


def plan_tiers(
    config: EngineConfig, spec: DecoderSpec, kv_format: str, payload_bytes: int, is_host: bool
) -> TierPlan | None:
    """Decide; None where nothing is kept. `is_host` says whether the pool is in host memory itself.
    Raises ConfigError or NotAvailableError for what cannot work."""
    host_bytes = int((config.kv_offloading_size or 0) * _GIB)
    host_form = _host_form(config, kv_format, host_bytes)
    if config.kv_cache_dir is None and not host_bytes:
        if config.kv_disk_size is not None:
            raise ConfigError(
                f"kv_disk_size={config.kv_disk_size!r} has no effect without a folder; give "
                "kv_cache_dir, too, or leave it out"
            )
        return None
    given = "kv_offloading_size" if config.kv_cache_dir is None else "kv_cache_dir"
    if not config.enable_prefix_caching or spec.is_encoder:
        why = "the model keeps nothing of a text" if spec.is_encoder else "it is off"
        raise ConfigError(f"{given} extends the prefix cache, and {why}; leave it out")
    if config.speculation is not None and config.speculation.head is not None:
        raise NotAvailableError(
            f"{given} is not available beside a draft head yet, which would lack the model's "
            "states of what is restored; take a draft model, or the method 'suffix' or 'ngram', or "
            "leave it out"
        )
    disk_bytes = 0
    if config.kv_cache_dir is not None:
        size = DEFAULT_DISK_BYTES if config.kv_disk_size is None else config.kv_disk_size
        disk_bytes = parse_bytes(size, option="kv_disk_size")
    for name, num_bytes in (("kv_disk_size", disk_bytes), ("kv_offloading_size", host_bytes)):
        if 0 < num_bytes < 2 * payload_bytes:
            raise ConfigError(
                f"{name}: {format_bytes(num_bytes)} hold less than two blocks of "
                f"{format_bytes(payload_bytes)}; give more"
            )
    num_tokens = (disk_bytes or host_bytes) // payload_bytes
    reason = f"at most {num_tokens:,} blocks of {format_bytes(payload_bytes)}"
    num_bytes = host_bytes if is_host else 0
    return TierPlan(
        config.kv_cache_dir, disk_bytes, host_bytes, host_form, payload_bytes, num_bytes, reason
    )


def _host_form(config: EngineConfig, kv_format: str, host_bytes: int) -> ByteForm | None:
    """Raises ConfigError."""
    given = config.kv_offloading_dtype
    if given == "auto":
        return None
    if not host_bytes:
        raise ConfigError(
            f"kv_offloading_dtype={given!r} has no effect without host memory to keep blocks in; "
            "give kv_offloading_size, too, or leave it out"
        )
    if KV_FORMATS[kv_format].element_bytes == 1:
        raise ConfigError(
            f"kv_offloading_dtype={given!r} would gain nothing: the KV cache itself stores "
            f"{kv_format}, a byte an element; leave it out"
        )
    return "int8" if given == "int8" else "fp8"
