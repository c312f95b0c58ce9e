"""Options that a model has no use for: those of text where it makes none, those of what is kept of
a text where it keeps nothing.
"""

from __future__ import annotations

from quire.config.engine import EngineConfig
from quire.engine.plan.ranks import check_ranks
from quire.errors import ConfigError
from quire.models.declaration import DecoderSpec


def check_options(config: EngineConfig, spec: DecoderSpec, *, generates: bool) -> None:
    """Raises ConfigError for an option that would have no effect, and for a context that the model
    was not made for."""
    check_ranks(config, spec)
    _check_context(config, spec)
    if config.speculation is not None and not generates:
        raise ConfigError(
            "speculative_config drafts tokens of text, and this model makes none; leave it out"
        )
    if not spec.is_encoder:
        return
    cache = None if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    given = {
        "kv_cache_dtype": cache,
        "target_step_ms": config.target_step_ms or None,  # 0 sets no limit
        "block_size": config.block_size,
    }
    for name, value in given.items():
        if value is not None:
            raise ConfigError(
                f"{name}={value!r} has no effect: {spec.architecture} reads each text at once and "
                "keeps nothing of it; leave it out"
            )


def _check_context(config: EngineConfig, spec: DecoderSpec) -> None:
    """Refuse a context that the model was not made for, unless `allow_long_context` is set."""
    wanted, longest = config.max_model_len, spec.max_context_len
    if wanted is not None and wanted > longest and not config.allow_long_context:
        raise ConfigError(
            f"max_model_len={wanted} is beyond the {longest} tokens that the model was "
            "made for, where its answers may "
            f"make no sense; lower it to {longest}, or set allow_long_context=True "
            "(--allow-long-context)"
        )
