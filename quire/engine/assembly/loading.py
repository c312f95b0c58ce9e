"""Loads a planned model's weights: from a checkpoint, a GGUF file, packed copies of an earlier
start, or made up; ahead of time where torch need not be there yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from quire.engine.plan.engine_plan import EnginePlan
from quire.engine.plan.experts import mixtures, weights_of
from quire.errors import CheckpointError, ConfigError
from quire.nn.parts import ModelPart, hold

if TYPE_CHECKING:
    from quire.engine.assembly.model_files import ModelFiles
    from quire.engine.assembly.planned_model import PlannedModel
    from quire.kernels.interface import Kernels
    from quire.lora.table import AdapterTable
    from quire.models.declaration import DecoderSpec, DenseSpec
    from quire.models.tensors import LinearSpec
    from quire.nn.decoder import DecoderModel
    from quire.nn.pooler import Pooler
    from quire.quant.gguf_formats import GgufStorage
    from quire.quant.linears import FloatLinears, LinearLoader
    from quire.quant.storage import CheckpointStorage
    from quire.weights.expert_store import ExpertStore
    from quire.weights.head_start import HeadStart
    from quire.weights.packed_cache import PackedCache
    from quire.weights.source import WeightSource
    from quire.worker.experts import ExpertReports
    from quire.worker.images import ImageTable


class LoadedModel(NamedTuple):
    """A decoder, and what makes vectors, reads images and tells of experts, where anything does."""

    decoder: DecoderModel
    pooler: Pooler | None
    images: ImageTable | None
    experts: ExpertReports | None


def load_model(
    planned: PlannedModel,
    kernels: Kernels,
    adapters: AdapterTable | None,
    part: ModelPart | None = None,
) -> LoadedModel:
    """Return the weights in memory, as planned, and what belongs to them. With a `part`, the
    weights are those of one of several processes; all but the first have the decoder alone."""
    from quire.kernels.elsewhere import ElsewhereLinear
    from quire.nn.builder import build_decoder

    plan, part = planned.plan, part or ModelPart()
    cache = planned.packed_cache if kernels.name == "cpu" else None
    if plan.config.num_processes > 1:  # each has a file of its own
        cache = packed_cache(planned, part)
    with sources(planned) as (weights, quantize), _expert_store(planned, kernels) as store:
        packed = weights if cache is None else cache.over(weights)
        model = build_decoder(
            plan.spec,
            packed if store is None else store.over(packed),
            kernels,
            dtype=plan.dtype,
            max_model_len=plan.limits.max_model_len,
            quantize=quantize if store is None else _paging(quantize, store),
            adapters=adapters,
            part=part,
        )

        if cache is not None:
            here = [each for each in model.weights.linears if not isinstance(each, ElsewhereLinear)]
            cache.keep(zip(hold(plan.spec, part).projections, here, strict=True))
        if not part.is_first:
            return LoadedModel(model, None, None, None)

        pooler = _pooler(planned, weights, model)
        images = _image_table(plan, weights, kernels, model)
    experts = None if store is None else _reports(store)
    return LoadedModel(replace(model, images=images), pooler, images, experts)


def _pooler(planned: PlannedModel, weights: WeightSource, model: DecoderModel) -> Pooler | None:
    """Load what makes vectors, if the model is to make any."""
    plan = planned.plan
    if plan.pooling is None:
        return None
    from quire.nn.pooler import build_pooler
    from quire.weights.dense import DenseFolder

    def source_of(dense: DenseSpec) -> WeightSource:
        is_own = dense.folder is None or plan.config.load_format == "dummy"
        return weights if is_own else DenseFolder(planned.folder / str(dense.folder))

    return build_pooler(plan.pooling, model, source_of)


def _reports(store: ExpertStore) -> ExpertReports:
    from quire.core.experts import ExpertUse
    from quire.worker.experts import ExpertReports

    pool = store.pool
    assert pool is not None
    return ExpertReports(lambda: ExpertUse(*pool.counts))


@contextmanager
def _expert_store(planned: PlannedModel, kernels: Kernels) -> Iterator[ExpertStore | None]:
    """Yield the file of the experts, if they are not to be in memory, and fill the pool over it."""
    plan, experts = planned.plan, planned.plan.experts
    if experts is None:
        yield None
        return
    if kernels.name != "cpu":
        raise ConfigError(
            "expert_memory is for the native kernels of the CPU, and those are not available here "
            "(`quire doctor` says why); leave it out"
        )
    from quire.engine.assembly.fingerprint import cache_name
    from quire.weights.expert_store import ExpertStore, Mixture

    found = [
        Mixture(*weights_of(each), num_experts=len(each.experts)) for each in mixtures(plan.spec)
    ]
    folder, num_bytes = Path(str(plan.config.weights_cache)).expanduser(), experts.num_bytes
    name = cache_name(plan, planned.files)
    store = ExpertStore(folder, name, found, num_bytes=num_bytes, least=experts.least)
    try:
        yield store
        assert store.pool is not None
        store.pool.fill()
    finally:
        store.close()


def _paging(
    quantize: Callable[[FloatLinears], LinearLoader], store: ExpertStore
) -> Callable[[FloatLinears], LinearLoader]:
    from quire.quant.linears import PagingLinears

    return lambda floats: PagingLinears(quantize(floats), store.keep)


def _resident(plan: EnginePlan, part: ModelPart | None = None) -> list[tuple[LinearSpec, ...]]:
    """Return the projections that are all in memory, of one of several processes its own."""
    if part is not None:
        return hold(plan.spec, part).projections
    if plan.experts is None:
        return list(plan.spec.projections)
    paged = {parts for each in mixtures(plan.spec) for parts in weights_of(each)}
    return [parts for parts in plan.spec.projections if parts not in paged]


def _image_table(
    plan: EnginePlan, weights: WeightSource, kernels: Kernels, decoder: DecoderModel
) -> ImageTable | None:
    """Load what reads images, if the model does."""
    vision = plan.spec.vision
    if plan.images is None or vision is None:
        return None
    from quire.nn.builder import COMPUTE_DTYPES
    from quire.nn.vision import VisionModel
    from quire.quant.linears import FloatLinears
    from quire.worker.images import ImageTable
    from quire.worker.span_positions import SpanPositions

    floats = FloatLinears(weights, kernels, COMPUTE_DTYPES[plan.dtype])
    table = ImageTable(VisionModel(vision, plan.images.processing, floats), plan.images.max_tokens)
    axes = plan.spec.axes
    if axes:
        size = vision.place_size
        [angles] = decoder.weights.ropes
        table.positions = SpanPositions(
            lambda image: (image.height // size, image.width // size), axes, angles
        )
    return table


@contextmanager
def sources(
    planned: PlannedModel,
) -> Iterator[tuple[WeightSource, Callable[[FloatLinears], LinearLoader]]]:
    """Yield where the weights come from, and how projections are loaded from there."""
    import torch

    from quire.quant.linears import CheckpointLinears, QuantizingLinears

    plan, storage = planned.plan, planned.storage

    def quantizing(floats: FloatLinears) -> QuantizingLinears:
        return QuantizingLinears(floats, plan.formats, getattr(torch, plan.spec.dtype))

    if storage is None:
        with _weights(planned) as plain:
            yield plain, quantizing
        return
    from quire.quant.gguf import GgufWeights
    from quire.quant.gguf_formats import GgufStorage
    from quire.quant.unpacking import unpacker
    from quire.weights.checkpoint import SafetensorsCheckpoint

    if isinstance(storage, GgufStorage):
        with GgufWeights(storage) as weights:
            yield weights, lambda floats: CheckpointLinears(quantizing(floats), weights)
    else:
        with SafetensorsCheckpoint(planned.folder, plan.spec, storage.layout) as checkpoint:
            unpack = unpacker(storage, checkpoint)
            yield checkpoint, lambda floats: CheckpointLinears(quantizing(floats), unpack)


def packed_cache(planned: PlannedModel, part: ModelPart | None = None) -> PackedCache | None:
    """Begin to read what an earlier start packed, in one of several processes its `part`. Plain
    floats are packed while torch is imported: no use for them."""
    plan = planned.plan
    resident = _resident(plan, part)
    are_floats = [planned.storage is None and plan.formats.of(parts) is None for parts in resident]
    if plan.config.weights_cache is None or all(are_floats) or not _may_be_native(plan):
        return None
    from quire.engine.assembly.fingerprint import cache_name, part_name
    from quire.weights.packed_cache import PackedCache

    wanted = [parts for parts, is_float in zip(resident, are_floats, strict=True) if not is_float]
    name = cache_name(plan, planned.files)
    if plan.experts is not None:  # a file without the experts does not take the place of another
        name = name._replace(label=f"{name.label}-paged")
    if part is not None:
        name = part_name(name, part)
    return PackedCache(Path(plan.config.weights_cache).expanduser(), name, wanted)


def _may_be_native(plan: EnginePlan) -> bool:
    """Return whether the native kernels can be expected to serve the plan."""
    from quire.kernels import cpu

    is_meant = plan.config.kernels in ("auto", "cpu") and plan.config.platform is None
    return plan.device == "cpu" and is_meant and not cpu.absence()


def head_start(planned: PlannedModel) -> HeadStart | None:
    """Begin to load the weights, if the native kernels can be expected to serve the plan.

    What is wrong with the files is said when they are loaded in earnest: what is wrong with a
    request comes first.
    """
    from quire.kernels import cpu

    plan = planned.plan
    if (
        plan.config.load_format == "dummy"
        or planned.storage is not None
        or not _may_be_native(plan)
    ):
        return None
    if plan.dtype not in cpu.DTYPES:
        return None
    from quire.weights.checkpoint import SafetensorsCheckpoint
    from quire.weights.head_start import HeadStart, Wanted

    floats = [parts for parts in _resident(plan) if plan.formats.of(parts) is None]
    head = plan.spec.head
    is_shared = plan.spec.is_tied and head is not None and (head,) in floats
    wanted = Wanted(floats, [] if is_shared else [plan.spec.embedding])
    try:
        checkpoint = SafetensorsCheckpoint(planned.folder, plan.spec)
    except CheckpointError:
        return None
    return HeadStart(checkpoint, wanted, plan.dtype, plan.num_threads)


def check_files(planned: PlannedModel, *, may_be_absent: bool = False) -> None:
    """Check what the weight files of the model, and of the one that drafts for it, say of
    themselves against what they should hold, for a process that does not load them. Raises
    CheckpointError; not for a model without any weight files where these `may_be_absent`."""
    if planned.plan.config.load_format == "dummy":
        return
    if planned.given is None:
        _check(planned.files, planned.plan.spec, planned.storage, may_be_absent)
    found, draft = planned.draft, planned.plan.draft
    if found is None or draft is None:
        return
    try:
        _check(found.files, draft.spec, found.storage, may_be_absent)
    except CheckpointError as error:
        raise CheckpointError(f"speculative_config: the draft model: {error}") from error


def _check(
    files: ModelFiles,
    spec: DecoderSpec,
    storage: CheckpointStorage | GgufStorage | None,
    may_be_absent: bool,
) -> None:
    from quire.quant.storage import CheckpointStorage
    from quire.weights.checkpoint import SafetensorsCheckpoint

    if files.gguf is not None or (may_be_absent and not files.has_weights):
        return  # a GGUF file was checked when it was found
    layout = storage.layout if isinstance(storage, CheckpointStorage) else None
    SafetensorsCheckpoint(files.folder, spec, layout).close()


def _weights(planned: PlannedModel) -> AbstractContextManager[WeightSource]:
    """Return where the weights come from."""
    from quire.weights.checkpoint import SafetensorsCheckpoint

    if planned.given is not None:
        from quire.weights.given import GivenTensors

        return GivenTensors(planned.given, planned.plan.spec)
    if planned.plan.config.load_format == "dummy":
        from quire.weights.dummy import DummyWeights

        return nullcontext(DummyWeights(planned.plan.config.seed))
    if planned.head_start is not None and not planned.head_start.is_closed:
        return planned.head_start
    return SafetensorsCheckpoint(planned.folder, planned.plan.spec)
