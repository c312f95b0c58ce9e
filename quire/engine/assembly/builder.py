"""Builds an engine from a config: cheap checks first, heavy imports and memory last.

A wrong name, an unsupported model or too little memory is reported before torch is even imported.
"""

from __future__ import annotations

import gc
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.common.capabilities import FP8_CAPABILITY
from quire.common.file_states import States, check_unchanged
from quire.common.heap import return_large_blocks
from quire.config.engine import EngineConfig
from quire.core.scheduler.adapters import LoadedAdapters
from quire.core.scheduler.grammars import CompiledGrammars
from quire.core.scheduler.look_ahead import LookAhead
from quire.core.scheduler.pace import StepPace
from quire.core.scheduler.prerequisites import Prerequisite
from quire.core.speculation.methods import speculator_of
from quire.core.step_cost import StepCostModel
from quire.engine.assembly.model_files import ModelFiles, find_model
from quire.engine.plan.gpu import require_gpu
from quire.engine.plan.machine import Machine
from quire.engine.plan.planning import HALF, EnginePlan, GraphPlan, resolve
from quire.engine.plan.step_costs import SUFFIX as COST_SUFFIX
from quire.engine.plan.step_costs import StepCostFile
from quire.engine.pooling.decision import declare_model
from quire.errors import CheckpointError, ConfigError, RequestError
from quire.executor.registry import ExecutorSpec, make_executor
from quire.models.declaration import DenseSpec
from quire.quant.formats import WeightFormats, formats_at_load
from quire.quant.gguf_formats import GgufStorage
from quire.quant.storage import CheckpointStorage
from quire.text.gguf import convert_tokenizer
from quire.text.tokenizer import Tokenizer
from quire.weights.folder import read_generation_config, resolve_model

if TYPE_CHECKING:
    from quire.engine.loop.engine import Engine
    from quire.executor.interface import Executor
    from quire.grammar.backend import Vocabulary
    from quire.kernels.interface import Kernels
    from quire.kernels.selection import Selection
    from quire.lora.table import AdapterTable
    from quire.nn.decoder import DecoderModel
    from quire.nn.pooler import Pooler
    from quire.quant.linears import FloatLinears, LinearLoader
    from quire.sampling.processors import ProcessorTable
    from quire.weights.head_start import HeadStart
    from quire.weights.packed_cache import PackedCache
    from quire.weights.source import WeightSource
    from quire.worker.outlets.interface import Outlet
    from quire.worker.worker import Worker

logger = logging.getLogger(__name__)


def prerequisites_of(plan: EnginePlan) -> tuple[Callable[[], Prerequisite], ...]:
    """The control plane's halves of the features whose others `build_executor` gives
    to the worker as companions."""
    adapters = plan.adapters
    if adapters is None:
        return (CompiledGrammars,)
    return (
        CompiledGrammars,
        partial(LoadedAdapters, adapters.max_active, adapters.max_loaded),
    )


class PlannedModel(NamedTuple):
    """A model that was found and understood, and the plan for it; nothing is allocated yet."""

    plan: EnginePlan
    files: ModelFiles
    storage: CheckpointStorage | GgufStorage | None
    """How weights are stored that are not plain floating point; None where they all are."""
    head_start: HeadStart | None = None
    """Weights that are on their way already."""
    packed_cache: PackedCache | None = None
    """Weights that an earlier start packed, or the place for them."""

    @property
    def folder(self) -> Path:
        """Where the model's files lie."""
        return self.files.folder

    @property
    def model_config(self) -> Mapping[str, object]:
        """What its `config.json` says, or would say."""
        return self.files.config


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
    keeps_fp8 = machine.gpu is not None and machine.gpu.capability >= FP8_CAPABILITY
    storage = files.storage(spec, config, keeps_fp8=keeps_fp8)
    if storage is not None:
        formats = storage.formats
    else:
        formats = (
            WeightFormats()
            if config.quantize_to is None
            else formats_at_load(spec, config.quantize_to)
        )
    plan = resolve(config, spec, machine, formats, pooling, generates=generates)
    for decision in plan.decisions:
        if (
            decision.name == "dtype"
            and HALF in (config.dtype, spec.dtype)
            and plan.dtype not in (config.dtype, "float32")
        ):
            logger.warning("computing in %s: %s", decision.value, decision.reason)
    return PlannedModel(plan, files, storage)


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
    if not config.skip_tokenizer_init:
        import tokenizers  # noqa: F401  # before torch's libraries load in the background: only one can load at a time
    return _describe(begin_loading(planned) if is_for_here else planned)


def _describe(planned: PlannedModel) -> PreparedModel:
    """Read the small files of a planned model."""
    tokenizer = _tokenizer(planned.plan.config, planned.files)
    own = {} if planned.files.gguf is not None else read_generation_config(planned.folder)
    vocab_size = planned.plan.spec.vocab_size
    eos_token_ids = _eos_token_ids(own, planned.model_config, tokenizer, vocab_size=vocab_size)
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


def begin_loading(planned: PlannedModel) -> PlannedModel:
    """Start to read the weights in the background, for `build_executor` to go on with."""
    return planned._replace(head_start=_head_start(planned), packed_cache=_packed_cache(planned))


def assemble(prepared: PreparedModel, executor: Executor, *, is_streaming: bool = False) -> Engine:
    """Return an engine of a prepared model around an executor. Where its outputs are not streamed,
    its steps are bounded by time only if the config gives a target.
    """
    from quire.engine.loop.engine import Engine

    planned = prepared.planned
    is_paced = is_streaming or planned.plan.config.target_step_ms is not None
    pace, cost_file = pace_of(planned, is_bounded=is_paced)
    return Engine(
        prepared.planned.plan,
        executor,
        tokenizer=prepared.tokenizer,
        generation_config=prepared.generation_config,
        eos_token_ids=prepared.eos_token_ids,
        model_config=prepared.planned.model_config,
        prerequisites=prerequisites_of(prepared.planned.plan),
        pace=pace,
        cost_file=cost_file,
        look_ahead=look_ahead_of(planned, pace),
    )


def look_ahead_of(planned: PlannedModel, pace: StepPace | None) -> Callable[[], LookAhead] | None:
    """What makes the look-ahead of a scheduler, if the config has one; `pace` knows the costs."""
    speculation = planned.plan.config.speculation
    if speculation is None:
        return None
    return partial(speculator_of, speculation, None if pace is None else pace.model)


def pace_of(
    planned: PlannedModel, *, is_bounded: bool = True
) -> tuple[StepPace | None, StepCostFile | None]:
    """Return what keeps a model's steps within their target, or only measures them where they are
    not bounded, and where step costs are kept, beside the packed weights. None where nothing
    needs it."""
    plan = planned.plan
    target_s = plan.target_step_s if is_bounded else None
    if target_s is None:
        if plan.config.speculation is None:
            return None, None
        target_s = math.inf
    pace = StepPace(StepCostModel(plan.step_costs), target_s)
    if plan.config.weights_cache is None:
        return pace, None
    from quire.engine.assembly.fingerprint import cache_name

    path = cache_name(plan, planned.files).path(
        Path(plan.config.weights_cache).expanduser(), COST_SUFFIX
    )
    cost_file = StepCostFile(path, Machine.inspect().cpu_name, pace.model)
    cost_file.restore()
    return pace, cost_file


@contextmanager
def _no_collection() -> Iterator[None]:
    """Run without passes of the garbage collector: importing torch makes a million objects,
    none of which is garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def build_engine(config: EngineConfig, *, is_streaming: bool = False) -> Engine:
    """Return an engine that is ready to run; see `assemble`."""
    prepared = prepare_model(config)
    return assemble(prepared, build_executor(prepared.planned), is_streaming=is_streaming)


def select(plan: EnginePlan) -> Selection:
    """Return the kernels that serve a plan, with the reasons against better ones."""
    import torch

    from quire.kernels.selection import Selection, load, select_kernels

    options: dict[str, Any] = {
        "is_invariant": plan.config.batch_invariant,
        "attention_module": plan.attention_module,
    }
    if plan.config.kernels != "auto":
        return Selection(load(plan.config.kernels, plan.device, **options))
    return select_kernels(plan.device, getattr(torch, plan.dtype), **options)


@_no_collection()
def build_executor(planned: PlannedModel, name: str = "inline") -> Executor:
    """Return the executor of this name (see `quire.executor.registry`) for a planned model.
    Raises ConfigError for an unknown name."""
    limits, vocab_size = planned.plan.limits, planned.plan.spec.vocab_size
    spec = ExecutorSpec(
        limits.max_num_seqs,
        limits.num_blocks,
        limits.block_size,
        vocab_size,
        partial(_build_worker, planned),
        limits.windows,
    )
    return make_executor(name, spec)


def _build_worker(planned: PlannedModel) -> tuple[Worker, ProcessorTable]:
    """Load the weights, allocate the KV memory, and put a worker around them."""
    from quire.grammar.rows import RowMatchers
    from quire.grammar.table import GrammarTable
    from quire.sampling import Sampler, select_sampling
    from quire.worker.last_tokens import PinnedReadback
    from quire.worker.memory import KVMemory, PoolShape
    from quire.worker.outlets import outlets_for
    from quire.worker.outlets.pooling import PoolOutlet
    from quire.worker.rows import RowTable
    from quire.worker.staging import Staging
    from quire.worker.worker import Worker

    plan = planned.plan
    return_large_blocks()
    _set_num_threads(plan.num_threads)
    selection = select(plan)
    for reason in selection.reasons:
        logger.warning("slow reference kernels are used: %s", reason)
    adapters = _adapter_table(plan, selection.kernels)
    model, pooler = _load_model(planned, selection.kernels, adapters)
    limits = plan.limits
    num_scratch = int(plan.graphs is not None)
    shape = PoolShape(limits.num_blocks + num_scratch, limits.block_size, plan.kv_format)
    memory = KVMemory(plan.spec.kv_layers, shape, selection.kernels.device, plan.kv_layout)
    if plan.is_kv_populated:
        memory.populate(plan.num_threads)
    rows = RowTable(limits.max_num_seqs, limits.block_size, len(limits.windows))
    states = {
        name: each
        for name, each in planned.files.states(plan.config.tokenizer).items()
        if name.endswith(".json")
    }
    matchers = RowMatchers(
        GrammarTable(partial(_vocabulary, planned._replace(head_start=None), states))
    )
    sampler = Sampler(select_sampling(selection.kernels), matchers=matchers)
    outlets: list[Outlet] = list(outlets_for(model, rows, sampler)) if plan.generates else []
    if pooler is not None:
        outlets.append(PoolOutlet(pooler, rows, Staging(selection.kernels.device)))
    companions = (matchers,) if adapters is None else (matchers, adapters)
    worker = Worker(model, memory, rows, outlets, companions=companions)
    if selection.kernels.device.type == "cuda":
        worker.read_late(PinnedReadback())
    if plan.graphs is not None:
        _use_graphs(worker, plan, plan.graphs)
    return worker, sampler.processors


def _use_graphs(worker: Worker, plan: EnginePlan, graphs: GraphPlan) -> None:
    """Have small steps recorded, and compare what the allocator holds with what was planned."""
    import torch

    from quire.worker.graphs import CudaGraphs, GraphSettings

    longest = plan.limits.max_model_len
    settings = GraphSettings(
        graphs.max_num_tokens, longest, graphs.max_bytes, graphs.min_shared_blocks
    )
    worker.use_graphs(CudaGraphs(graphs.bytes_each), settings)
    held, planned = (
        torch.cuda.memory_allocated(),
        plan.weight_bytes + plan.kv_bytes + plan.workspace_bytes,
    )
    if held > planned:
        logger.warning(
            "weights and KV cache take %d bytes of the GPU, planned were %d with all else",
            held,
            planned,
        )


def _adapter_table(plan: EnginePlan, kernels: Kernels) -> AdapterTable | None:
    """Make the table of adapters, if any are served."""
    if plan.adapters is None:
        return None
    from quire.lora.table import AdapterTable
    from quire.lora.weights import AdapterLoader

    loader = AdapterLoader(plan.spec, kernels, plan.dtype, plan.adapters.max_rank)
    return AdapterTable(loader.load, plan.adapters.max_loaded)


def _load_model(
    planned: PlannedModel, kernels: Kernels, adapters: AdapterTable | None
) -> tuple[DecoderModel, Pooler | None]:
    """Return the weights in memory, as planned, and what makes vectors, if anything does."""
    from quire.nn.builder import build_decoder
    from quire.nn.pooler import build_pooler
    from quire.weights.dense import DenseFolder

    plan = planned.plan
    cache = planned.packed_cache if kernels.name == "cpu" else None
    with _sources(planned) as (weights, quantize):
        model = build_decoder(
            plan.spec,
            weights if cache is None else cache.over(weights),
            kernels,
            dtype=plan.dtype,
            max_model_len=plan.limits.max_model_len,
            quantize=quantize,
            adapters=adapters,
        )

        def source_of(dense: DenseSpec) -> WeightSource:
            is_own = dense.folder is None or plan.config.load_format == "dummy"
            return weights if is_own else DenseFolder(planned.folder / str(dense.folder))

        pooler = None if plan.pooling is None else build_pooler(plan.pooling, model, source_of)
    if cache is not None:
        cache.keep(zip(plan.spec.projections, model.weights.linears, strict=True))
    return model, pooler


@contextmanager
def _sources(
    planned: PlannedModel,
) -> Iterator[tuple[WeightSource, Callable[[FloatLinears], LinearLoader]]]:
    """Yield where the weights come from, and how projections are loaded from there."""
    import torch

    from quire.quant.gguf import GgufWeights
    from quire.quant.linears import CheckpointLinears, QuantizingLinears
    from quire.quant.unpacking import unpacker
    from quire.weights.checkpoint import SafetensorsCheckpoint

    plan, storage = planned.plan, planned.storage

    def quantizing(floats: FloatLinears) -> QuantizingLinears:
        return QuantizingLinears(floats, plan.formats, getattr(torch, plan.spec.dtype))

    if storage is None:
        with _weights(planned) as plain:
            yield plain, quantizing
    elif isinstance(storage, GgufStorage):
        with GgufWeights(storage) as weights:
            yield weights, lambda floats: CheckpointLinears(quantizing(floats), weights)
    else:
        with SafetensorsCheckpoint(planned.folder, plan.spec, storage.layout) as checkpoint:
            unpack = unpacker(storage, checkpoint)
            yield checkpoint, lambda floats: CheckpointLinears(quantizing(floats), unpack)


def _packed_cache(planned: PlannedModel) -> PackedCache | None:
    """Begin to read what an earlier start packed. Plain floats are packed while torch is imported:
    no use for them."""
    plan = planned.plan
    are_floats = [
        planned.storage is None and plan.formats.of(parts) is None
        for parts in plan.spec.projections
    ]
    if plan.config.weights_cache is None or all(are_floats) or not _may_be_native(plan):
        return None
    from quire.engine.assembly.fingerprint import cache_name
    from quire.weights.packed_cache import PackedCache

    wanted = [
        parts
        for parts, is_float in zip(plan.spec.projections, are_floats, strict=True)
        if not is_float
    ]
    return PackedCache(
        Path(plan.config.weights_cache).expanduser(), cache_name(plan, planned.files), wanted
    )


def _may_be_native(plan: EnginePlan) -> bool:
    """Return whether the native kernels can be expected to serve the plan."""
    from quire.kernels import cpu

    return (
        plan.device == "cpu" and plan.config.kernels in ("auto", "cpu") and cpu.IMPORT_ERROR is None
    )


def _head_start(planned: PlannedModel) -> HeadStart | None:
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

    floats = [parts for parts in plan.spec.projections if plan.formats.of(parts) is None]
    head = plan.spec.head
    is_shared = plan.spec.is_tied and head is not None and (head,) in floats
    wanted = Wanted(floats, [] if is_shared else [plan.spec.embedding])
    try:
        checkpoint = SafetensorsCheckpoint(planned.folder, plan.spec)
    except CheckpointError:
        return None
    return HeadStart(checkpoint, wanted, plan.dtype, plan.num_threads)


def _weights(planned: PlannedModel) -> AbstractContextManager[WeightSource]:
    """Return where the weights come from."""
    from quire.weights.checkpoint import SafetensorsCheckpoint
    from quire.weights.dummy import DummyWeights

    if planned.plan.config.load_format == "dummy":
        return nullcontext(DummyWeights(planned.plan.config.seed))
    if planned.head_start is not None and not planned.head_start.is_closed:
        return planned.head_start
    return SafetensorsCheckpoint(planned.folder, planned.plan.spec)


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
        return Tokenizer(*convert_tokenizer(files.gguf.file.metadata))
    if (
        config.load_format == "dummy"
        and config.tokenizer is None
        and not (source / "tokenizer.json").is_file()
    ):
        logger.warning("no tokenizer.json beside the config: prompts must be token ids")
        return None
    return Tokenizer.from_folder(source)


def _vocabulary(planned: PlannedModel, states: States) -> Vocabulary:
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


def _eos_token_ids(
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


def _set_num_threads(num_threads: int) -> None:
    """Both pools' settings are the process's: the engine that was built last decides.
    Results never depend on it."""
    _stay_alone_after_fork()
    _resize_pools(num_threads)


def _resize_pools(num_threads: int) -> None:
    import torch

    from quire.kernels import cpu

    torch.set_num_threads(num_threads)
    if cpu.IMPORT_ERROR is None:
        cpu.set_num_threads(num_threads)


@cache
def _stay_alone_after_fork() -> None:
    """Compute with one thread after a fork: a child would wait forever for its parent's OpenMP
    threads."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: _resize_pools(1))
