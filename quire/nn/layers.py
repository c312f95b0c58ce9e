"""The executable parts of a decoder: norms, attention, MLP and the block that joins them.

They hold weights in their final form (packed, in the compute dtype) and call the kernel protocol; they know no
checkpoint, no request and no device. Tensors are [T, ...] with T the tokens of the step.

The residual stream travels as a pair: what has been summed so far, and the last sublayer's output that is still to be
added. So the addition fuses with the norm that follows it, whichever norms a family has.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.kernels.interface import (
    AttentionWeights,
    BlockWeights,
    Kernels,
    MlpWeights,
    NormWeights,
    PackedLinear,
)
from quire.models.declaration import Activation, AttentionSpec, NormSpec
from quire.nn.context import StepContext


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm or layer norm over the last dimension."""

    spec: NormSpec
    weight: Tensor
    bias: Tensor | None

    def __call__(self, kernels: Kernels, x: Tensor) -> Tensor:
        if self.spec.kind == "layer":
            return kernels.layer_norm(x, self.weight, self.bias, self.spec.eps)
        return kernels.rms_norm(x, self.weight, self.spec.eps, weight_offset=self.spec.weight_offset)

    def add(self, kernels: Kernels, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual), in one pass where the kernels have one."""
        if self.spec.kind == "layer":
            total = x + residual
            return self(kernels, total), total
        offset = self.spec.weight_offset
        return kernels.add_rms_norm(x, residual, self.weight, self.spec.eps, weight_offset=offset)

    def weights(self) -> NormWeights:
        """As a back end that compiles takes it; likewise below."""
        spec = self.spec
        return NormWeights(spec.kind, self.weight, self.bias, spec.eps, spec.weight_offset)


@dataclass(frozen=True, slots=True)
class Attention:
    """Projections, optional norms of queries and keys, RoPE, cache write, paged attention."""

    spec: AttentionSpec
    num_heads: tuple[int, int, int]
    """Of queries, keys and values."""
    qkv: PackedLinear
    """Queries, keys and values in one product."""
    output: PackedLinear
    query_norm: Norm | None
    key_norm: Norm | None
    rope: Tensor | None
    """float32 [positions, 2, rotated / 2]; None where the layer has no RoPE."""
    layer: int

    def __call__(self, kernels: Kernels, x: Tensor, positions: Tensor, context: StepContext) -> Tensor:
        query, key, value = self._project(kernels, x)
        if self.rope is not None:
            kernels.rope(query, positions, self.rope)
            kernels.rope(key, positions, self.rope)
        key_cache, value_cache = context.kv_caches[self.layer]
        kernels.write_kv(key, value, key_cache, value_cache, context.batch.slots)
        attended = kernels.paged_attention(
            query,
            key_cache,
            value_cache,
            context.batch,
            scale=self.spec.scale,
            window=self.spec.window,
            soft_cap=self.spec.soft_cap,
        )
        return kernels.linear(attended.view(x.shape[0], -1), self.output)

    def _project(self, kernels: Kernels, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, H] to query [T, heads, D], key and value [T, KV heads, D]: views of one product where no norm follows."""
        heads = kernels.linear(x, self.qkv).view(x.shape[0], -1, self.spec.head_dim)
        query, key, value = heads.split_with_sizes(self.num_heads, dim=1)
        if self.query_norm is not None:
            query = _norm_heads(kernels, self.query_norm, query)
        if self.key_norm is not None:
            key = _norm_heads(kernels, self.key_norm, key)
        return query, key, value

    def weights(self) -> AttentionWeights:
        spec = self.spec
        return AttentionWeights(
            qkv=self.qkv,
            output=self.output,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.scale,
            query_norm=_weights(self.query_norm),
            key_norm=_weights(self.key_norm),
            rope=self.rope,
            window=spec.window,
            soft_cap=spec.soft_cap,
        )


def _weights(norm: Norm | None) -> NormWeights | None:
    return None if norm is None else norm.weights()


def _norm_heads(kernels: Kernels, norm: Norm, x: Tensor) -> Tensor:
    """Norm of each head, or of all heads of a token together, as the norm's size says: [T, heads, D] to the same."""
    return norm(kernels, x.contiguous().view(-1, norm.spec.size)).view(x.shape)


@dataclass(frozen=True, slots=True)
class Mlp:
    """Gated or plain feed-forward layer."""

    up: PackedLinear
    """Gate and up in one product where there is a gate."""
    down: PackedLinear
    is_gated: bool
    activation: Activation

    def __call__(self, kernels: Kernels, x: Tensor) -> Tensor:
        if self.is_gated:
            return kernels.linear(kernels.gated_linear(x, self.up, self.activation), self.down)
        return kernels.linear(kernels.activate(kernels.linear(x, self.up), self.activation), self.down)

    def weights(self) -> MlpWeights:
        return MlpWeights(self.up, self.down, self.is_gated, self.activation)


@dataclass(frozen=True, slots=True)
class Stream:
    """The residual stream: its value is `total + pending`."""

    total: Tensor
    pending: Tensor | None = None

    def enter(self, kernels: Kernels, norm: Norm | None) -> tuple[Tensor, Tensor]:
        """What the next sublayer reads (normed if it has a norm), and the stream's value with nothing pending."""
        if self.pending is None:
            return (self.total if norm is None else norm(kernels, self.total)), self.total
        if norm is None:
            total = self.total + self.pending
            return total, total
        return norm.add(kernels, self.pending, self.total)

    def value(self) -> Tensor:
        return self.total if self.pending is None else self.total + self.pending


@dataclass(frozen=True, slots=True)
class Block:
    """One attention and one MLP sublayer; a norm before and after each, or none."""

    attention_norm: Norm | None
    attention: Attention
    post_attention_norm: Norm | None
    mlp_norm: Norm | None
    mlp: Mlp
    post_mlp_norm: Norm | None

    def __call__(self, kernels: Kernels, stream: Stream, positions: Tensor, context: StepContext) -> Stream:
        x, total = stream.enter(kernels, self.attention_norm)
        x = self.attention(kernels, x, positions, context)
        if self.post_attention_norm is not None:
            x = self.post_attention_norm(kernels, x)
        x, total = Stream(total, x).enter(kernels, self.mlp_norm)
        x = self.mlp(kernels, x)
        if self.post_mlp_norm is not None:
            x = self.post_mlp_norm(kernels, x)
        return Stream(total, x)

    def weights(self) -> BlockWeights:
        return BlockWeights(
            attention_norm=_weights(self.attention_norm),
            attention=self.attention.weights(),
            post_attention_norm=_weights(self.post_attention_norm),
            mlp_norm=_weights(self.mlp_norm),
            mlp=self.mlp.weights(),
            post_mlp_norm=_weights(self.post_mlp_norm),
        )
