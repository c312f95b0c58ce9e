"""Steps that are replayed: a GPU is given a small step's forward pass as one recorded graph instead
of hundreds of launches.

A graph is recorded for a *shape*: so many tokens, and contexts up to some length. A step is padded
to the next shape there is. A padded token is a sequence of its own in the scratch block, which
belongs to no pool, so it changes no sequence's memory; and a row's bits depend neither on batch
composition nor on how far attention might have looked, so a replayed step gives the bits of one
that is computed operation by operation.

A step in which sequences share long prefixes is left alone where reading these once spares more
than a graph does.

Graphs are recorded in idle moments, the most used shapes first, or once a shape has been used so
often that recording it pays; until then steps are computed as if there were none, so no step waits
for a graph. Owns the recorded graphs, the place where their inputs and outputs lie, and the bound
on what they hold. It knows arrays, not rows or plans.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from quire.common.failures import log_failure
from quire.common.graph_shapes import StepShape, shape_for
from quire.worker.batch import StepArrays, StepInputs
from quire.worker.prefixes import num_spared
from quire.worker.staging import Staging, packed_len

logger = logging.getLogger(__name__)

PAYING_USES = 16
"""A shape used so often is recorded even while there is no idle moment: that costs about as much as
three steps without a graph (one to compile and warm up, one to record, one to be sure), of which
each replay saves a good part. Estimated, not measured.
"""


class GraphBackend(Protocol):
    """What records and replays."""

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Record what `compute` asks of the device; what is returned does it again,
        on what then lies in the same places."""
        ...

    @property
    def held_bytes(self) -> int:
        """Memory that everything recorded so far holds."""
        ...


class CudaGraphs:
    """CUDA graphs whose temporary tensors share one pool: replays follow one another, so one may
    use what another did.

    `bytes_each` estimates what the driver keeps for one graph: it does not tell, and free memory is
    shared with other processes.
    """

    def __init__(self, bytes_each: int) -> None:
        self._bytes_each = bytes_each
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        # kernels are compiled and loaded, which must not happen while a graph is recorded
        compute()
        torch.cuda.synchronize()
        reserved_before = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                compute()
            finally:
                graph.capture_end()
        graph.replay()  # loads the graph onto the device
        torch.cuda.synchronize()
        self._held_bytes += torch.cuda.memory_reserved() - reserved_before + self._bytes_each
        replay: Callable[[], None] = graph.replay
        return replay


class GraphSettings(NamedTuple):
    """What the plan allows."""

    max_num_tokens: int
    """Larger steps are never recorded: launches are a small part of them."""
    max_model_len: int
    max_bytes: int
    """Of all graphs together."""
    min_shared_blocks: int = 1
    """A step whose neighbours share so many blocks is not replayed: computed otherwise,
    it reads them once."""
    paying_uses: int = PAYING_USES


class StepGraphs:
    """The recorded steps of one worker."""

    def __init__(
        self, compute: Callable[[StepInputs], Tensor], stage: Staging, backend: GraphBackend,
        settings: GraphSettings, scratch: ScratchBlock,
    ) -> None:  # fmt: skip
        self._compute = compute
        self._stage = stage
        self._backend = backend
        self.settings = settings
        self._scratch = scratch
        self._replays: dict[StepShape, Callable[[], None]] = {}
        self._uses: Counter[StepShape] = Counter()
        """Of shapes that are not recorded yet."""
        self._is_full = False
        self._inputs = torch.empty(0, dtype=torch.uint8, device=stage.device)
        self._hidden: Tensor | None = None

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        """Those recorded so far, in the order in which they were."""
        return tuple(self._replays)

    def forward(self, arrays: StepArrays) -> Tensor | None:
        """Hidden states [T, H], valid until the next call;
        None where the step is to be computed without a graph."""
        shape = shape_for(
            len(arrays.token_ids), arrays.max_context_len, self.settings.max_model_len
        )
        if shape is None or shape.num_tokens > self.settings.max_num_tokens:
            return None
        if arrays.runs and num_spared(arrays.runs) >= self.settings.min_shared_blocks:
            return None
        if shape not in self._replays:
            self._uses[shape] += 1
            if self._uses[shape] < self.settings.paying_uses or not self._record(shape):
                return None
        self._stage.into(padded(arrays, shape, self._scratch).parts, self._inputs)
        self._replays[shape]()
        assert self._hidden is not None
        return self._hidden[: len(arrays.token_ids)]

    def record_next(self) -> bool:
        """In an idle moment: record the most used shape that was met;
        False where there is none left."""
        return (
            not self._is_full and bool(self._uses) and self._record(self._uses.most_common(1)[0][0])
        )

    def _record(self, shape: StepShape) -> bool:
        """Record a shape, on scratch tokens; False where that cannot be.

        A failure is said, and nothing is recorded from then on: torch's allocator may be left as if
        a recording went on.
        """
        if self._is_full:
            return False
        try:
            self._replays[shape] = self._backend.record(self._computation(shape))
        except Exception as error:
            log_failure(
                logger,
                (
                    f"no graph of steps of {shape.num_tokens} tokens could be recorded; no more "
                    "are tried"
                ),
                error,
            )
            self._is_full = True
            return False
        del self._uses[shape]
        held, allowed = self._backend.held_bytes, self.settings.max_bytes
        if held > allowed:
            self._is_full = True
            logger.warning(
                "recorded steps hold %d bytes, planned were %d: no more of them are recorded",
                held,
                allowed,
            )
        return True

    def _computation(self, shape: StepShape) -> Callable[[], None]:
        """Return the forward pass of a shape, from and to places that stay."""
        arrays = padded(None, shape, self._scratch)
        if self._inputs.nbytes == 0:
            largest = shape_for(
                self.settings.max_num_tokens,
                self.settings.max_model_len,
                self.settings.max_model_len,
            )
            assert largest is not None
            num_bytes = packed_len(padded(None, largest, self._scratch).parts)
            self._inputs = torch.empty(num_bytes, dtype=torch.uint8, device=self._stage.device)
        inputs = arrays.on_device(self._stage.into(arrays.parts, self._inputs))
        if self._hidden is None:
            sample = self._compute(inputs)
            num_rows = max(self.settings.max_num_tokens, shape.num_tokens)
            self._hidden = torch.empty(
                (num_rows, sample.shape[1]), dtype=sample.dtype, device=sample.device
            )
        hidden = self._hidden

        def compute() -> None:
            hidden[: shape.num_tokens].copy_(self._compute(inputs))

        return compute


class ScratchBlock(NamedTuple):
    """A block that belongs to no sequence: padded tokens read and write there."""

    block: int
    block_size: int
    num_groups: int = 1


def padded(arrays: StepArrays | None, shape: StepShape, scratch: ScratchBlock) -> StepArrays:
    """Return a step made as large as a shape: `shape.num_tokens` tokens and as many sequences. None
    stands for a step of nothing.

    Each padded token is a sequence of one token in the scratch block, at position 0; where there
    are more sequences than tokens to pad, the last ones have none.
    """
    num_rows, num_columns = shape.num_tokens, -(-shape.max_context_len // scratch.block_size)
    num_tokens = num_sequences = 0
    if arrays is not None:
        num_tokens, num_sequences = len(arrays.token_ids), len(arrays.context_len)
    query_start = np.minimum(
        num_tokens + np.arange(-num_sequences, num_rows - num_sequences + 1), num_rows
    ).astype(np.int32)
    context_len = np.ones(num_rows, np.int32)
    num_groups = scratch.num_groups
    block_tables = np.full((num_groups, num_rows, num_columns), scratch.block, np.int32)
    slots = np.full((num_groups, num_rows), scratch.block * scratch.block_size, np.int64)
    positions, token_ids = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
    if arrays is not None:
        query_start[: num_sequences + 1] = arrays.query_start
        context_len[:num_sequences] = arrays.context_len
        block_tables[:, :num_sequences, : arrays.block_tables.shape[2]] = arrays.block_tables
        slots[:, :num_tokens], positions[:num_tokens] = arrays.slots, arrays.positions
        token_ids[:num_tokens] = arrays.token_ids
    return StepArrays(
        query_start,
        context_len,
        block_tables,
        slots,
        positions,
        token_ids,
        num_rows,
        shape.max_context_len,
    )
