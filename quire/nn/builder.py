"""Builds a `DecoderModel` from a declaration: lowers it, and loads, stacks and packs what its
program's numbers stand for.

One tensor at a time: a `LinearLoader` gathers a stacked weight (QKV is one product, gate and up
another, whatever the checkpoint's own layout), packs it and drops it, so that memory peaks at the
model plus one layer's weight. Whether it stays floating point or is quantized is the loader's
business.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.kernels.interface import EmbeddingTable, Kernels, PackedLinear, Weights
from quire.kernels.lora import AdapterRows
from quire.models.declaration import DecoderSpec, LinearSpec, PositionBiasSpec, TensorSpec
from quire.models.lowering import lower
from quire.models.rope import RopeSpec
from quire.nn.decoder import DecoderModel
from quire.nn.position_bias import position_bias
from quire.nn.rope import rope_table
from quire.program.passes import make_adaptable
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
    adapters: AdapterRows | None = None,
) -> DecoderModel:
    """Load and pack every weight of `spec`, to compute in `dtype` ("float32" or "bfloat16").

    `quantize` puts another way of loading projections around the plain one (see
    `quire.quant.linears`). `max_model_len` bounds the positions that can be computed, and settles
    dynamic and long RoPE (see `quire.nn.rope`). With `adapters`, projections take what the
    adapter of a row adds to them. Raises ConfigError for a dtype or length that cannot work,
    CheckpointError for weights that cannot be read.
    """
    if dtype not in COMPUTE_DTYPES:
        raise ConfigError(f"dtype={dtype!r} is not supported; use {' or '.join(COMPUTE_DTYPES)}")
    if spec.max_positions is not None and max_model_len > spec.max_positions:
        raise ConfigError(
            f"max_model_len={max_model_len} exceeds the {spec.max_positions} positions that "
            f"{spec.architecture} learned"
        )
    floats = FloatLinears(weights, kernels, COMPUTE_DTYPES[dtype])
    return _Builder(quantize(floats), floats, max_model_len, adapters).decoder(spec)


class _Builder:
    def __init__(
        self,
        linears: LinearLoader,
        floats: FloatLinears,
        max_model_len: int,
        adapters: AdapterRows | None,
    ) -> None:
        self._linears = linears
        self._weights, self._kernels, self._dtype = floats.weights, floats.kernels, floats.dtype
        self._max_model_len = max_model_len
        self._adapters = adapters
        self._num_bytes = 0

    def decoder(self, spec: DecoderSpec) -> DecoderModel:
        program, parameters = lower(spec)
        if self._adapters is not None:
            program = make_adaptable(program)
        if reasons := self._kernels.reasons_against(program):
            raise ConfigError(
                f"the {self._kernels.name} kernels cannot run {spec.architecture}: "
                f"{'; '.join(reasons)}"
            )
        embedding, head = self._ends(spec)
        num_inner = len(parameters.linears) - len(head)
        weights = Weights(
            linears=(*(self._linear(*parts) for parts in parameters.linears[:num_inner]), *head),
            tables=(embedding, *(self._tensor(each) for each in parameters.tables[1:])),
            vectors=tuple(self._tensor(each) for each in parameters.vectors),
            ropes=tuple(self._rope(each) for each in parameters.ropes),
            biases=tuple(self._bias(each) for each in parameters.biases),
            max_model_len=self._max_model_len,
        )
        run = self._kernels.compile(program, weights)
        return DecoderModel(
            spec, self._kernels, program, weights, run, self._num_bytes, self._adapters
        )

    def _linear(self, *parts: LinearSpec) -> PackedLinear:
        return self._counted(self._weights.packed(parts) or self._linears.load(parts))

    def _ends(self, spec: DecoderSpec) -> tuple[EmbeddingTable, tuple[PackedLinear, ...]]:
        """Return the embedding table and the head, if there is one. They share their memory where
        they are tied and the head holds floats."""
        if spec.head is None:
            return self._counted_tensor(self._typed_table(spec)), ()
        if not spec.is_tied:
            return self._counted_tensor(self._table(spec.embedding)), (self._linear(spec.head),)
        head, table = self._weights.packed([spec.head]), None
        if head is None:
            table = self._table(spec.embedding)
            head = self._linears.load_tied(spec.head, table)
        shared = self._kernels.table_of(head)
        if shared is None:
            shared = self._counted_tensor(self._table(spec.embedding) if table is None else table)
        return shared, (self._counted(head),)

    def _typed_table(self, spec: DecoderSpec) -> Tensor:
        """The embeddings of tokens of each type of text, one type after the other: a sum that
        every step would make otherwise, with the same bits."""
        table = self._table(spec.embedding)
        if spec.token_types is None:
            return table
        return torch.cat([table + row for row in self._filled(spec.token_types)])

    def _counted_tensor(self, table: Tensor) -> Tensor:
        self._num_bytes += table.nbytes
        return table

    def _counted(self, packed: PackedLinear) -> PackedLinear:
        self._num_bytes += packed.num_bytes
        return packed

    def _table(self, spec: TensorSpec) -> Tensor:
        table = self._weights.table(spec)
        return self._filled(spec) if table is None else table.to(self._kernels.device)

    def _tensor(self, spec: TensorSpec) -> Tensor:
        return self._counted_tensor(self._filled(spec))

    def _filled(self, spec: TensorSpec) -> Tensor:
        dtype = torch.float32 if spec.keeps_float32 else self._dtype
        out = torch.empty(spec.shape, dtype=dtype, device=self._kernels.device)
        self._weights.fill(out, spec)
        return out

    def _bias(self, spec: PositionBiasSpec) -> Tensor:
        table = torch.empty(spec.table.shape)
        self._weights.fill(table, spec.table)
        return self._counted_tensor(
            position_bias(table, spec.max_distance, self._max_model_len).to(self._kernels.device)
        )

    def _rope(self, spec: RopeSpec) -> Tensor:
        table = rope_table(spec, self._max_model_len).to(self._kernels.device)
        return self._counted_tensor(table)
