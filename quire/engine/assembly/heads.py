"""Loads draft heads, which share with their target what their checkpoints leave out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.engine.assembly.loading import sources
from quire.engine.assembly.planned_model import PlannedModel
from quire.errors import CheckpointError
from quire.kernels.interface import EmbeddingTable, PackedLinear
from quire.models.draft_heads import TARGET_IDS, HeadSpec
from quire.models.tensors import LinearSpec, TensorSpec
from quire.nn.builder import COMPUTE_DTYPES, build_decoder
from quire.nn.decoder import DecoderModel
from quire.quant.linears import FloatLinears
from quire.quant.storage import CheckpointStorage
from quire.spec.model import HeadInputs
from quire.spec.states import KeptStates
from quire.spec.vocabulary import TokenMap
from quire.weights.checkpoint import SafetensorsCheckpoint
from quire.weights.source import WeightSource


def _holds(weights: WeightSource, tensor: TensorSpec) -> bool:
    """Return whether a tensor is there; of optional ones, only checkpoints have any."""
    return weights.holds(tensor) if isinstance(weights, SafetensorsCheckpoint) else False


class _WithoutOptional(WeightSource):
    """A source whose optional tensors are zeros where they are not there."""

    def __init__(self, weights: WeightSource) -> None:
        self._weights = weights

    def fill(self, out: Tensor, tensor: TensorSpec) -> None:
        """See `WeightSource.fill`."""
        if tensor.is_optional and not _holds(self._weights, tensor):
            out.zero_()
        else:
            self._weights.fill(out, tensor)

    def packed(self, parts: Sequence[LinearSpec]) -> PackedLinear | None:
        """See `WeightSource.packed`."""
        return self._weights.packed(parts)


def load_head(
    planned: PlannedModel, head: HeadSpec, target: DecoderModel, theirs: PlannedModel
) -> tuple[DecoderModel, TokenMap, HeadInputs]:
    """Load a head for a target that keeps states, and was loaded as `theirs` says. Raises
    CheckpointError."""
    plan, keeper, kernels = planned.plan, target.keeper, target.kernels
    assert isinstance(keeper, KeptStates)
    with sources(planned) as (weights, quantize):
        dtype = COMPUTE_DTYPES[plan.dtype]
        decoder = build_decoder(
            head.decoder,
            _WithoutOptional(weights),
            kernels,
            dtype=plan.dtype,
            max_model_len=plan.limits.max_model_len,
            quantize=quantize,
            embedding=_embedding(weights, head, target, theirs),
        )
        if head.fuse is not None:
            if isinstance(weights, SafetensorsCheckpoint):
                weights.require(head.fuse.weight)
            keeper.fuse_with(kernels, FloatLinears(weights, kernels, dtype).load([head.fuse]))
    tokens = _tokens(planned, head, target.spec.vocab_size)
    inputs = HeadInputs(keeper, target, reads_normed=not head.kept, feeds_normed=head.feeds_normed)
    return decoder, tokens, inputs


def _embedding(
    weights: WeightSource, head: HeadSpec, target: DecoderModel, planned: PlannedModel
) -> EmbeddingTable:
    """Return the target's table where the head has none, or the same one; else its own."""
    spec, theirs = head.decoder.embedding, target.spec.embedding
    is_alike, is_divided = theirs.shape == spec.shape, target.divided_head is not None
    if not _holds(weights, spec):
        if not is_alike:
            raise CheckpointError(
                f"the head lacks {spec.name} {list(spec.shape)}, and the model's embedding is "
                f"{list(theirs.shape)}"
            )
        return _whole_table(planned, target) if is_divided else target.weights.tables[0]
    own = torch.empty(spec.shape, dtype=target.dtype)
    weights.fill(own, spec)
    if is_alike and not is_divided:
        table = target.weights.tables[0]
        if torch.equal(own, target.kernels.embedding(torch.arange(len(own)), table)):
            return table
    return own


def _whole_table(planned: PlannedModel, target: DecoderModel) -> EmbeddingTable:
    """Read the embedding of a target of which this process has the rows of some tokens."""
    spec = target.spec.embedding
    table = torch.empty(spec.shape, dtype=target.dtype)
    with sources(planned) as (weights, _):
        weights.fill(table, spec)
    return table


def _tokens(planned: PlannedModel, head: HeadSpec, num_target: int) -> TokenMap:
    """Return which of the target's tokens the head's logits stand for; it reads all of them."""
    output = head.decoder.head
    if output is None or not head.has_target_ids:
        return TokenMap(num_target, num_target)
    num_draft = output.num_outputs
    theirs = torch.arange(num_draft)
    if planned.plan.config.load_format == "dummy":
        ours = theirs * (num_target // num_draft)
    else:
        layout = planned.storage.layout if isinstance(planned.storage, CheckpointStorage) else None
        with SafetensorsCheckpoint(planned.folder, head.decoder, layout) as checkpoint:
            offsets = checkpoint.read(TARGET_IDS)
        if offsets is None or offsets.dtype != torch.int64 or offsets.shape != theirs.shape:
            raise CheckpointError(
                f"{planned.folder}: {TARGET_IDS}, int64 [{num_draft}], is needed, which says what "
                "the logits of the head stand for"
            )
        ours = theirs + offsets
    if not bool(((ours >= 0) & (ours < num_target)).all()) or len(set(ours.tolist())) < num_draft:
        raise CheckpointError(
            f"{planned.folder}: {TARGET_IDS} names tokens twice, or others than the model's "
            f"{num_target}"
        )
    inputs = torch.arange(num_target).numpy()
    return TokenMap(num_target, num_draft, (ours.numpy(), theirs.numpy(), inputs))
