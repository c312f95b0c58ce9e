"""Processes that do as others say: ranks of the first stage, and those of later ones."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.core.plan import BlockCopy
from quire.executor.divided_memory import LaterBlocks
from quire.kernels.exchange import Exchange
from quire.nn.decoder import DecoderModel
from quire.nn.head import DividedHead
from quire.parallel.adapters import FollowedAdapters
from quire.parallel.divided import forward
from quire.parallel.pipeline import run_stage, with_states
from quire.parallel.sections import ROUND_S, ResultSender, StageReceiver, StageSender
from quire.parallel.shared_memory import Extent, Kind, RankCommand, SharedMemory
from quire.worker.memory import KVMemory
from quire.worker.staging import Staging


class Follower:
    """A rank of the first stage: its model, and its part of the KV memory."""

    def __init__(
        self,
        model: DecoderModel,
        memory: KVMemory,
        adapters: FollowedAdapters,
        shared: SharedMemory,
        exchange: Exchange,
    ) -> None:
        self._model, self._memory, self._adapters = model, memory, adapters
        self._shared, self._exchange = shared, exchange
        self._stage = Staging(model.kernels.device)

    @torch.inference_mode()
    def serve(self, goes_on: Callable[[], bool]) -> None:
        """Do what is asked, as long as rank 0 is there to ask. Raises what goes wrong: the group
        is then over."""
        native = self._exchange.native
        while goes_on():
            if native.wait_posted(ROUND_S):
                native.finish(*self._do(self._shared.read()))

    def _do(self, command: RankCommand) -> Extent:
        """Return what was written for rank 0 of the memory."""
        if command.kind in (Kind.READ_BLOCKS, Kind.WRITE_BLOCKS):
            return self._move(command)
        if command.kind == Kind.FORWARD:
            forward(self._model.run, command, self._memory.caches, self._adapters)
        elif command.kind == Kind.LOAD_ADAPTER:
            self._adapters.load(command)
        else:
            self._use(command)
        return Extent()

    def _use(self, command: RankCommand) -> None:
        (tensor,) = command.tensors
        assert tensor is not None
        if command.kind == Kind.COPY_BLOCKS:
            copies = [BlockCopy(*pair) for pair in tensor.tolist()]
            self._memory.copy_blocks(copies, self._model.kernels, self._stage)
            return
        head = self._model.head
        assert isinstance(head, DividedHead)
        if command.kind == Kind.LOGITS:
            head.logits(tensor)
        else:
            head.argmax(tensor)

    def _move(self, command: RankCommand) -> Extent:
        """Copy this rank's part of blocks to the shared memory, or from it."""
        blocks, room = command.tensors
        assert blocks is not None and room is not None
        numbers = blocks.tolist()
        own = room[self._exchange.rank].view(torch.uint8)[: len(numbers) * self._memory.block_bytes]
        if command.kind == Kind.READ_BLOCKS:
            own.copy_(torch.from_numpy(self._memory.read_blocks(numbers)))
            return self._shared.extent_of(own)
        self._memory.write_blocks(numbers, own.numpy())
        return Extent()


class StageFollower:
    """A rank of a later stage: its model, and its part of the KV memory."""

    def __init__(
        self,
        model: DecoderModel,
        memory: KVMemory,
        adapters: FollowedAdapters,
        source: StageReceiver,
        caches: range,
        blocks: LaterBlocks,
        *,
        next_stage: StageSender | None = None,
        results: ResultSender | None = None,
        is_last: bool = False,
    ) -> None:
        """Of a stage, the first rank alone has the way to the next one, or the way back."""
        self._model, self._memory, self._adapters = model, memory, adapters
        self._source, self._blocks = source, blocks
        self._caches, self._is_last = caches, is_last
        self._next_stage, self._results = next_stage, results
        self._stage = Staging(model.kernels.device)

    @torch.inference_mode()
    def serve(self, goes_on: Callable[[], bool], wait_s: float) -> None:
        """Compute what the stage before gives, as long as there is one. Raises what goes wrong: the
        group is then over. `wait_s` is for `StageReceiver.receive`."""
        while goes_on():
            command = self._source.receive(wait_s)
            if command is not None:
                self._do(command)

    def _do(self, command: RankCommand) -> None:
        if command.kind == Kind.READ_BLOCKS:
            self._read(command)
            return
        if command.kind != Kind.STAGE:
            self._use(command)
            if self._next_stage is not None:
                self._next_stage.send(command)
            return
        plain, first_row, states = run_stage(
            self._model.run, command, self._memory.caches, self._caches, self._adapters,
            is_last=self._is_last,
        )  # fmt: skip
        if self._next_stage is not None:
            self._next_stage.send(with_states(plain, first_row, states))
        if self._results is not None:
            self._results.send(first_row, states)

    def _use(self, command: RankCommand) -> None:
        if command.kind == Kind.LOAD_ADAPTER:
            self._adapters.load(command)
        elif command.kind == Kind.WRITE_BLOCKS:
            self._blocks.write(command)
        else:
            (pairs,) = command.tensors
            assert command.kind == Kind.COPY_BLOCKS and pairs is not None
            copies = [BlockCopy(*pair) for pair in pairs.tolist()]
            self._memory.copy_blocks(copies, self._model.kernels, self._stage)

    def _read(self, command: RankCommand) -> None:
        """Pass blocks on with this stage's layers; from the last one to the first process."""
        found = self._blocks.read(command)
        if self._next_stage is not None:
            self._next_stage.send(found)
        if self._results is not None:
            _, collected = found.tensors
            assert collected is not None
            self._results.send(0, collected)
