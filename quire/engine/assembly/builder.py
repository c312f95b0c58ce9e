"""Builds an engine around a prepared model: executor, worker, scheduler, in this order.

What is heavy (torch, weights, KV memory) is imported and allocated here, and only here.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.common.frozen_record import replace
from quire.common.garbage import uncollected
from quire.common.heap import return_large_blocks
from quire.config.engine import EngineConfig
from quire.core.scheduler.grammars import CompiledGrammars
from quire.core.scheduler.look_ahead import LookAhead
from quire.core.scheduler.pace import StepPace
from quire.core.scheduler.prerequisites import Prerequisite
from quire.core.scheduler.prompt_cache import CacheStats, PromptCache
from quire.core.speculation.forced import forced_speculator
from quire.core.step_cost import StepCostModel
from quire.engine.assembly.loading import load_model
from quire.engine.assembly.planned_model import PlannedModel
from quire.engine.assembly.preparation import (
    PreparedModel,
    digest_key,
    prepare_model,
    read_vocabulary,
)
from quire.engine.assembly.residence import Held, residence_of
from quire.engine.assembly.threads import set_num_threads
from quire.engine.plan.engine_plan import EnginePlan
from quire.engine.plan.graphs import GraphPlan
from quire.engine.plan.machine import Machine
from quire.engine.plan.step_costs import SUFFIX as COST_SUFFIX
from quire.engine.plan.step_costs import StepCostFile
from quire.engine.ranks import RANK_COMMAND
from quire.errors import ConfigError
from quire.executor.registry import ExecutorSpec, make_executor

if TYPE_CHECKING:
    from quire.core.adapters import AdapterOrder
    from quire.engine.loop.engine import Engine
    from quire.executor.interface import Executor
    from quire.grammar.rows import RowMatchers
    from quire.kernels.exchange import Exchange
    from quire.kernels.interface import Kernels
    from quire.kernels.lora import PackedAdapter
    from quire.kernels.selection import Selection
    from quire.lora.table import AdapterTable
    from quire.lora.weights import AdapterLoader
    from quire.nn.decoder import DecoderModel
    from quire.nn.parts import ModelPart
    from quire.parallel.adapters import LedAdapters
    from quire.parallel.group import RankGroup
    from quire.parallel.processes import RankPlaces
    from quire.sampling.processors import ProcessorTable
    from quire.spec.companion import ModelDrafts
    from quire.worker.companions import Companion
    from quire.worker.memory import KVMemory
    from quire.worker.outlets.interface import Outlet
    from quire.worker.rows import RowTable
    from quire.worker.worker import Worker

logger = logging.getLogger(__name__)


def prerequisites_of(
    plan: EnginePlan, pace: StepPace | None
) -> tuple[Callable[[], Prerequisite], ...]:
    """The control plane's halves of the features whose others `build_executor` gives
    to the worker as companions. `pace` knows the costs of steps."""
    stats = CacheStats()
    found: list[Callable[[], Prerequisite]] = [
        CompiledGrammars,
        lambda: PromptCache(stats, os.urandom(8).hex()),
    ]
    if (adapters := plan.adapters) is not None:
        from quire.core.scheduler.adapters import LoadedAdapters

        found.append(partial(LoadedAdapters, adapters.max_active, adapters.max_loaded))
    if (images := plan.images) is not None:
        from quire.core.scheduler.images import EncodedImages

        found.append(partial(EncodedImages, images.max_tokens))
    if plan.experts is not None:
        from quire.core.scheduler.experts import CountedExperts

        found.append(CountedExperts)
    if plan.transfers is not None:
        from quire.engine.assembly.transfers import transfers_prerequisite

        found.append(transfers_prerequisite(plan.transfers))
    if plan.tiers is not None:
        from quire.engine.assembly.tiers import stored_prerequisite

        costs = StepCostModel(plan.step_costs) if pace is None else pace.model
        found.append(stored_prerequisite(plan.tiers, costs))
    return tuple(found)


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
        prerequisites=prerequisites_of(planned.plan, pace),
        digest_key=digest_key(planned.plan),
        pace=pace,
        cost_file=cost_file,
        look_ahead=look_ahead_of(planned, pace),
    )


def look_ahead_of(planned: PlannedModel, pace: StepPace | None) -> Callable[[], LookAhead] | None:
    """What makes the look-ahead of a scheduler: as the config has it, else one for tokens that
    grammars force. `pace` knows the costs. None where rows' bits depend on other rows."""
    plan = planned.plan
    if plan.config.speculation is not None:
        from quire.core.speculation.methods import speculator_of

        return partial(speculator_of, plan.config.speculation, None if pace is None else pace.model)
    if not (plan.generates and plan.config.batch_invariant):
        return None
    costs = StepCostModel(plan.step_costs) if pace is None else pace.model
    return partial(forced_speculator, costs)


def pace_of(
    planned: PlannedModel, *, is_bounded: bool = True
) -> tuple[StepPace | None, StepCostFile | None]:
    """Return what keeps a model's steps within their target, or only measures them where they are
    not bounded, and where step costs are kept, beside the packed weights. None where nothing
    needs it."""
    plan = planned.plan
    target_s = plan.target_step_s if is_bounded else None
    if target_s is None:
        if plan.config.speculation is None and plan.tiers is None:
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


def build_engine(config: EngineConfig, *, is_streaming: bool = False) -> Engine:
    """Return an engine that is ready to run; see `assemble`. With several replicas, it is one that
    passes requests on to their processes."""
    if config.data_parallel_size > 1:
        from quire.engine.replicas.engine import ReplicatedEngine

        return ReplicatedEngine(config, is_streaming=is_streaming)
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
    if plan.config.platform is not None:
        from quire.kernels.platforms import platform_kernels

        return Selection(platform_kernels(plan.config.platform))
    if plan.config.kernels != "auto":
        return Selection(load(plan.config.kernels, plan.device, **options))
    return select_kernels(plan.device, getattr(torch, plan.dtype), **options)


@uncollected()
def build_executor(planned: PlannedModel, name: str | None = None) -> Executor:
    """Return the executor of this name (see `quire.executor.registry`) for a planned model, by
    default the one that its plan needs. Raises ConfigError for an unknown name."""
    if (count := planned.plan.config.data_parallel_size) > 1:
        raise ConfigError(
            f"data_parallel_size={count} is for quire serve, LLM and AsyncLLM; leave it out here"
        )
    limits, vocab_size = planned.plan.limits, planned.plan.spec.vocab_size
    spec = ExecutorSpec(
        limits.max_num_seqs,
        limits.num_blocks,
        limits.block_size,
        vocab_size,
        partial(_build_worker, planned),
        limits.windows,
        partial(_build_ranks, planned),
        RANK_COMMAND,
        planned.plan.config.num_processes,
        planned.plan.num_threads,
        planned.plan.config.ray_placement_group,
    )
    config = planned.plan.config
    given = config.executor_class or "inline"
    if config.num_processes > 1:
        given = config.distributed_executor_backend or "mp"
    return make_executor(name or given, spec)


def _build_ranks(
    planned: PlannedModel, places: RankPlaces
) -> tuple[Worker, ProcessorTable, RankGroup]:
    """Start the other ranks, and build the part of rank 0 while they build theirs."""
    from quire.engine.ranks.launch import start_group

    group = start_group(planned, places)
    try:
        worker, processors = _build_worker(planned, group)
        group.wait_ready()
    except BaseException:
        group.close()
        raise
    return worker, processors, group


class _Built(NamedTuple):
    """A model in memory, and what of it goes to a worker. Of several processes it is the first one,
    whose model and memory lead those of the others."""

    model: DecoderModel
    memory: KVMemory
    held: Held


def _build_worker(
    planned: PlannedModel, group: RankGroup | None = None
) -> tuple[Worker, ProcessorTable]:
    """Load the weights, allocate the KV memory, and put a worker around them."""
    from quire.grammar.rows import RowMatchers
    from quire.grammar.table import GrammarTable
    from quire.sampling import Sampler, select_sampling
    from quire.worker.outlets import outlets_for
    from quire.worker.rows import RowTable
    from quire.worker.worker import Worker

    plan = planned.plan
    limits = plan.limits
    model, memory, held = built = _load(planned, group)
    pooler = held.model.pooler
    rows = RowTable(limits.max_num_seqs, limits.block_size, len(limits.windows))
    states = {name: each for name, each in held.states.items() if name.endswith(".json")}
    matchers = RowMatchers(
        GrammarTable(partial(read_vocabulary, planned._replace(head_start=None), states))
    )
    sampler = Sampler(select_sampling(model.kernels), matchers=matchers)
    outlets: list[Outlet] = list(outlets_for(model, rows, sampler)) if plan.generates else []
    if pooler is not None:
        from quire.worker.outlets.pooling import PoolOutlet
        from quire.worker.staging import Staging

        outlets.append(PoolOutlet(pooler, rows, Staging(model.kernels.device)))
    drafts = None
    if plan.draft is not None:
        from quire.engine.assembly.drafting import load_drafts

        drafts = load_drafts(planned, model, sampler, rows)
    companions = _companions(planned, built, drafts, matchers, rows, group)
    residence = residence_of(planned, held, drafts)
    if group is not None:
        from quire.executor.led_residence import LedResidence

        residence = LedResidence(residence, group)
    worker = Worker(model, memory, rows, outlets, companions=companions, residence=residence)
    if model.kernels.device.type == "cuda":
        from quire.worker.last_tokens import PinnedReadback

        worker.read_late(PinnedReadback())
    if plan.graphs is not None:
        _use_graphs(worker, plan, plan.graphs)
    return worker, sampler.processors


def _load(planned: PlannedModel, group: RankGroup | None) -> _Built:
    """Load the weights, of one of several processes its own, and allocate the KV memory."""
    plan = planned.plan
    digest_key(plan)  # refuses a folder that cannot be used before anything is loaded
    return_large_blocks()
    set_num_threads(plan.num_threads)
    selection = select(plan)
    for reason in selection.reasons:
        logger.warning("slow reference kernels are used: %s", reason)
    states = planned.files.states(plan.config.tokenizer)
    part = None if group is None else part_of(plan, group.shared)
    loader, led = adapter_loader(plan, selection.kernels, part), None
    if group is not None and loader is not None:
        from quire.parallel.adapters import LedAdapters

        led = LedAdapters(group)
    adapters = adapter_table(plan, None if loader is None else loader.load, led)
    loaded = load_model(planned, selection.kernels, adapters, part)
    if loader is not None:
        loader.model = loaded.decoder.weights
    model = loaded.decoder
    if plan.draft is not None:
        from quire.engine.assembly.drafting import keep_states

        model = keep_states(plan, model)
    memory = kv_memory(plan, model)
    held = Held(loaded, memory, adapters, states, part)
    if group is not None:
        from quire.executor.ranks import lead

        model, memory = lead(model, memory, group, plan.kv_layout, led)
    return _Built(model, memory, held)


def _companions(
    planned: PlannedModel,
    built: _Built,
    drafts: ModelDrafts | None,
    matchers: RowMatchers,
    rows: RowTable,
    group: RankGroup | None,
) -> list[Companion]:
    """Return the worker's halves of the features that are planned, in the order in which they hear
    of a step."""
    from quire.grammar.forced import ForcedTokens

    plan, loaded, states = planned.plan, built.held.model, built.held.states
    stored = transferred = None
    if plan.tiers is not None or plan.transfers is not None:
        from quire.engine.assembly.tiers import stored_blocks
        from quire.engine.assembly.transfers import blocks_of_all, transferred_blocks

        blocks = blocks_of_all(plan, built.memory, group)
        if plan.tiers is not None:
            stored = stored_blocks(planned, plan.tiers, blocks, states)
        transferred = transferred_blocks(planned, blocks, states)
    # What is placed is written before it may be read to be stored.
    halves = (
        matchers, ForcedTokens(matchers, rows), built.held.adapters, loaded.images, drafts,
        loaded.experts, transferred, stored,
    )  # fmt: skip
    return [each for each in halves if each is not None]


def part_of(plan: EnginePlan, exchange: Exchange | None, stage: int = 0) -> ModelPart:
    """Return which of a plan's processes has this stage, and exchanges values so."""
    from quire.nn.parts import ModelPart

    config = plan.config
    is_by_expert, num_stages = config.enable_expert_parallel, config.pipeline_parallel_size
    return ModelPart(exchange, is_by_expert, stage, num_stages)


def kv_memory(plan: EnginePlan, model: DecoderModel) -> KVMemory:
    """Allocate the KV memory of the layers and heads that a model has: of one of several
    processes, its own."""
    from quire.program.sharding import cache_heads
    from quire.worker.memory import KVMemory, PoolShape

    limits, num_scratch = plan.limits, int(plan.graphs is not None)
    shape = PoolShape(limits.num_blocks + num_scratch, limits.block_size, plan.kv_format)
    heads, layout, kv_layers = cache_heads(model.program), plan.kv_layout, plan.spec.kv_layers
    if model.caches is not None:
        own = slice(model.caches.start, model.caches.stop)
        kv_layers = kv_layers[own]
        layout = replace(layout, group_of=layout.group_of[own], place_of=layout.place_of[own])
    layers = [
        layer._replace(num_kv_heads=count) for layer, count in zip(kv_layers, heads, strict=True)
    ]
    memory = KVMemory(layers, shape, model.kernels.device, layout)
    if plan.is_kv_populated:
        memory.populate(plan.num_threads)
    return memory


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


def adapter_loader(
    plan: EnginePlan, kernels: Kernels, part: ModelPart | None
) -> AdapterLoader | None:
    """Return what loads adapters, of one of several processes its part; None where none are served.
    It has to be told the model's weights."""
    if plan.adapters is None:
        return None
    from quire.lora.weights import AdapterLoader
    from quire.nn.parts import hold

    held = None if part is None else hold(plan.spec, part)
    outputs, tokens = (None, None) if held is None else (held.outputs, held.tokens)
    return AdapterLoader(plan.spec, kernels, plan.dtype, plan.adapters.limits, outputs, tokens)


def adapter_table(
    plan: EnginePlan,
    load: Callable[[AdapterOrder], PackedAdapter] | None,
    led: LedAdapters | None = None,
) -> AdapterTable | None:
    """Make the table of adapters, if any are served; other processes load what `led` says."""
    if plan.adapters is None or load is None:
        return None
    from quire.lora.table import AdapterTable

    note = _ignore if led is None else partial(_note, led)
    return AdapterTable(load, plan.adapters.max_loaded, note)


def _ignore(order: AdapterOrder, adapter: PackedAdapter) -> None:
    """No other process loads anything."""


def _note(led: LedAdapters, order: AdapterOrder, adapter: PackedAdapter) -> None:
    from quire.parallel.adapters import AdapterFiles

    led.note(adapter, AdapterFiles(order.digest, str(Path(str(order.folder)).absolute())))
