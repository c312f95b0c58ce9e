"""Brings the transfers of an engine together: what two engines must agree in, how its blocks are
laid out, and both halves of the feature."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from quire.common.file_states import States, check_unchanged
from quire.common.kv_formats import KV_FORMATS
from quire.core.scheduler.prerequisites import Prerequisite
from quire.core.scheduler.transfers import TransferredPrefixes, TransferStats
from quire.engine.assembly.planned_model import PlannedModel
from quire.engine.assembly.tiers import deciding_facts, identity_digest
from quire.engine.plan.engine_plan import EnginePlan
from quire.engine.plan.ranks import stages_of
from quire.models.cutting import divisible_tokens
from quire.models.lowering import lower
from quire.program.operations import Program
from quire.program.sharding import cache_heads, shard, split_evenly

if TYPE_CHECKING:
    from quire.engine.plan.transfers import TransferPlan
    from quire.executor.divided_memory import DividedBlocks, HeldHeads
    from quire.parallel.group import RankGroup
    from quire.transfer.companion import TransferMemory, TransferredBlocks
    from quire.transfer.layout import BlockLayout
    from quire.worker.memory import KVMemory


def transfers_prerequisite(transfers: TransferPlan) -> Callable[[], Prerequisite]:
    """Return what makes the control plane's half."""
    config = transfers.config
    timeout_s = config.kv_connector_extra_config.pull_timeout_s
    fails = config.kv_load_failure_policy == "fail"
    return partial(TransferredPrefixes, TransferStats(), timeout_s, fails=fails)


def blocks_of_all(
    plan: EnginePlan, memory: KVMemory, group: RankGroup | None
) -> KVMemory | DividedBlocks:
    """Return what reads and writes whole blocks, also where ranks have parts of them."""
    if group is None:
        return memory
    from quire.executor.divided_memory import DividedBlocks

    return DividedBlocks(memory, group, _held_heads(plan))


def transferred_blocks(
    planned: PlannedModel, blocks: TransferMemory, states: States
) -> TransferredBlocks | None:
    """Make the worker's half, which begins to listen. `states` are those that the model's files had
    before they were loaded. Raises ConfigError."""
    if planned.plan.transfers is None:
        return None
    from quire.transfer.companion import TransferredBlocks

    layout = block_layout(planned.plan)
    identity = partial(_identity, planned, states)
    return TransferredBlocks(planned.plan.transfers.config, blocks, layout, identity)


def block_layout(plan: EnginePlan) -> BlockLayout:
    """Return how the whole model's blocks are laid out, in the order in which `KVMemory` has its
    tensors."""
    from quire.transfer.layout import BlockLayout, TensorShape

    tensors: list[TensorShape] = []
    at_place: dict[int, list[int]] = {}
    layout = plan.kv_layout
    for layer, place in zip(plan.spec.kv_layers, layout.place_of, strict=True):
        if place not in at_place:
            count = 1 if layer.is_latent else 2
            row_bytes = KV_FORMATS[plan.kv_format].row_bytes(layer.head_dim)
            at_place[place] = list(range(len(tensors), len(tensors) + count))
            tensors += [TensorShape(layer.num_kv_heads, row_bytes)] * count
    layer_tensors = [at_place[place] for place in layout.place_of]
    return BlockLayout(plan.limits.block_size, tensors, layer_tensors, layout.group_of)


def _held_heads(plan: EnginePlan) -> list[list[HeldHeads]]:
    """Return which heads of each tensor of the pool each rank has, of each stage in the order of
    its processes' `KVMemory`."""
    num_stages = plan.config.pipeline_parallel_size
    if num_stages == 1:
        program, _ = lower(plan.spec)
        return [_held_by_stage(plan, program, range(len(plan.spec.kv_layers)))]
    return [
        _held_by_stage(plan, stage.program, stage.caches)
        for stage in stages_of(plan.spec, num_stages)
    ]


def _held_by_stage(plan: EnginePlan, program: Program, caches: range) -> list[HeldHeads]:
    from quire.executor.divided_memory import HeldHeads

    num_ranks, found, places = plan.config.tensor_parallel_size, list[HeldHeads](), set[int]()
    counts = [
        cache_heads(shard(program, rank, num_ranks, divisible_tokens(plan.spec))[0])
        for rank in range(num_ranks)
    ]
    for number, cache in enumerate(caches):
        layer, place = plan.spec.kv_layers[cache], plan.kv_layout.place_of[cache]
        if place in places:
            continue
        places.add(place)
        parts = _parts_of(layer.num_kv_heads, num_ranks)
        if counts[0][number] == layer.num_kv_heads:  # not divided: all ranks have all
            parts = [range(layer.num_kv_heads)] * num_ranks
        assert [len(part) for part in parts] == [count[number] for count in counts]
        head_bytes = plan.limits.block_size * KV_FORMATS[plan.kv_format].row_bytes(layer.head_dim)
        held = HeldHeads(layer.num_kv_heads, tuple(parts), head_bytes)
        found += [held] * (1 if layer.is_latent else 2)
    return found


def _parts_of(num_heads: int, num_ranks: int) -> list[range]:
    """Return each rank's heads: some of them, or one that several ranks have."""
    if num_ranks <= num_heads:
        return split_evenly(num_heads, num_ranks)
    shares = enumerate(split_evenly(num_ranks, num_heads))
    return [range(head, head + 1) for head, ranks in shares for _ in ranks]


def _identity(planned: PlannedModel, states: States) -> bytes:
    """Reads all of the weights where they are not known. Raises OSError, and CheckpointError where
    they are no longer those that were loaded."""
    plan = planned.plan
    given = None if plan.tiers is None else plan.tiers.folder
    folder = None if given is None else Path(given).expanduser()
    digest = identity_digest(["transfer", *deciding_facts(plan, planned.files, folder)])
    check_unchanged(states)
    return digest
