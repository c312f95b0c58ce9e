"""A decoder that runs: token ids in, hidden states and logits out.

Owns the order of a forward pass, which a back end may have compiled into one call; `walk` is the same pass operation by
operation, and the definition of what the compiled one must give, bit for bit, for every wanted token. Never samples, never
allocates KV memory, never knows a request. The caller picks the rows of `hidden` that need logits; only those go through the
final norm and the output projection.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.interface import DecoderWeights, EmbeddingTable, ForwardPass, Kernels, PackedLinear
from quire.kernels.sampling import Draws
from quire.models.declaration import DecoderSpec
from quire.nn.context import StepContext
from quire.nn.layers import Block, Norm, Stream


@dataclass(frozen=True, slots=True)
class DecoderModel:
    """Weights in their final form, and the kernels that they were packed for."""

    spec: DecoderSpec
    kernels: Kernels
    embedding: EmbeddingTable
    """[V, H] in the compute dtype; the head's own memory where the two are tied and the head holds floats."""
    embedding_scale: float
    """Rounded to the compute dtype, as the models were trained."""
    position_embedding: Tensor | None
    blocks: tuple[Block, ...]
    final_norm: Norm
    head: PackedLinear
    max_model_len: int
    num_bytes: int
    """Memory that the weights take, tables of RoPE included."""
    compiled: ForwardPass | None = None
    """The back end's own way through the blocks, if it has one."""

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def forward(self, token_ids: Tensor, positions: Tensor, context: StepContext) -> Tensor:
        """One pass over the step's tokens: ids and positions int64 [T] to hidden states [T, H], before the final norm.

        Writes K and V of every token to `context.kv_caches`. Positions must be below `max_model_len`. Hidden states that
        `context.num_wanted` leaves out may be those of an earlier layer.
        """
        if self.compiled is not None:
            return self.compiled(token_ids, positions, context.batch, context.kv_caches, context.num_wanted)
        return self.walk(token_ids, positions, context)

    def walk(self, token_ids: Tensor, positions: Tensor, context: StepContext) -> Tensor:
        """`forward`, one operation after the other."""
        x = self.kernels.embedding(token_ids, self.embedding)
        if self.embedding_scale != 1.0:
            x = x * self.embedding_scale
        if self.position_embedding is not None:
            x = x + self.kernels.embedding(positions, self.position_embedding)
        stream = Stream(x)
        for block in self.blocks:
            stream = block(self.kernels, stream, positions, context)
        return stream.value()

    def logits(self, hidden: Tensor) -> Tensor:
        """Rows of hidden states [R, H] to float32 logits [R, V]."""
        x = self.final_norm(self.kernels, hidden.contiguous())
        logits = self.kernels.linear(x, self.head, out_dtype="float32")
        cap = self.spec.final_soft_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def best_tokens(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """Each row's best token and its logit, ids int64 [R] and float32 [R]: `SamplingKernels.peaks` of `logits(hidden)`.

        None where it takes the logits themselves: a soft cap may round two of them to one number, which then tie.
        """
        if self.spec.final_soft_cap is not None:
            return None
        return self.kernels.linear_peaks(self.final_norm(self.kernels, hidden.contiguous()), self.head)

    def drawn_tokens(self, hidden: Tensor, draws: Draws) -> tuple[Tensor, Tensor, Tensor] | None:
        """`best_tokens`, and what `SamplingKernels.draw` gives for `logits(hidden)`, int64 [n]. None where it takes those."""
        if self.spec.final_soft_cap is not None:
            return None
        return self.kernels.linear_draws(self.final_norm(self.kernels, hidden.contiguous()), self.head, draws)

    @property
    def projections(self) -> tuple[PackedLinear, ...]:
        """Every packed weight, in the order of `DecoderSpec.projections`."""
        layers = ((b.attention.qkv, b.attention.output, b.mlp.up, b.mlp.down) for b in self.blocks)
        return (*(linear for layer in layers for linear in layer), self.head)

    def weights(self) -> DecoderWeights:
        """As a back end that compiles takes it."""
        return DecoderWeights(
            embedding=self.embedding,
            embedding_scale=self.embedding_scale,
            position_embedding=self.position_embedding,
            blocks=tuple(block.weights() for block in self.blocks),
            max_model_len=self.max_model_len,
        )
