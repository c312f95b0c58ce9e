"""Builds a `DecoderModel` from a declaration: the walk that loads, fuses and packs.

One tensor at a time: a `LinearLoader` gathers a stacked weight (QKV is one product, gate and up another, whatever the
checkpoint's own layout), packs it and drops it, so that memory peaks at the model plus one layer's weight. Whether it
stays floating point or is quantized is the loader's business.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.kernels.interface import EmbeddingTable, Kernels, PackedLinear
from quire.models.declaration import (
    AttentionSpec,
    BlockSpec,
    DecoderSpec,
    LinearSpec,
    MlpSpec,
    NormSpec,
    TensorSpec,
)
from quire.models.rope import RopeSpec
from quire.nn.decoder import DecoderModel
from quire.nn.layers import Attention, Block, Mlp, Norm
from quire.nn.rope import rope_table
from quire.quant.linears import FloatLinears, LinearLoader
from quire.weights.source import WeightSource

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_decoder(
    spec: DecoderSpec,
    weights: WeightSource,
    kernels: Kernels,
    *,
    dtype: str,
    max_model_len: int,
    quantize: Callable[[FloatLinears], LinearLoader] = lambda floats: floats,
) -> DecoderModel:
    """Load and pack every weight of `spec`, to compute in `dtype` ("float32" or "bfloat16").

    `quantize` puts another way of loading projections around the plain one (see `quire.quant.linears`). `max_model_len`
    bounds the positions that can be computed, and settles dynamic and long RoPE (see `quire.nn.rope`).
    Raises ConfigError for a dtype or length that cannot work, CheckpointError for weights that cannot be read.
    """
    if dtype not in COMPUTE_DTYPES:
        raise ConfigError(f"dtype={dtype!r} is not supported; use {' or '.join(COMPUTE_DTYPES)}")
    if spec.max_positions is not None and max_model_len > spec.max_positions:
        raise ConfigError(
            f"max_model_len={max_model_len} exceeds the {spec.max_positions} positions that {spec.architecture} learned"
        )
    floats = FloatLinears(weights, kernels, COMPUTE_DTYPES[dtype])
    return _Builder(quantize(floats), floats, max_model_len).decoder(spec)


class _Builder:
    def __init__(self, linears: LinearLoader, floats: FloatLinears, max_model_len: int) -> None:
        self._linears = linears
        self._weights, self._kernels, self._dtype = floats.weights, floats.kernels, floats.dtype
        self._max_model_len = max_model_len
        self._ropes: dict[RopeSpec, Tensor] = {}
        self._num_bytes = 0

    def decoder(self, spec: DecoderSpec) -> DecoderModel:
        embedding, head = self._ends(spec)
        positions = spec.position_embedding
        blocks = tuple(self._block(block, layer) for layer, block in enumerate(spec.blocks))
        model = DecoderModel(
            spec=spec,
            kernels=self._kernels,
            embedding=embedding,
            embedding_scale=torch.tensor(spec.embedding_scale, dtype=self._dtype).item(),
            position_embedding=None if positions is None else self._tensor(positions),
            blocks=blocks,
            final_norm=self._norm(spec.final_norm),
            head=head,
            max_model_len=self._max_model_len,
            num_bytes=self._num_bytes,
        )
        return dataclasses.replace(model, compiled=self._kernels.compile_decoder(model.weights()))

    def _block(self, spec: BlockSpec, layer: int) -> Block:
        [attention], [mlp] = spec.stages
        assert isinstance(attention.mixer, AttentionSpec) and isinstance(mlp.mixer, MlpSpec)
        return Block(
            attention_norm=self._optional_norm(attention.norm),
            attention=self._attention(attention.mixer, layer),
            post_attention_norm=self._optional_norm(attention.post_norm),
            mlp_norm=self._optional_norm(mlp.norm),
            mlp=self._mlp(mlp.mixer),
            post_mlp_norm=self._optional_norm(mlp.post_norm),
        )

    def _attention(self, spec: AttentionSpec, layer: int) -> Attention:
        return Attention(
            spec=spec,
            num_heads=(spec.num_heads, spec.num_kv_heads, spec.num_kv_heads),
            qkv=self._linear(*spec.projections[0]),
            output=self._linear(spec.output),
            query_norm=self._optional_norm(spec.query_norm),
            key_norm=self._optional_norm(spec.key_norm),
            rope=None if spec.rope is None else self._rope(spec.rope),
            layer=layer,
        )

    def _mlp(self, spec: MlpSpec) -> Mlp:
        return Mlp(
            up=self._linear(*spec.projections[0]),
            down=self._linear(spec.down),
            is_gated=spec.gate is not None,
            activation=spec.activation,
        )

    def _linear(self, *parts: LinearSpec) -> PackedLinear:
        return self._counted(self._weights.packed(parts) or self._linears.load(parts))

    def _ends(self, spec: DecoderSpec) -> tuple[EmbeddingTable, PackedLinear]:
        """The embedding table and the head, which share their memory where they are tied and the head holds floats."""
        if not spec.is_tied:
            return self._counted_tensor(self._table(spec.embedding)), self._linear(spec.head)
        head, table = self._weights.packed([spec.head]), None
        if head is None:
            table = self._table(spec.embedding)
            head = self._linears.load_tied(spec.head, table)
        shared = self._kernels.table_of(head)
        if shared is None:
            shared = self._counted_tensor(self._table(spec.embedding) if table is None else table)
        return shared, self._counted(head)

    def _counted_tensor(self, table: Tensor) -> Tensor:
        self._num_bytes += table.nbytes
        return table

    def _counted(self, packed: PackedLinear) -> PackedLinear:
        self._num_bytes += packed.num_bytes
        return packed

    def _optional_norm(self, spec: NormSpec | None) -> Norm | None:
        return None if spec is None else self._norm(spec)

    def _norm(self, spec: NormSpec) -> Norm:
        return Norm(spec, self._tensor(spec.weight), None if spec.bias is None else self._tensor(spec.bias))

    def _table(self, spec: TensorSpec) -> Tensor:
        table = self._weights.table(spec)
        return self._filled(spec) if table is None else table.to(self._kernels.device)

    def _tensor(self, spec: TensorSpec) -> Tensor:
        return self._counted_tensor(self._filled(spec))

    def _filled(self, spec: TensorSpec) -> Tensor:
        out = torch.empty(spec.shape, dtype=self._dtype, device=self._kernels.device)
        self._weights.fill(out, spec)
        return out

    def _rope(self, spec: RopeSpec) -> Tensor:
        """Layers with the same RoPE share one table."""
        if spec not in self._ropes:
            self._ropes[spec] = rope_table(spec, self._max_model_len).to(self._kernels.device)
            self._num_bytes += self._ropes[spec].nbytes
        return self._ropes[spec]
