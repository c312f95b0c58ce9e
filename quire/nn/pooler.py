"""From hidden states to vectors: pooling, layers on top, normalisation. What a `PoolingSpec` says,
with weights.

A vector is a function of its text. Sums over tokens are one chain in ascending order, so that
chunks do not change a bit of them; layers are the back end's products, whose rows do not depend on
one another; everything else is done row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.interface import Kernels, PackedLinear
from quire.models.declaration import DenseActivation, DenseSpec, PoolingKind
from quire.models.pooling import OutputActivation, PoolingSpec
from quire.models.tensors import TensorSpec
from quire.nn.decoder import DecoderModel
from quire.program.operations import Activation
from quire.weights.source import WeightSource

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

_LEAST_LENGTH = 1e-12
"""Shorter vectors are divided by it, as torch's `normalize` does."""
_BY_KERNEL: dict[DenseActivation, Activation] = {
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "gelu_sigmoid": "gelu_sigmoid",
    "silu": "silu",
}
_BY_ROW: dict[DenseActivation, Callable[[Float64], Float64]] = {
    "tanh": np.tanh,
    "relu": lambda row: np.maximum(row, 0.0),
    "sigmoid": lambda row: _sigmoid(row),
}


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A layer with its weights, in float32."""

    spec: DenseSpec
    weight: PackedLinear
    norm: tuple[Tensor, Tensor | None] | None
    """Weight and bias of the layer norm behind the activation."""


@dataclass(slots=True)
class Pooled:
    """What is known of a text so far, of which chunks come in order."""

    num_tokens: int = 0
    total: Float64 | None = None
    """The sum, or the maxima, or the one state that is kept."""
    vectors: list[bytes] = field(default_factory=list)
    """What was made of the text's tokens so far, where each becomes a vector; little-endian
    float32."""


class Pooler:
    """The part of a model that makes vectors of its hidden states."""

    def __init__(
        self, spec: PoolingSpec, model: DecoderModel, layers: Sequence[DenseLayer]
    ) -> None:
        self.spec = spec
        self._model = model
        self._kernels: Kernels = model.kernels
        self._layers = tuple(layers)

    def states(self, hidden: Tensor) -> Float32:
        """Rows of hidden states [n, H] behind the final norm, float32, on the host."""
        found: Float32 = self._model.normed(hidden).float().cpu().numpy()
        return found

    def take(self, pooled: Pooled, chunk: Float32) -> None:
        """Take in the states of a text's next tokens [n, H]."""
        add = _ADD.get(self.spec.kind)
        first = pooled.num_tokens
        pooled.num_tokens += len(chunk)
        if add is None:
            if self.spec.kind == "last" or pooled.total is None:
                pooled.total = chunk[-1 if self.spec.kind == "last" else 0].astype(np.float64)
        else:
            pooled.total = add(pooled.total, chunk.astype(np.float64), first)

    def vector(self, pooled: Pooled) -> Float32:
        """The pooled state [H] of a text."""
        assert pooled.total is not None
        count = pooled.num_tokens
        divisors = {
            "mean": float(count),
            "mean_sqrt_len": float(np.sqrt(count)),
            "weighted_mean": count * (count + 1) / 2.0,
        }
        return (pooled.total / divisors.get(self.spec.kind, 1.0)).astype(np.float32)

    def outputs(self, vectors: Float32) -> Float32:
        """Pooled states [n, H] to vectors or logits [n, outputs], before what `finished` does."""
        x = torch.from_numpy(np.ascontiguousarray(vectors)).to(self._kernels.device)
        if self.spec.token_ids:
            logits = (
                self._model.head_logits(x.to(self._model.dtype))[:, list(self.spec.token_ids)]
                .cpu()
                .numpy()
            )
            return logits[:, -1:] - logits[:, :1] if self.spec.is_difference else logits
        for layer in self._layers:
            x = self._layer(layer, x)
        found: Float32 = x.cpu().numpy()
        return found

    def finished(self, row: Float32, dimensions: int | None, *, is_activated: bool) -> Float32:
        """A vector as it is given out: cut to its first elements, normalised, or made
        probabilities.
        """
        kept = row[:dimensions].astype(np.float64)
        if is_activated and self.spec.is_normalized:
            kept = kept / max(float(np.sqrt(np.sum(kept * kept))), _LEAST_LENGTH)
        elif is_activated:
            kept = _OUTPUT[self.spec.activation](kept)
        return kept.astype(np.float32)

    def _layer(self, layer: DenseLayer, x: Tensor) -> Tensor:
        spec, kernels = layer.spec, self._kernels
        x = kernels.linear(x, layer.weight)
        if spec.activation in _BY_KERNEL:
            x = kernels.activate(x, _BY_KERNEL[spec.activation])
        elif spec.activation in _BY_ROW:
            rows = [_BY_ROW[spec.activation](row) for row in x.cpu().numpy().astype(np.float64)]
            x = torch.from_numpy(np.stack(rows).astype(np.float32)).to(kernels.device)
        if layer.norm is not None and spec.norm is not None:
            x = kernels.layer_norm(x, *layer.norm, spec.norm.eps)
        return x


def build_pooler(
    spec: PoolingSpec, model: DecoderModel, weights: Callable[[DenseSpec], WeightSource]
) -> Pooler:
    """Load the layers on top of a model; `weights` says where each one's lie."""

    device = model.kernels.device

    def filled(source: WeightSource, tensor: TensorSpec) -> Tensor:
        out = torch.empty(tensor.shape)
        source.fill(out, tensor)
        return out

    def loaded(dense: DenseSpec) -> DenseLayer:
        source, norm = weights(dense), dense.norm
        bias = None if dense.linear.bias is None else filled(source, dense.linear.bias)
        packed = model.kernels.pack_linear(filled(source, dense.linear.weight).to(device), bias)
        if norm is None:
            return DenseLayer(dense, packed, None)
        shift = None if norm.bias is None else filled(source, norm.bias).to(device)
        return DenseLayer(dense, packed, (filled(source, norm.weight).to(device), shift))

    return Pooler(spec, model, [loaded(dense) for dense in spec.layers])


def _add_sum(total: Float64 | None, chunk: Float64, first: int) -> Float64:
    """The chain over tokens, one after the other: `accumulate` is defined as that."""
    rows = chunk if total is None else np.concatenate([total[None], chunk])
    sums: Float64 = np.add.accumulate(rows, axis=0)
    total_now: Float64 = sums[-1].copy()
    return total_now


def _add_weighted(total: Float64 | None, chunk: Float64, first: int) -> Float64:
    weights = np.arange(first + 1, first + 1 + len(chunk), dtype=np.float64)
    return _add_sum(total, chunk * weights[:, None], first)


def _add_max(total: Float64 | None, chunk: Float64, first: int) -> Float64:
    highest: Float64 = chunk.max(axis=0)
    return highest if total is None else np.maximum(total, highest)


_ADD: dict[PoolingKind, Callable[[Float64 | None, Float64, int], Float64]] = {
    "mean": _add_sum,
    "mean_sqrt_len": _add_sum,
    "weighted_mean": _add_weighted,
    "max": _add_max,
}


def _sigmoid(row: Float64) -> Float64:
    return 1.0 / (1.0 + np.exp(-row))


def _softmax(row: Float64) -> Float64:
    weights: Float64 = np.exp(row - row.max())
    total: Float64 = weights / weights.sum()
    return total


_OUTPUT: dict[OutputActivation, Callable[[Float64], Float64]] = {
    "none": lambda row: row,
    "sigmoid": _sigmoid,
    "softmax": _softmax,
}
