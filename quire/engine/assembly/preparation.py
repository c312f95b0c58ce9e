"""Finds a model, understands it and plans it: all that requests are checked against, before torch
is imported or anything is allocated.

A wrong name, an unsupported model or too little memory is reported here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.common.capabilities import FP8_CAPABILITY
from quire.common.file_states import States, check_unchanged
from quire.common.frozen_record import replace
from quire.config.engine import EngineConfig
from quire.engine.assembly import loading
from quire.engine.assembly.declaring import declare_model
from quire.engine.assembly.model_files import ModelFiles, find_model, weight_formats
from quire.engine.assembly.planned_model import PlannedModel
from quire.engine.plan.gpu import require_gpu
from quire.engine.plan.machine import Machine
from quire.engine.plan.planning import HALF, resolve
from quire.errors import CheckpointError, ConfigError, RequestError
from quire.quant.formats import GPU_MXFP4_SCALE_BYTES, FormSupport
from quire.text.tokenizer import Tokenizer
from quire.weights.folder import read_generation_config, resolve_model
from quire.weights.packed_cache import check_folder

if TYPE_CHECKING:
    from quire.engine.plan.engine_plan import EnginePlan
    from quire.grammar.backend import Vocabulary

logger = logging.getLogger(__name__)


class PreparedModel(NamedTuple):
    """A planned model and its small files: enough to check requests against it."""

    planned: PlannedModel
    tokenizer: Tokenizer | None
    generation_config: Mapping[str, Any]
    eos_token_ids: frozenset[int]


def plan_engine(config: EngineConfig, machine: Machine | None = None) -> PlannedModel:
    """Find the model, read its config, and decide. Imports no torch."""
    machine = machine or machine_for(config)
    files = find_model(config)
    spec, pooling, generates = declare_model(config, files)
    storage = files.storage(spec, config, _form_support(machine))
    formats = weight_formats(storage, spec, config)
    draft_files = draft = None
    if (wish := config.speculation) is not None and wish.is_modelled:
        from quire.engine.assembly.drafting import find_draft

        draft_files, draft = find_draft(config, wish, files, spec)
        if draft.head is not None:
            spec = replace(spec, kept=draft.head.kept)
    processing = files.image_processing(spec, config)
    plan = resolve(
        config, spec, machine, formats, pooling, generates=generates, processing=processing,
        draft=draft,
    )  # fmt: skip
    for decision in plan.decisions:
        if (
            decision.name == "dtype"
            and HALF in (config.dtype, spec.dtype)
            and plan.dtype not in (config.dtype, "float32")
        ):
            logger.warning("computing in %s: %s", decision.value, decision.reason)
    return PlannedModel(plan, files, storage, draft=draft_files)


def _form_support(machine: Machine) -> FormSupport:
    if machine.gpu is None:
        return FormSupport()
    return FormSupport(machine.gpu.capability >= FP8_CAPABILITY, GPU_MXFP4_SCALE_BYTES)


def machine_for(config: EngineConfig) -> Machine:
    """Return this machine, with its GPU where the config wants to compute on one;
    ConfigError says why it cannot."""
    machine = Machine.inspect()
    return replace(machine, gpu=require_gpu()) if config.device == "cuda" else machine


def prepare_model(config: EngineConfig, *, is_for_here: bool = True) -> PreparedModel:
    """Return everything that is needed to judge requests, before anything heavy is imported or
    allocated.

    Not `is_for_here`: the model itself will run in another process, so none of its weights is read
    in this one.
    """
    planned = plan_engine(config)
    if config.weights_cache is not None:
        check_folder(Path(config.weights_cache).expanduser())
    if not is_for_here:
        digest_key(planned.plan)  # a folder that cannot be used is refused before the model loads
        loading.check_files(planned)
    if not config.skip_tokenizer_init:
        import tokenizers  # noqa: F401  # before torch's libraries load in the background: only one can load at a time
    return _describe(begin_loading(planned) if is_for_here else planned)


def _describe(planned: PlannedModel) -> PreparedModel:
    """Read the small files of a planned model."""
    tokenizer = _tokenizer(planned.plan.config, planned.files)
    own = {} if planned.files.gguf is not None else read_generation_config(planned.folder)
    vocab_size = planned.plan.spec.vocab_size
    eos_token_ids = find_eos_token_ids(own, planned.model_config, tokenizer, vocab_size=vocab_size)
    return PreparedModel(
        planned, tokenizer, _generation_config(planned.plan.config, own), eos_token_ids
    )


def _generation_config(config: EngineConfig, own: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the file that sampling defaults come from, as the user chose it; `own` is the
    model's."""
    chosen = own
    if config.generation_config == "vllm":
        chosen = {}
    elif config.generation_config != "auto":
        folder = Path(config.generation_config).expanduser()
        if not (folder / "generation_config.json").is_file():
            raise ConfigError(
                f"generation_config={config.generation_config!r} is no folder with a "
                "generation_config.json; "
                "give one, or 'auto' or 'vllm'"
            )
        chosen = read_generation_config(folder)
    return {**chosen, **(config.override_generation_config or {})}


def digest_key(plan: EnginePlan) -> bytes:
    """Return the key of the digests of blocks: that of the folder in which they are kept, where
    there is one. Raises ConfigError for a folder that cannot be used."""
    if plan.tiers is None or plan.tiers.folder is None:
        return os.urandom(16)
    from quire.engine.assembly.tiers import key_of_folder

    return key_of_folder(plan.tiers.folder)


def begin_loading(planned: PlannedModel) -> PlannedModel:
    """Start to read the weights in the background, for `build_executor` to go on with. Ranks read
    their own when they have started."""
    if planned.plan.config.num_processes > 1:
        return planned
    return planned._replace(
        head_start=loading.head_start(planned), packed_cache=loading.packed_cache(planned)
    )


def _tokenizer(config: EngineConfig, files: ModelFiles) -> Tokenizer | None:
    if config.skip_tokenizer_init:
        return None
    source = files.folder
    if config.tokenizer is not None:
        source = resolve_model(
            config.tokenizer, revision=config.tokenizer_revision, download_dir=config.download_dir
        )
    if (
        files.gguf is not None
        and config.tokenizer is None
        and not (source / "tokenizer.json").is_file()
    ):
        from quire.text.gguf import convert_tokenizer

        return Tokenizer(*convert_tokenizer(files.gguf.file.metadata))
    if (
        config.load_format == "dummy"
        and config.tokenizer is None
        and not (source / "tokenizer.json").is_file()
    ):
        logger.warning("no tokenizer.json beside the config: prompts must be token ids")
        return None
    return Tokenizer.from_folder(source)


def read_vocabulary(planned: PlannedModel, states: States) -> Vocabulary:
    """Return the model's tokens as a compiler of grammars needs them. The tokenizer is read anew:
    an engine's process has none."""
    from quire.grammar.backend import Vocabulary

    try:
        check_unchanged(states)
    except CheckpointError as error:
        raise RequestError(f"no output can be given a form: {error}") from None
    prepared = _describe(planned)
    tokenizer, eos_token_ids = prepared.tokenizer, prepared.eos_token_ids
    if tokenizer is None or not eos_token_ids:
        raise RequestError(
            "this engine has no tokenizer or no end-of-sequence token: no output can be "
            "given a form"
        )
    num_tokens = min(planned.plan.spec.vocab_size, tokenizer.vocab_size)
    return Vocabulary(
        tokens=[tokenizer.token_bytes(token_id) for token_id in range(num_tokens)],
        special_token_ids=frozenset(
            each for each in tokenizer.special_token_ids if each < num_tokens
        ),
        eos_token_ids=tuple(sorted(each for each in eos_token_ids if each < num_tokens)),
    )


def find_eos_token_ids(
    generation_config: Mapping[str, Any],
    model_config: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    *,
    vocab_size: int,
) -> frozenset[int]:
    """Return what ends a sequence: as `generation_config.json` says, else `config.json`, else the
    tokenizer.

    Some files name tokens that the model does not have, or -1 for none: nothing can end with those.
    """
    fallback = None if tokenizer is None else tokenizer.eos_token_id
    for value in (
        generation_config.get("eos_token_id"),
        model_config.get("eos_token_id"),
        fallback,
    ):
        if isinstance(value, int):
            value = [value]
        if isinstance(value, list) and value and all(isinstance(item, int) for item in value):
            return frozenset(item for item in value if 0 <= item < vocab_size)
    return frozenset()
