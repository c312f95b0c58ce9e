"""What drafts: a whole model that reads tokens, or a head that reads the target's states, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.interface import AttentionBatch
from quire.kernels.placed import PlacedRows, StepContent
from quire.nn.context import StepContext
from quire.nn.decoder import DecoderModel
from quire.sampling.sampler import Sampler
from quire.spec.states import KeptStates
from quire.spec.vocabulary import TokenMap

Stage = Callable[[Sequence[NDArray[Any]]], list[Tensor]]
"""Moves arrays to the device of the model."""


@dataclass(frozen=True)
class HeadInputs:
    """What a head needs of the target."""

    kept: KeptStates
    target: DecoderModel
    """Whose output projection it takes where it has none."""
    reads_normed: bool
    """Whether the states that are kept are read behind the target's final norm."""
    feeds_normed: bool
    """Whether its own are read behind its own final norm."""


@dataclass(frozen=True)
class DraftModel:
    """The model, and what it works with."""

    model: DecoderModel
    caches: Sequence[tuple[Tensor, Tensor]]
    """Of each layer, in the order of the model's own."""
    tokens: TokenMap
    sampler: Sampler
    stage: Stage
    max_len: int
    """Positions that it has."""
    max_read: int
    """Tokens of all rows that are computed after one step to catch up with the target."""
    head: HeadInputs | None = None
    """None: it reads tokens alone."""

    @property
    def lag(self) -> int:
        """Positions that a sequence has fewer than tokens: a head needs the token behind each."""
        return 0 if self.head is None else 1

    @property
    def weights(self) -> list[Tensor]:
        """All weights, those that are shared with the target among them."""
        fuse = [] if self.head is None else self.head.kept.weights
        return [*self.model.weights.tensors, *self.model.derived, *fuse]

    @property
    def memory(self) -> list[Tensor]:
        """What holds keys and values, and states of the target."""
        states = [] if self.head is None else [self.head.kept.states]
        return [*(tensor for pair in self.caches for tensor in pair), *states]

    def kept(self, blocks: NDArray[np.int32], first: int, end: int) -> Tensor:
        """Return the target's states of positions of a row with these blocks, as a head reads
        them."""
        head = self.head
        assert head is not None
        states = head.kept.at(blocks, np.arange(first, end))
        return head.target.normed(states) if head.reads_normed else states

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        wanted: Tensor | None,
        states: Sequence[Tensor],
    ) -> Tensor:
        """Run one pass, as `DecoderModel.forward`; a head reads these states, one after another."""
        if self.head is None:
            return self.model.forward(token_ids, positions, StepContext(batch, self.caches, wanted))
        placed = PlacedRows(torch.arange(len(token_ids)), torch.cat(list(states)))
        return self.model.run(
            token_ids, positions, batch, self.caches, wanted, None, StepContent(placed)
        )

    def outcome(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of the target's tokens, [R, V], of hidden states, and what a head reads
        next of each."""
        model, head = self.model, self.head
        if head is None:
            return self.tokens.logits(model.logits(states)), states
        normed = model.normed(states)
        owner = model if model.program.head.weight is not None else head.target
        logits = self.tokens.logits(owner.head_logits(normed))
        return logits, normed if head.feeds_normed else states
