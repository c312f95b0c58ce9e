"""What a model is: its declaration, and whether it generates text, pools, or does both.

Imports no torch. How a model pools is the matter of `quire.engine.pooling.decision`, which is asked
where its architecture can do nothing else, where its folder says so (the layout of
sentence-transformers), or where the user wants it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from quire.common.frozen_record import replace
from quire.config.engine import EngineConfig
from quire.engine.assembly.model_files import ModelFiles
from quire.errors import ConfigError
from quire.models.declaration import DecoderSpec
from quire.models.registry import COLBERT, POOLING_ARCHITECTURES, declare
from quire.weights.folder import has_modules

if TYPE_CHECKING:
    from quire.models.pooling import PoolingSpec

_OWN_KEYS = (
    "classifier_from_token",
    "is_original_qwen3_reranker",
    "is_matryoshka",
    "matryoshka_dimensions",
    "method",
    "sentence_transformers",
    "sbert_ce_default_activation_function",
)
"""Keys of a config that say how to pool: no family reads them."""


class DeclaredModel(NamedTuple):
    """A model's declaration, and how it pools if it does."""

    spec: DecoderSpec
    pooling: PoolingSpec | None
    generates: bool
    """Whether it makes text."""


def declare_stored(files: ModelFiles) -> tuple[DecoderSpec, dict[str, Any]]:
    """Declare all that a folder holds; with the keys of its config that say how to pool."""
    values = {key: value for key, value in files.config.items() if key != "quantization_config"}
    own = {key: values.pop(key) for key in _OWN_KEYS if key in values}
    if own.get("classifier_from_token"):
        values["architectures"] = [
            str(name).replace("ForSequenceClassification", "ForCausalLM")
            for name in _listed(values.get("architectures"))
        ]
    return declare(values), own


def declare_model(config: EngineConfig, files: ModelFiles) -> DeclaredModel:
    """Declare a model and decide how it pools. Raises a QuireError."""
    spec, own = declare_stored(files)
    can_generate = spec.architecture not in POOLING_ARCHITECTURES
    if config.runner == "generate" and not can_generate:
        raise ConfigError(
            f"runner='generate', but {spec.architecture} makes vectors and no text; leave it out"
        )
    stored = None
    if has_modules(files.folder) or spec.architecture == COLBERT:
        from quire.engine.pooling.decision import read_stored

        stored = read_stored(files.folder, spec)
    asked = config.runner == "pooling" or config.convert not in ("auto", "none")
    implied = config.runner == "auto" and (not can_generate or stored is not None)
    if not asked and not (implied and config.convert != "none"):
        if config.pooler_config is not None:
            raise ConfigError(
                f"pooler_config={config.pooler_config} has no effect: {spec.architecture} is "
                "loaded to generate text; give runner='pooling', or convert='embed' for vectors "
                "beside its answers, or leave it out"
            )
        return DeclaredModel(spec, None, can_generate)
    from quire.engine.pooling.decision import pooling_of

    # `convert` alone asks for both
    generates = can_generate and (
        config.runner == "generate" or (asked and config.runner != "pooling")
    )
    pooling = pooling_of(config, files, spec, stored, own)
    if not generates and not pooling.token_ids:
        spec = replace(spec, head=None)
    return DeclaredModel(spec, pooling, generates)


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []
