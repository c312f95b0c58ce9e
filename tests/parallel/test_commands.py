"""What the processes of a group are told has room in their memory, at the limits of what is served."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from quire.executor.divided_memory import LaterBlocks
from quire.kernels import cpu
from quire.kernels.interface import AttentionBatch
from quire.kernels.lora import PackedAdapter, StepAdapters
from quire.parallel.adapters import AdapterFiles, FollowedAdapters, LedAdapters
from quire.parallel.divided import asked, pass_of
from quire.parallel.group import RankGroup
from quire.parallel.pipeline import with_states
from quire.parallel.sections import GroupShape, Sections
from quire.parallel.shared_memory import (
    MOST_GATHERED_BYTES,
    Kind,
    RankCommand,
    SharedMemory,
    bytes_of_command,
    create_memory,
)

pytestmark = pytest.mark.skipif(
    cpu.IMPORT_ERROR is not None or not hasattr(os, "memfd_create"),
    reason="commands need the native module and memory without a name",
)
NUM_ROWS = 300


class Adapter:
    """Stands for what a back end packs."""

    def __init__(self, name: str) -> None:
        self.name = name


class Group:
    """The other processes, as far as adapters go: one that is told at once."""

    num_starts = 1

    def __init__(self) -> None:
        self.followed = FollowedAdapters(lambda files: cast(PackedAdapter, Adapter(files.digest)))

    def tell(self, command: RankCommand) -> None:
        self.followed.load(command)


def test_each_of_many_rows_may_use_an_adapter_of_its_own() -> None:
    group = Group()
    led = LedAdapters(cast(RankGroup, group))
    adapters = [cast(Any, Adapter(f"{number}")) for number in range(NUM_ROWS)]
    for each in adapters:
        led.note(each, AdapterFiles(each.name, "/folder"))
    rows = torch.arange(NUM_ROWS)
    batch = AttentionBatch(
        torch.arange(NUM_ROWS + 1, dtype=torch.int32), torch.ones(NUM_ROWS, dtype=torch.int32),
        torch.zeros(NUM_ROWS, 1, dtype=torch.int32), rows, torch.zeros_like(rows), 1, 1,
    )  # fmt: skip
    used = StepAdapters(tuple(adapters), rows.to(torch.int32))
    command = asked(rows, batch.positions, batch, None, led, used)
    size = bytes_of_command(NUM_ROWS * 100, 12)
    fileno = create_memory(size)
    try:
        memory = SharedMemory(fileno, size)
        memory.write(with_states(command, 0, torch.ones(NUM_ROWS, 4)))
        found = memory.read()
        plain = RankCommand(found.kind, found.numbers[1:], found.tensors[1:])
        theirs = pass_of(plain, group.followed).adapters
        assert theirs is not None and torch.equal(theirs.of_token, used.of_token)
        assert [cast(Any, each).name for each in theirs.adapters] == [
            each.name for each in adapters
        ]
    finally:
        os.close(fileno)


@pytest.mark.parametrize(
    "shape", [GroupShape(1, 64), GroupShape(64, 1), GroupShape(2, 32)], ids=str
)
def test_as_many_processes_as_are_allowed_find_their_places(shape: GroupShape) -> None:
    size = bytes_of_command(0, 0)
    filenos = Sections.create(shape, size)
    try:
        sections = Sections(filenos, shape, size, 5.0)
        observers = sections.observers()
        for stage in range(shape.num_stages):
            for rank in range(shape.num_ranks):
                sections.exchange(stage, rank)
                if stage:
                    sections.receiver(stage, rank)
        sections.beat()
        assert not any(each.native.is_lost for each in observers)
        for each in observers:
            each.native.lose(0)
        assert all(each.native.is_lost for each in observers)
    finally:
        for fileno in filenos:
            os.close(fileno)


def test_blocks_larger_than_the_buffer_of_exchanges_are_read_of_all_ranks_of_a_stage() -> None:
    """One of 128 tokens of 40 layers has 20 MB."""
    width, fileno = MOST_GATHERED_BYTES // 2 + 100, create_memory(1 << 16)
    parts = np.random.default_rng(0).integers(0, 256, (2, width), np.uint8)
    found = dict[int, torch.Tensor | None]()

    def read(rank: int) -> None:
        exchange = SharedMemory(fileno, 1 << 16).exchange(rank, 2, 20.0)
        memory: Any = SimpleNamespace(read_blocks=lambda blocks: parts[rank])
        command = RankCommand(
            Kind.READ_BLOCKS, (width,), (torch.tensor([5]), torch.empty((1, 0), dtype=torch.uint8))
        )
        found[rank] = LaterBlocks(memory, 1, rank, exchange).read(command).tensors[1]

    try:
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(read, range(2)))
    finally:
        os.close(fileno)
    for rank in range(2):
        whole = found[rank]
        assert whole is not None and np.array_equal(whole.numpy(), parts.reshape(1, -1))
