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
from quire.kernels.elsewhere import ElsewhereLinear
from quire.kernels.interface import EmbeddingTable, Kernels, PackedLinear, Weights
from quire.kernels.lora import AdapterRows
from quire.models.declaration import DecoderSpec, PositionBiasSpec
from quire.models.lowering import embedding_number, lower
from quire.models.rope import RopeSpec
from quire.models.tensors import LinearSpec, TensorSpec
from quire.nn.decoder import DecoderModel
from quire.nn.head import DividedHead
from quire.nn.parts import HeldPart, ModelPart, hold
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
    part: ModelPart | None = None,
    embedding: EmbeddingTable | None = None,
) -> DecoderModel:
    """Load and pack every weight of `spec`, to compute in `dtype` ("float32" or "bfloat16").

    `quantize` puts another way of loading projections around the plain one (see
    `quire.quant.linears`). `max_model_len` bounds the positions that can be computed, and settles
    dynamic and long RoPE (see `quire.nn.rope`). With `adapters`, projections take what the
    adapter of a row adds to them. With a `part`, only what this process holds is loaded
    (`quire.nn.parts`). An `embedding` of another model stands for its own. Raises
    ConfigError for a dtype or length that cannot work, CheckpointError for weights that cannot be
    read.
    """
    if dtype not in COMPUTE_DTYPES:
        raise ConfigError(f"dtype={dtype!r} is not supported; use {' or '.join(COMPUTE_DTYPES)}")
    if spec.max_positions is not None and max_model_len > spec.max_positions:
        raise ConfigError(
            f"max_model_len={max_model_len} exceeds the {spec.max_positions} positions that "
            f"{spec.architecture} learned"
        )
    floats = FloatLinears(weights, kernels, COMPUTE_DTYPES[dtype])
    builder = _Builder(quantize(floats), floats, max_model_len, adapters, part or ModelPart())
    return builder.decoder(spec, embedding)


class _Builder:
    def __init__(
        self,
        linears: LinearLoader,
        floats: FloatLinears,
        max_model_len: int,
        adapters: AdapterRows | None,
        part: ModelPart,
    ) -> None:
        self._linears = linears
        self._weights, self._kernels, self._dtype = floats.weights, floats.kernels, floats.dtype
        self._max_model_len = max_model_len
        self._adapters = adapters
        self._part = part
        self._num_bytes = 0

    def decoder(self, spec: DecoderSpec, table: EmbeddingTable | None = None) -> DecoderModel:
        program, parameters = lower(spec)
        if self._adapters is not None:
            program = make_adaptable(program, embedding_number(spec))
        if reasons := self._kernels.reasons_against(program):
            raise ConfigError(
                f"the {self._kernels.name} kernels cannot run {spec.architecture}: "
                f"{'; '.join(reasons)}"
            )
        held = hold(spec, self._part, (program, parameters))
        weights = self._held_weights(held, table)
        run = self._kernels.compile(held.program, weights)
        return DecoderModel(
            spec, self._kernels, held.program, weights, run, self._num_bytes, self._adapters,
            divided_head=self._divided_head(held, weights),
            caches=None if held.stage is None else held.stage.caches,
        )  # fmt: skip

    def _held_weights(self, held: HeldPart, table: EmbeddingTable | None) -> Weights:
        """Load what the program needs. Numbers of weights that are another stage's stay empty."""
        parameters, stage = held.parameters, held.stage
        if held.has_ends:
            embedding, head = self._ends(held.spec, table)
            others = parameters.tables[1:]
        else:
            embedding, head = torch.empty(0, held.spec.hidden_size, dtype=self._dtype), ()
            others = ()
        num_inner = len(parameters.linears) - len(head)
        nothing = torch.empty(0)
        return Weights(
            linears=(
                *(
                    self._linear(*parts)
                    if stage is None or number in stage.linears
                    else ElsewhereLinear()
                    for number, parts in enumerate(parameters.linears[:num_inner])
                ),
                *head,
            ),
            tables=(embedding, *map(self._tensor, others)),
            vectors=tuple(
                self._tensor(each) if stage is None or number in stage.vectors else nothing
                for number, each in enumerate(parameters.vectors)
            ),
            ropes=tuple(
                self._rope(each) if stage is None or number in stage.ropes else nothing
                for number, each in enumerate(parameters.ropes)
            ),
            biases=tuple(
                self._bias(each) if stage is None or number in stage.biases else nothing
                for number, each in enumerate(parameters.biases)
            ),
            max_model_len=self._max_model_len,
            exchange=self._part.exchange,
        )

    def _divided_head(self, held: HeldPart, weights: Weights) -> DividedHead | None:
        exchange = self._part.exchange
        if exchange is None or not held.has_ends or held.tokens is None or held.spec.head is None:
            return None
        return DividedHead(
            self._kernels, weights.linears[-1], exchange, held.tokens, held.num_tokens
        )

    def _linear(self, *parts: LinearSpec) -> PackedLinear:
        return self._counted(self._weights.packed(parts) or self._linears.load(parts))

    def _ends(
        self, spec: DecoderSpec, given: EmbeddingTable | None
    ) -> tuple[EmbeddingTable, tuple[PackedLinear, ...]]:
        """Return the embedding table and the head, if there is one. They share their memory where
        they are tied and the head holds floats."""
        if given is not None:
            return given, () if spec.head is None else (self._linear(spec.head),)
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
