"""A model that drafts beside the one that is served: found, judged and loaded as that one is."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.config.engine import EngineConfig
from quire.engine.assembly.model_files import find_model
from quire.engine.assembly.planned_model import DraftFiles, PlannedModel
from quire.engine.plan.speculation import MAX_READ, DraftDeclaration
from quire.engine.pooling.decision import declare_stored
from quire.errors import ConfigError, QuireError
from quire.models.declaration import DecoderSpec
from quire.quant.formats import WeightFormats, formats_at_load
from quire.quant.gguf_formats import GgufStorage
from quire.quant.storage import CheckpointStorage, FormSupport
from quire.text.files import read_tokenizer_json
from quire.weights.folder import resolve_model

if TYPE_CHECKING:
    from quire.kernels.interface import Kernels
    from quire.sampling import Sampler
    from quire.spec.companion import ModelDrafts
    from quire.spec.vocabulary import TokenMap
    from quire.worker.rows import RowTable

Storage = CheckpointStorage | GgufStorage | None


def weight_formats(storage: Storage, spec: DecoderSpec, config: EngineConfig) -> WeightFormats:
    """Say which weights are integers: as they are stored, or as the config has them quantized."""
    if storage is not None:
        return storage.formats
    if config.quantize_to is None:
        return WeightFormats()
    return formats_at_load(spec, config.quantize_to)


def find_draft(config: EngineConfig) -> tuple[DraftFiles, DraftDeclaration] | None:
    """Find the draft model and read its config; None where no model drafts. Raises a QuireError."""
    wish = config.speculation
    if wish is None or wish.draft_model is None:
        return None
    try:
        own = EngineConfig(
            model=wish.draft_model,
            revision=wish.revision,
            quantization=wish.quantization,
            download_dir=config.download_dir,
            load_format="dummy" if config.load_format == "dummy" else "auto",
            seed=config.seed,
            kernels=config.kernels,
        )
        files = find_model(own)
        spec, _ = declare_stored(files)
        storage = files.storage(spec, own, FormSupport())
    except QuireError as error:
        raise type(error)(f"speculative_config: the draft model: {error}") from error
    declaration = DraftDeclaration(spec, weight_formats(storage, spec, own))
    return DraftFiles(own, files, storage), declaration


def load_drafts(
    planned: PlannedModel, kernels: Kernels, sampler: Sampler, rows: RowTable
) -> ModelDrafts | None:
    """Load the draft model and put around it what drafts; None where no model does."""
    from quire.engine.assembly.loading import load_model
    from quire.spec.companion import DraftModel, ModelDrafts
    from quire.spec.depth import DraftDepth
    from quire.spec.places import DraftPlaces
    from quire.worker.memory import KVMemory, PoolShape
    from quire.worker.staging import Staging

    plan, draft, found = planned.plan, planned.plan.draft, planned.draft
    if draft is None or found is None:
        return None
    tokens = _token_map(planned, found, draft.spec)
    limits = replace(plan.limits, max_model_len=min(draft.max_len, plan.limits.max_model_len))
    own_plan = replace(
        plan, config=found.config, spec=draft.spec, formats=draft.formats, limits=limits,
        pooling=None, images=None, adapters=None, experts=None, draft=None,
    )  # fmt: skip
    own = PlannedModel(own_plan, found.files, found.storage)
    decoder = load_model(own, kernels, None).decoder
    num_blocks = limits.num_blocks + limits.max_num_seqs * draft.blocks_per_row
    shape = PoolShape(num_blocks, limits.block_size, plan.kv_format)
    memory = KVMemory(draft.spec.kv_layers, shape, kernels.device)
    stage = Staging(kernels.device)
    places = DraftPlaces(
        rows, limits.num_blocks, draft.blocks_per_row,
        partial(memory.copy_blocks, kernels=kernels, stage=stage),
    )  # fmt: skip
    model = DraftModel(
        decoder, memory.caches, tokens, sampler, stage, limits.max_model_len, max_read=MAX_READ
    )
    drafts = ModelDrafts(model, rows, places, DraftDepth())
    drafts.warm_up()
    return drafts


def _token_map(planned: PlannedModel, found: DraftFiles, spec: DecoderSpec) -> TokenMap:
    """Map the models' tokens by their texts, where both have a tokenizer; else ids are the same.
    Raises ConfigError where the tokenizers have little in common."""
    from quire.spec.vocabulary import LEAST_COMMON, TokenMap, common_tokens, map_tokens

    config, target = planned.plan.config, planned.plan.spec
    folder = planned.folder
    if config.tokenizer is not None:
        folder = resolve_model(
            config.tokenizer, revision=config.tokenizer_revision, download_dir=config.download_dir
        )
    ours, theirs = _token_texts(folder), _token_texts(found.files.folder)
    if ours is None or theirs is None or ours == theirs:
        return TokenMap(target.vocab_size, spec.vocab_size)
    share = common_tokens(ours, theirs)
    if share < LEAST_COMMON:
        raise ConfigError(
            f"speculative_config: model={found.config.model!r} has another tokenizer: it shares "
            f"{share:.0%} of the tokens of the smaller of the two vocabularies, {LEAST_COMMON:.0%} "
            "are needed; choose a draft model of the same family"
        )
    return map_tokens(ours, theirs, target.vocab_size, spec.vocab_size)


def _token_texts(folder: Path) -> dict[str, int] | None:
    """The vocabulary of a folder's tokenizer, texts to ids; None where there is none to be read."""
    if not (folder / "tokenizer.json").is_file():
        return None
    content: Any = json.loads(read_tokenizer_json(folder))
    vocabulary = content.get("model", {}).get("vocab")
    if isinstance(vocabulary, list):  # of unigrams: texts and scores
        vocabulary = {entry[0]: number for number, entry in enumerate(vocabulary)}
    if not isinstance(vocabulary, dict):
        return None
    added = {each["content"]: each["id"] for each in content.get("added_tokens") or ()}
    return {**vocabulary, **added}
