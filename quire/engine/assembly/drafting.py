"""A model or a head that drafts beside the model that is served: found, judged and loaded as that
one is."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.common.frozen_record import replace
from quire.config.engine import EngineConfig
from quire.engine.assembly.declaring import declare_stored
from quire.engine.assembly.model_files import ModelFiles, find_model, weight_formats
from quire.engine.assembly.planned_model import DraftFiles, PlannedModel
from quire.engine.plan.engine_plan import EnginePlan
from quire.engine.plan.speculation import MAX_READ, DraftDeclaration
from quire.errors import ConfigError, NotAvailableError, QuireError
from quire.models.declaration import DecoderSpec
from quire.models.draft_heads import declare_head
from quire.quant.formats import FormSupport
from quire.text.files import read_tokenizer_json
from quire.weights.folder import resolve_model

if TYPE_CHECKING:
    from quire.config.speculation import SpeculationConfig
    from quire.nn.decoder import DecoderModel
    from quire.sampling import Sampler
    from quire.spec.companion import ModelDrafts
    from quire.spec.vocabulary import TokenMap
    from quire.worker.rows import RowTable

_QUANTIZATION = "quantization_config"


def find_draft(
    config: EngineConfig, wish: SpeculationConfig, files: ModelFiles, target: DecoderSpec
) -> tuple[DraftFiles, DraftDeclaration]:
    """Find the model or the head that is to draft for a target with these files, and read its
    config. Raises a QuireError."""
    try:
        if wish.head == "mtp":
            return _declared(config, files, target)
        own = EngineConfig(
            model=str(wish.model),
            revision=wish.revision,
            quantization=wish.quantization,
            download_dir=config.download_dir,
            load_format="dummy" if config.load_format == "dummy" else "auto",
            seed=config.seed,
            kernels=config.kernels,
            speculative_config=None if wish.head is None else config.speculative_config,
        )
        return _declared(own, find_model(own), target)
    except QuireError as error:
        raise type(error)(f"speculative_config: the draft model: {error}") from error


def _declared(
    own: EngineConfig, files: ModelFiles, target: DecoderSpec
) -> tuple[DraftFiles, DraftDeclaration]:
    kind, head = None if own.speculation is None else own.speculation.head, None
    if kind is None:
        spec, _ = declare_stored(files)
    elif files.gguf is not None:
        raise NotAvailableError(f"method {kind!r} is not available for GGUF files; use safetensors")
    else:
        values = {name: each for name, each in files.config.items() if name != _QUANTIZATION}
        head = declare_head(kind, values, target)
        spec = head.decoder
    storage = files.storage(spec, own, FormSupport())
    declaration = DraftDeclaration(spec, weight_formats(storage, spec, own), head)
    return DraftFiles(own, files, storage), declaration


def keep_states(plan: EnginePlan, model: DecoderModel) -> DecoderModel:
    """Have a target keep hidden states, where a head drafts for it."""
    if plan.draft is None or plan.draft.head is None:
        return model
    from quire.spec.states import KeptStates

    limits = plan.limits
    width = model.spec.hidden_size
    return replace(
        model, keeper=KeptStates(limits.num_blocks, limits.block_size, width, model.dtype)
    )


def load_drafts(
    planned: PlannedModel, model: DecoderModel, sampler: Sampler, rows: RowTable
) -> ModelDrafts | None:
    """Load what drafts for a target and put around it what orders come to; None where no model
    does."""
    from quire.engine.assembly.heads import load_head
    from quire.engine.assembly.loading import load_model
    from quire.spec.companion import ModelDrafts
    from quire.spec.depth import DraftDepth
    from quire.spec.model import DraftModel
    from quire.spec.places import DraftPlaces
    from quire.spec.states import ShiftedRows
    from quire.worker.memory import KVMemory, PoolShape
    from quire.worker.staging import Staging

    plan, draft, found = planned.plan, planned.plan.draft, planned.draft
    if draft is None or found is None:
        return None
    kernels = model.kernels
    limits = replace(plan.limits, max_model_len=min(draft.max_len, plan.limits.max_model_len))
    own_plan = replace(
        plan, config=found.config, spec=draft.spec, formats=draft.formats, limits=limits,
        pooling=None, images=None, adapters=None, experts=None, draft=None,
    )  # fmt: skip
    own = PlannedModel(own_plan, found.files, found.storage)
    head = None
    if draft.head is None:
        tokens = _token_map(planned, found, draft.spec)
        decoder = load_model(own, kernels, None).decoder
    else:
        decoder, tokens, head = load_head(own, draft.head, model, planned)
    num_blocks = limits.num_blocks + limits.max_num_seqs * draft.blocks_per_row
    shape = PoolShape(num_blocks, limits.block_size, plan.kv_format)
    memory = KVMemory(draft.spec.kv_layers, shape, kernels.device)
    stage = Staging(kernels.device)
    places = DraftPlaces(
        rows if head is None else ShiftedRows(rows), limits.num_blocks, draft.blocks_per_row,
        partial(memory.copy_blocks, kernels=kernels, stage=stage),
    )  # fmt: skip
    drafting = DraftModel(
        decoder, memory.caches, tokens, sampler, stage, limits.max_model_len, MAX_READ, head
    )
    drafts = ModelDrafts(drafting, rows, places, DraftDepth())
    is_local = head is None or decoder.program.head.weight is not None
    if is_local or model.divided_head is None:  # else the other ranks are not there yet
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
