"""The executor of several ranks: the worker of rank 0 in this process, whose model asks other
processes for what they hold.

Rows, sampling and everything else of a step are rank 0's alone. When a rank is lost, so is the
step, and what the others kept of all sequences: `StepLostError` has the loop compute these again,
once the rank has been replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NoReturn

import torch

from quire.core.plan import BlockCopy, CompanionError, StepPlan, StepResult
from quire.errors import EngineError
from quire.executor.inline import InlineExecutor
from quire.executor.interface import Launched, StepLostError
from quire.kernels.interface import ForwardPass, Kernels
from quire.models.kv_layout import KVLayout
from quire.nn.decoder import DecoderModel
from quire.nn.head import DividedHead
from quire.parallel.adapters import LedAdapters
from quire.parallel.divided import LedHead, LedPass
from quire.parallel.group import GroupLostError, RankGroup
from quire.parallel.pipeline import StagedPass
from quire.parallel.shared_memory import Kind, RankCommand
from quire.sampling.processors import ProcessorTable
from quire.worker.memory import KVMemory
from quire.worker.staging import Staging
from quire.worker.worker import Worker

logger = logging.getLogger(__name__)

MAX_LOSSES = 3
"""In a row, without a step in between. Then the step's own requests are taken for the cause."""


class LedMemory(KVMemory):
    """Rank 0's part of the KV memory: what is copied here, the others copy, too."""

    def __init__(self, own: KVMemory, group: RankGroup, layout: KVLayout) -> None:
        """`layout` is that of all stages together."""
        vars(self).update(vars(own))
        self.layout = layout
        self._group = group

    def copy_blocks(self, copies: Sequence[BlockCopy], kernels: Kernels, stage: Staging) -> None:
        """See `KVMemory.copy_blocks`."""
        if copies:
            pairs = torch.tensor([tuple(copy) for copy in copies], dtype=torch.int64)
            copy_own = partial(super().copy_blocks, copies, kernels, stage)
            command = RankCommand(Kind.COPY_BLOCKS, (), (pairs,))
            self._group.tell(command, copy_own)


def lead(
    model: DecoderModel,
    memory: KVMemory,
    group: RankGroup,
    layout: KVLayout,
    adapters: LedAdapters | None = None,
) -> tuple[DecoderModel, KVMemory]:
    """Return the first process's model and KV memory so that the others follow them. `layout` is
    that of all stages together."""
    head = model.divided_head
    if head is not None:
        assert isinstance(head, DividedHead)
        head = LedHead(head, group)
    run: ForwardPass = LedPass(model.run, group, adapters)
    if group.shape.num_stages > 1:
        run = StagedPass(run, group, range(len(memory.caches)), adapters)
    return replace(model, run=run, divided_head=head), LedMemory(memory, group, layout)


class RanksExecutor(InlineExecutor):
    """Runs plans on a group of ranks."""

    def __init__(self, worker: Worker, processors: ProcessorTable, group: RankGroup) -> None:
        super().__init__(worker, processors)
        self.group = group
        self._num_losses = 0

    def launch(self, plan: StepPlan) -> Launched:
        """See `Executor.launch`."""
        if self.group.is_lost:
            self._replace("a rank of the group is gone")
        try:
            launched = self.worker.launch(plan)
        except GroupLostError as error:
            self._replace(str(error))
        except CompanionError as error:  # one that reads or writes the blocks of all ranks
            if not self.group.is_lost:
                raise
            self._replace(str(error.__cause__))
        if plan.work:  # one without asks nothing of the others
            self._num_losses = 0
        return launched

    def execute(self, plan: StepPlan) -> StepResult:
        """See `Executor.execute`."""
        return self.launch(plan)()

    def close(self) -> None:
        """See `Executor.close`."""
        self.group.close()
        super().close()

    def _replace(self, reason: str) -> NoReturn:
        """Start the other ranks anew. Always raises: the step is lost, or, after several losses in
        a row, its requests are, too."""
        logger.error("a rank is lost; %d processes are replaced", self.group.shape.size - 1)
        try:
            self.group.restart()
        except EngineError as failed:  # one of the new ones is lost, too: the next step finds it so
            reason = str(failed)
        self._num_losses += 1
        if self._num_losses > MAX_LOSSES:
            self._num_losses = 0
            error = GroupLostError(f"{MAX_LOSSES} groups in a row were lost: {reason}")
            raise StepLostError(str(error), costs_requests=True) from error
        raise StepLostError(reason)
