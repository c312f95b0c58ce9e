"""A decoder that runs: token ids in, hidden states and logits out.

Owns what follows the program that its back end runs: the head. Never samples, never allocates KV
memory, never knows a request. The caller picks the rows of `hidden` that need logits; only those go
through the final norm and the output projection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quire.kernels.interface import ForwardPass, Kernels, Weights
from quire.kernels.interpreter import normed
from quire.kernels.lora import AdapterRows, StatePlaces, StepAdapters
from quire.kernels.placed import ContentSource, StepContent
from quire.kernels.sampling import Draws
from quire.models.declaration import DecoderSpec
from quire.nn.context import StepContext
from quire.nn.head import OutputHead, PackedHead
from quire.program.operations import Program


class StateKeeper(Protocol):
    """Keeps hidden states of all tokens, for a draft head."""

    def keep(self, states: Tensor, slots: Tensor) -> Tensor:
        """Take what a step's program gives, [T, width], of tokens whose keys and values are in
        these slots, int64 [T]. Returns the hidden states, [T, H], of its first columns."""
        ...


@dataclass(frozen=True, slots=True)
class DecoderModel:
    """Weights in their final form, and the kernels that they were packed for."""

    spec: DecoderSpec
    kernels: Kernels
    program: Program
    weights: Weights
    run: ForwardPass
    """The program, as the back end runs it."""
    num_bytes: int
    """Memory that the weights take, tables of RoPE included."""
    adapters: AdapterRows | None = None
    """Who uses which adapter; None where the program takes none."""
    images: ContentSource | None = None
    """What stands in place of tokens, in a model that reads images."""
    divided_head: OutputHead | None = None
    """The head, where `weights` have a part of it alone."""
    caches: range | None = None
    """Of the model's, those that this process's stage has; None: all."""
    keeper: StateKeeper | None = None
    """Of the hidden states of all tokens, which are all computed then."""

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.tables[0].dtype

    @property
    def derived(self) -> Sequence[Tensor]:
        """What the back end made of the weights for itself."""
        held: Sequence[Tensor] = getattr(self.run, "derived", ())
        return held

    @property
    def head(self) -> OutputHead:
        """The output projection, of a model that has one."""
        assert self.program.head.weight is not None, "this model has no logits of tokens"
        whole = PackedHead(self.kernels, self.weights.linears[self.program.head.weight])
        return self.divided_head or whole

    def forward(self, token_ids: Tensor, positions: Tensor, context: StepContext) -> Tensor:
        """Run one pass over the step's tokens: ids and positions int64 [T] to hidden states [T, H],
        before the final norm.

        Writes K and V of every token to `context.kv_caches`. Positions must be below
        `weights.max_model_len`. Hidden states that `context.num_wanted` leaves out may be those of
        an earlier layer.
        """
        adapters = None
        if self.adapters is not None and context.rows is not None:
            batch = context.batch
            adapters = self.adapters.of_step(context.rows, batch.query_start, batch.context_len)
        keeper = self.keeper
        states = self.run(
            token_ids,
            positions,
            context.batch,
            context.kv_caches,
            context.num_wanted if keeper is None else None,
            adapters,
            self._content(context),
        )
        return states if keeper is None else keeper.keep(states, context.batch.slots)

    def is_recordable(self, rows: Sequence[int] | None) -> bool:
        """Whether tokens and positions alone decide what the sequences in these rows give."""
        return self.images is None or not self.images.concerns(rows or ())

    def _content(self, context: StepContext) -> StepContent | None:
        if self.images is None or context.rows is None:
            return None
        batch = context.batch
        return self.images.of_step(context.rows, batch.query_start, batch.context_len)

    def logits(self, hidden: Tensor, places: StatePlaces | None = None) -> Tensor:
        """Rows of hidden states [R, H] to float32 logits [R, V]; `places` say where they come from,
        in a model that takes adapters."""
        return self.head_logits(self.normed(hidden), places)

    def head_logits(self, states: Tensor, places: StatePlaces | None = None) -> Tensor:
        """The same of states behind the final norm."""
        logits, number = self.head.logits(states), self.program.head.weight
        adapters = self._head_adapters(places)
        if adapters is not None and number is not None:
            self.kernels.add_lora(logits, states, adapters, number)
        cap = self.program.head.soft_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _head_adapters(self, places: StatePlaces | None) -> StepAdapters | None:
        """Of states that come from there, those that change the head; None where none does."""
        number = self.program.head.weight
        if self.adapters is None or places is None or number is None:
            return None
        return self.adapters.of_states(places, number)

    def best_tokens(
        self, hidden: Tensor, places: StatePlaces | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """Return each row's best token and its logit, ids int64 [R] and float32 [R]:
        `SamplingKernels.argmax` of `logits(hidden)`.

        None where it takes the logits themselves: a soft cap may round two of them to one number,
        which then tie, and an adapter may change them.
        """
        if self.program.head.soft_cap is not None or self._head_adapters(places) is not None:
            return None
        return self.head.argmax(self.normed(hidden))

    def drawn_tokens(
        self, hidden: Tensor, draws: Draws, places: StatePlaces | None = None
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """`best_tokens`, and what `SamplingKernels.draw` gives for `logits(hidden)`, int64 [n].
        None where it takes those."""
        if self.program.head.soft_cap is not None or self._head_adapters(places) is not None:
            return None
        return self.head.draws(self.normed(hidden), draws)

    def normed(self, hidden: Tensor) -> Tensor:
        """Rows of hidden states behind the final norm, where there is one."""
        norm = self.program.head.norm
        rows = hidden.contiguous()
        return rows if norm is None else normed(self.kernels, self.weights, norm, rows)
