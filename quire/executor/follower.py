"""A rank that does as rank 0 says: passes, its part of the head, and copies of blocks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.core.plan import BlockCopy
from quire.kernels.exchange import Exchange
from quire.nn.decoder import DecoderModel
from quire.nn.head import DividedHead
from quire.parallel.divided import Kind, forward
from quire.parallel.shared_memory import RankCommand, SharedMemory
from quire.worker.memory import KVMemory
from quire.worker.staging import Staging

_ROUND_S = 1.0
"""Between two looks at whether to go on, while nothing is asked."""


class Follower:
    """One rank's model and its part of the KV memory."""

    def __init__(
        self, model: DecoderModel, memory: KVMemory, shared: SharedMemory, exchange: Exchange
    ) -> None:
        self._model, self._memory = model, memory
        self._shared, self._exchange = shared, exchange
        self._stage = Staging(model.kernels.device)

    @torch.inference_mode()
    def serve(self, goes_on: Callable[[], bool]) -> None:
        """Do what is asked, as long as rank 0 is there to ask. Raises what goes wrong: the group
        is then over."""
        native = self._exchange.native
        while goes_on():
            if native.wait_posted(_ROUND_S):
                self._do(self._shared.read())
                native.finish()

    def _do(self, command: RankCommand) -> None:
        if command.kind == Kind.FORWARD:
            forward(self._model.run, command, self._memory.caches)
            return
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
