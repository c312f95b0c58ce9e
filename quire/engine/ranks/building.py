"""What a rank is made of: built as rank 0 describes it, and connected with the others.

Imports all that a rank needs, which takes seconds: `__main__` gives signs of life meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from quire.common.file_states import check_unchanged
from quire.config.engine import EngineConfig
from quire.core.adapters import AdapterOrder
from quire.engine.assembly.builder import adapter_loader, adapter_table, kv_memory, part_of, select
from quire.engine.assembly.loading import load_model
from quire.engine.assembly.preparation import plan_engine
from quire.engine.assembly.threads import set_num_threads
from quire.engine.plan.machine import Machine
from quire.engine.ranks.launch import facts
from quire.executor.divided_memory import LaterBlocks
from quire.executor.follower import Follower, StageFollower
from quire.kernels.exchange import Exchange
from quire.kernels.lora import PackedAdapter
from quire.nn.decoder import DecoderModel
from quire.parallel.adapters import FollowedAdapters
from quire.parallel.processes import BEAT_INTERVAL_S
from quire.parallel.sections import ROUND_S, GroupShape, Sections
from quire.parallel.shared_memory import SharedMemory
from quire.parallel.transports import GroupMemory, join
from quire.worker.memory import KVMemory

_ALL_MEMORY = 1 << 60
"""What fits was decided where the group was planned; some of it is taken by now."""


def build_rank(start: Mapping[str, Any]) -> tuple[Callable[[], None], Callable[[], None]]:
    """Build what rank 0 describes, and begin to give signs of life. Returns what serves, and what
    ends all this."""
    shape = GroupShape(start["num_stages"], start["num_ranks"])
    membership = join(
        start, GroupMemory(shape, start["command_bytes"], start["silence_s"]), facts()
    )
    sections = membership.sections
    stage, rank = divmod(start["rank"], shape.num_ranks)
    shared, exchange = sections.exchange(stage, rank)
    place = _Place(stage, rank, shared, exchange)
    connect = _connect(sections, place)
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(BEAT_INTERVAL_S):
            sections.beat()

    sections.beat()
    threading.Thread(target=beat, name="quire-beat", daemon=True).start()
    check_unchanged(start["files"], are_copies=start["are_copies"])
    config = EngineConfig.from_options(start["model"], start["options"])
    machine = replace(Machine.inspect(), available_memory=_ALL_MEMORY)
    planned = plan_engine(config, machine)
    set_num_threads(planned.plan.num_threads)
    part = part_of(planned.plan, None if shape.num_ranks == 1 else exchange, stage)
    kernels = select(planned.plan).kernels
    loader = adapter_loader(planned.plan, kernels, part)
    load = None if loader is None else loader.load
    table = adapter_table(planned.plan, load)  # so that projections take adapters
    model = load_model(planned, kernels, table, part).decoder
    if loader is not None:
        loader.model = model.weights
    check_unchanged(start["files"], are_copies=start["are_copies"])  # also while they were read
    memory = kv_memory(planned.plan, model)
    membership.connect()

    def end() -> None:
        is_over.set()
        membership.close()

    return partial(connect, model, memory, _followed(load)), end


def _followed(load: Callable[[AdapterOrder], PackedAdapter] | None) -> FollowedAdapters:
    if load is None:
        return FollowedAdapters()
    return FollowedAdapters(lambda files: load(AdapterOrder(files.digest, files.folder)))


class _Place(NamedTuple):
    """Which of the group's processes this is, and what the ranks of its stage share."""

    stage: int
    rank: int
    shared: SharedMemory
    exchange: Exchange


def _connect(
    sections: Sections, place: _Place
) -> Callable[[DecoderModel, KVMemory, FollowedAdapters], None]:
    """Return what serves with a model, until the first process is gone. Signs of life are given on
    all ways in and out from now on, as far as there are connections."""
    shape, (stage, rank, shared, exchange) = sections.shape, place
    if stage == 0:
        return lambda model, memory, adapters: Follower(
            model, memory, adapters, shared, exchange
        ).serve(lambda: True)
    is_last = stage == shape.num_stages - 1
    source = sections.receiver(stage, rank)
    next_stage = sections.sender(stage + 1) if rank == 0 and not is_last else None
    results = sections.result_sender() if rank == 0 and is_last else None
    # the first process may be stopped, by Ctrl-Z, as long as one likes; no other one is
    wait_s = ROUND_S if stage == 1 else -1.0

    def serve(model: DecoderModel, memory: KVMemory, adapters: FollowedAdapters) -> None:
        if next_stage is not None:
            next_stage.greet()
        caches = model.caches
        assert caches is not None, "a stage that does not know its caches"
        blocks = LaterBlocks(memory, stage, rank, None if shape.num_ranks == 1 else exchange)
        follower = StageFollower(
            model, memory, adapters, source, caches, blocks,
            next_stage=next_stage, results=results, is_last=is_last,
        )  # fmt: skip
        follower.serve(lambda: True, wait_s)

    return serve
