"""What a plan says of speculation, and the room that a draft model takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from quire.common.numbers import ceil_div, format_bytes
from quire.config.engine import EngineConfig
from quire.config.limits import SchedulerLimits
from quire.engine.plan.memory import workspace_bytes
from quire.errors import ConfigError, NotAvailableError
from quire.models.declaration import DecoderSpec
from quire.models.kv_layout import KVLayout
from quire.models.tensors import DTYPE_BYTES
from quire.quant.formats import WeightFormats

if TYPE_CHECKING:
    from quire.models.draft_heads import HeadSpec

MAX_READ = 512
"""Tokens of all rows that a draft model computes after one step to catch up with the target: what a
prompt has more is left to the steps that follow, so that none of them waits long."""


class DraftDeclaration(NamedTuple):
    """A draft model, as its files declare it."""

    spec: DecoderSpec
    formats: WeightFormats
    head: HeadSpec | None = None
    """Where it reads the target's hidden states; `spec` is its decoder."""


class DraftPlan(NamedTuple):
    """A draft model beside the target."""

    spec: DecoderSpec
    formats: WeightFormats
    max_len: int
    """Of sequences that it drafts."""
    blocks_per_row: int
    """Blocks of its caches beside the pool's, for tokens that are not known yet."""
    block_bytes: int
    """What each block of the pool takes more for its keys and values."""
    num_bytes: int
    """Of all that does not grow with the pool: weights, the rows' own blocks, temporary tensors."""
    reason: str
    head: HeadSpec | None
    """As declared."""


def decisions(engine: EngineConfig) -> Iterator[tuple[str, str, str]]:
    """Name, value and reason of what is decided. Raises ConfigError for what a GPU cannot do."""
    config = engine.speculation
    if config is None:
        return
    if config.is_modelled and engine.device == "cuda":
        raise ConfigError(
            f"speculative_config: method {config.method!r} is for the CPU as yet; take "
            "device='cpu', or method 'suffix' or 'ngram'"
        )
    modelled = ""
    if config.head == "mtp":
        modelled = "the model's own layer for further tokens"
    elif config.is_modelled:
        modelled = f"a {'head' if config.head else 'model'}, {config.model}"
    source = "the request's own text"
    if not config.is_lookup_free and config.suffix_decoding_max_cached_requests:
        source += " and recent outputs of its tenant"
    if config.is_modelled:
        source = modelled if config.is_lookup_free else f"{source}, and {modelled}"
    yield (
        "speculation",
        f"{config.method}, {config.max_tokens}",
        f"given; at most so many draft tokens of a sequence in a step, from {source}",
    )


def plan_draft(
    engine: EngineConfig,
    declaration: DraftDeclaration | None,
    layout: KVLayout,
    limits: SchedulerLimits,
    formats: tuple[str, str],
) -> DraftPlan | None:
    """Decide; None where no model drafts. `formats` are the compute dtype and that of the KV cache.
    Raises ConfigError or NotAvailableError for what cannot work."""
    config = engine.speculation
    if config is None or declaration is None:
        return None
    spec, (dtype, kv_format) = declaration.spec, formats
    head = declaration.head
    if head is None and (spec.is_encoder or spec.head is None or spec.vision is not None):
        raise ConfigError(
            f"speculative_config: model={config.model!r} ({spec.architecture}) cannot draft: that "
            "takes a model of text alone that makes text"
        )
    if layout.windows[0] is not None:
        raise NotAvailableError(
            f"speculative_config: method {config.method!r} is not available for models all of "
            "whose layers have sliding windows; use 'suffix' or 'ngram'"
        )
    size = limits.block_size
    layers = sum(layer.bytes_per_token(kv_format) for layer in spec.kv_layers)
    blocks_per_row = ceil_div(size - 1 + config.max_modelled_tokens, size)
    weight_bytes = declaration.formats.weight_bytes(spec, dtype)
    state_bytes = 0
    if head is not None:
        state_bytes = spec.hidden_size * DTYPE_BYTES[dtype]
        if head.fuse is not None:
            weight_bytes += head.fuse.weight.num_elements * DTYPE_BYTES[dtype]
    own_bytes = limits.max_num_seqs * blocks_per_row * layers * size
    num_bytes = weight_bytes + own_bytes + workspace_bytes(spec, MAX_READ, limits.max_num_seqs)
    states = f" and {format_bytes(state_bytes)} beside it" if head is not None else ""
    reason = (
        f"{format_bytes(weight_bytes)} of weights; {format_bytes(layers)} a token in the KV cache"
        f"{states}, and {format_bytes(own_bytes)} for tokens that are drafted"
    )
    longest = min(config.max_model_len or spec.max_context_len, spec.max_context_len)
    return DraftPlan(
        spec, declaration.formats, longest, blocks_per_row, (layers + state_bytes) * size,
        num_bytes, reason, head,
    )  # fmt: skip
