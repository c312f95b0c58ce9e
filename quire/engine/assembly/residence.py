"""Says which memory of an engine can go back to the system while it sleeps, and how its weights are
loaded again, or others in their place."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from quire.common.file_states import States, check_unchanged
from quire.common.frozen_record import replace
from quire.common.pages import CAN_DISCARD
from quire.config.engine import EngineConfig
from quire.engine.assembly.loading import LoadedModel, load_model
from quire.engine.assembly.planned_model import PlannedModel
from quire.engine.assembly.preparation import begin_loading, plan_engine
from quire.errors import ConfigError, NotAvailableError

if TYPE_CHECKING:
    from quire.kernels.interface import Weights
    from quire.lora.table import AdapterTable
    from quire.nn.parts import ModelPart
    from quire.spec.companion import ModelDrafts
    from quire.worker.memory import KVMemory
    from quire.worker.residence import Loaded, Residence, Source


class Held(NamedTuple):
    """What was built of a planned model."""

    model: LoadedModel
    memory: KVMemory
    adapters: AdapterTable | None
    states: States
    """Of the model's files before they were loaded."""
    part: ModelPart | None = None
    """Which part of the model it is; None: all."""


def residence_of(planned: PlannedModel, held: Held, drafts: ModelDrafts | None) -> Residence:
    """Return what gives an engine's memory back, brings it back, and loads other weights."""
    from quire.worker.residence import Beside, Fixed, Loaded, Returnable

    plan = planned.plan
    reason = _refusal(planned)
    if reason is not None:
        return Fixed(reason)
    decoder, images = held.model.decoder, held.model.images
    beside = Beside(
        [
            *([] if images is None else images.tensors),
            *([] if drafts is None else drafts.weights),
        ],
        [] if drafts is None else drafts.caches,
    )
    is_decoder_alone = images is None and held.model.pooler is None
    cache = plan.config.weights_cache
    return Returnable(
        Loaded(
            [*decoder.weights.tensors, *decoder.derived],
            _form(decoder.weights),
            lambda: _load(planned, held, held.states),
        ),
        held.memory,
        None if cache is None else Path(cache).expanduser(),
        plan.num_threads,
        beside=beside,
        load=partial(_load_from, planned=planned, held=held) if is_decoder_alone else None,
        is_populated=plan.is_kv_populated,
    )


def _refusal(planned: PlannedModel) -> str | None:
    plan = planned.plan
    if plan.device != "cpu":
        return "on a GPU it is not available yet; end the engine, and build another one"
    if plan.experts is not None:
        return "with expert_memory it is not available yet: experts leave memory by themselves"
    if not CAN_DISCARD:
        return "it needs Linux: this system does not take pages back"
    return None


def _load_from(source: Source, planned: PlannedModel, held: Held) -> Loaded:
    """Load other weights of the model. Raises a QuireError."""
    if planned.plan.transfers is not None:
        raise NotAvailableError(
            "update_weights is not available with kv_transfer_config yet: the other engines would "
            "go on with keys and values of the former weights; start the engines anew"
        )
    if not isinstance(source, str):
        if not isinstance(source, Mapping):
            raise ConfigError(
                f"update_weights takes a folder, or tensors by name, not {type(source).__name__}"
            )
        if planned.storage is not None:
            raise NotAvailableError(
                "update_weights: the checkpoint is quantized, and given tensors are not; give a "
                "folder"
            )
        return _load(planned._replace(given=source), held, {})
    config = planned.plan.config
    own = EngineConfig(
        model=source, quantization=config.quantization, kernels=config.kernels,
        dtype=planned.plan.dtype, weights_cache=config.weights_cache, device=config.device,
        hf_overrides=config.hf_overrides, max_model_len=planned.plan.limits.max_model_len,
        allow_long_context=True, runner=config.runner, convert=config.convert,
        kv_cache_memory=planned.plan.kv_bytes, memory_utilization=1.0,
    )  # fmt: skip
    found = plan_engine(own)
    spec = replace(found.plan.spec, kept=planned.plan.spec.kept)  # what a draft head reads
    if spec != planned.plan.spec or found.plan.formats != planned.plan.formats:
        raise ConfigError(
            f"update_weights: {source!r} is a {found.plan.spec.architecture} of another form than "
            "the model that runs (its config.json, or how it is quantized); build another engine"
        )
    plan = replace(planned.plan, config=replace(config, model=source, load_format="auto"))
    other = planned._replace(plan=plan, files=found.files, storage=found.storage)
    return _load(other, held, found.files.states(config.tokenizer))


def _load(planned: PlannedModel, held: Held, states: States) -> Loaded:
    """Load the weights of the decoder. Raises CheckpointError where the files are not as they
    were."""
    from quire.worker.residence import Loaded

    check_unchanged(states)
    fresh = planned._replace(head_start=None, packed_cache=None)
    if planned.given is None:
        fresh = begin_loading(fresh)
    decoder = load_model(fresh, held.model.decoder.kernels, held.adapters, held.part).decoder
    check_unchanged(states)
    return Loaded(
        [*decoder.weights.tensors, *decoder.derived],
        _form(decoder.weights),
        None if planned.given is not None else lambda: _load(planned, held, states),
        str(planned.files.path),
        states,
    )


def _form(weights: Weights) -> object:
    """Return what the layout of the weights' bytes depends on besides their shapes."""
    return [
        (type(each).__name__, each.num_outputs, each.num_inputs, getattr(each, "layout", None))
        for each in weights.linears
    ]
