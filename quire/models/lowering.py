"""From a declaration to a program: the one place that says in which order a decoder computes.

The program's weights are numbers; `Parameters` says which tensor of the declaration each stands
for.
"""

from __future__ import annotations

from quire.common.frozen_record import FrozenRecord
from quire.models.blocks import (
    AttentionSpec,
    BlockSpec,
    ExpertsSpec,
    LatentAttentionSpec,
    Mixer,
    MlpSpec,
    Sublayer,
)
from quire.models.declaration import DecoderSpec, PositionBiasSpec, RowsSpec, StatesSpec
from quire.models.rope import RopeSpec
from quire.models.tensors import LinearSpec, NormSpec, TensorSpec
from quire.program import operations as ops


class Parameters(FrozenRecord):
    """What the numbers of a program stand for."""

    linears: tuple[tuple[LinearSpec, ...], ...]
    """The parts that are stacked into each weight; `DecoderSpec.projections`,
    so the head is the last."""
    tables: tuple[TensorSpec, ...]
    """Of embeddings; the tokens' is the first."""
    vectors: tuple[TensorSpec, ...]
    """Weights and biases of norms, sinks of attention, and biases of routers."""
    ropes: tuple[RopeSpec, ...]
    biases: tuple[PositionBiasSpec, ...] = ()


def projection_sizes(parameters: Parameters) -> list[int]:
    """Return how many numbers each stacked weight has."""
    return [
        sum(part.num_outputs * part.num_inputs for part in parts) for parts in parameters.linears
    ]


def embedding_number(spec: DecoderSpec) -> int | None:
    """Return the number by which adapters know the embedding of tokens: behind those of all
    projections. None where rows of types of text are added to the table, which is then no table of
    tokens."""
    return None if spec.token_types is not None else len(spec.projections)


def lower(spec: DecoderSpec) -> tuple[ops.Program, Parameters]:
    """Return the program of a decoder, as plain as it can be: passes (`quire.program.passes`)
    are for back ends to choose."""
    return _Lowering(spec.hidden_size, spec.position_bias).decoder(spec)


def lower_rows(spec: RowsSpec) -> tuple[ops.Program, Parameters]:
    """Return the program over rows from outside, which has no head."""
    return _Lowering(spec.hidden_size, None).rows(spec)


class _Lowering:
    def __init__(self, hidden: int, bias: PositionBiasSpec | None) -> None:
        self._hidden, self._bias = hidden, bias
        self._operations: list[ops.Operation] = []
        self._widths: list[int] = []
        self._vectors: list[TensorSpec] = []
        self._ropes: dict[RopeSpec, int] = {}
        self._num_linears = self._num_caches = 0
        self._kept: dict[int, int] = {}
        """Of blocks, the stream before them."""

    def decoder(self, spec: DecoderSpec) -> tuple[ops.Program, Parameters]:
        num_added = 0 if spec.vision is None else len(spec.vision.early)
        self._kept = dict.fromkeys(spec.kept, -1)
        stream, joined = self._embed(spec), None
        if spec.states is not None:
            stream, joined = self._states(spec.states, stream)
        stream = self._blocks(spec.blocks, stream, num_added, joined)
        for value in (self._kept[index] for index in spec.kept):
            width = self._widths[stream] + self._hidden
            stream = self._emit(ops.Join((stream, value), (self._value(width),)))
        head = ops.Head(
            None if spec.final_norm is None else self._norm_weights(spec.final_norm),
            None if spec.head is None else self._linear_number(),
            spec.final_soft_cap,
        )
        tables = (
            (spec.embedding,)
            if spec.position_embedding is None
            else (spec.embedding, spec.position_embedding)
        )
        parameters = Parameters(
            spec.projections,
            tables,
            tuple(self._vectors),
            tuple(self._ropes),
            () if spec.position_bias is None else (spec.position_bias,),
        )
        return self._program(stream, head), parameters

    def rows(self, spec: RowsSpec) -> tuple[ops.Program, Parameters]:
        x = self._emit(ops.Take((), (self._value(spec.width),)))
        if spec.entry is not None:
            x = self._linear(x, spec.entry)
        if spec.positions is not None:
            x = self._add(
                x, self._emit(ops.Embed((), (self._value(self._hidden),), 0, "positions"))
            )
        x = self._norm(spec.final_norm, self._blocks(spec.blocks, self._norm(spec.norm, x)))
        if isinstance(spec.exit, LinearSpec):
            x = self._linear(x, spec.exit)
        elif spec.exit is not None:
            x = self._mlp(spec.exit, x)
        parameters = Parameters(
            spec.projections,
            () if spec.positions is None else (spec.positions,),
            tuple(self._vectors),
            tuple(self._ropes),
        )
        return self._program(x, ops.Head(None, None, None)), parameters

    def _program(self, result: int, head: ops.Head) -> ops.Program:
        return ops.Program(tuple(self._operations), tuple(self._widths), result, head)

    def _blocks(
        self,
        blocks: tuple[BlockSpec, ...],
        stream: int,
        num_added: int = 0,
        joined: int | None = None,
    ) -> int:
        """Lower blocks; behind so many of them, rows from outside are added. The first mixer reads
        `joined` in place of the stream, where that is given."""
        for index, block in enumerate(blocks):
            self._keep(index, stream)
            for stage in block.stages:
                stream = self._stage(stage, stream, stream if joined is None else joined)
                joined = None
            if index < num_added:
                first, out = (index + 1) * self._hidden, (self._value(self._hidden),)
                stream = self._emit(ops.AddPlaced((stream,), out, first))
        self._keep(len(blocks), stream)
        return stream

    def _keep(self, index: int, stream: int) -> None:
        if index in self._kept:
            self._kept[index] = stream

    def _states(self, spec: StatesSpec, embedding: int) -> tuple[int, int | None]:
        """Lower what a draft head reads; returns the stream, and what the first mixer reads where
        that is not the stream."""
        width = self._hidden
        state = self._emit(ops.Take((), (self._value(width),)))
        normed = self._norm(spec.state_norm, state)
        pair = (self._norm(spec.embedding_norm, embedding), normed)
        joined = self._emit(ops.Join(pair, (self._value(2 * width),)))
        if spec.entry is not None:
            return self._linear(joined, spec.entry), None
        return normed if spec.is_stream_normed else state, joined

    def _value(self, width: int) -> int:
        self._widths.append(width)
        return len(self._widths) - 1

    def _emit(self, operation: ops.Operation) -> int:
        self._operations.append(operation)
        return operation.outputs[0]

    def _embed(self, spec: DecoderSpec) -> int:
        width = spec.hidden_size
        x = self._emit(ops.Embed((), (self._value(width),), 0, "token_ids"))
        if spec.embedding_scale != 1.0:
            x = self._emit(ops.Scale((x,), (self._value(width),), spec.embedding_scale))
        if spec.vision is not None:
            x = self._emit(ops.Place((x,), (self._value(width),)))
        if spec.position_embedding is not None:
            position = self._emit(ops.Embed((), (self._value(width),), 1, "positions"))
            x = self._add(x, position)
        return self._norm(spec.embedding_norm, x)

    def _stage(self, stage: tuple[Sublayer, ...], stream: int, read: int) -> int:
        """Return the stream behind sublayers that all read it as it was, or without a norm `read`;
        norms that they share are computed once."""
        normed: dict[NormSpec | None, int] = {None: read}
        outputs = []
        for sublayer in stage:
            if sublayer.norm not in normed:
                normed[sublayer.norm] = self._norm(sublayer.norm, stream)
            output = self._mixer(sublayer.mixer, normed[sublayer.norm])
            outputs.append(self._norm(sublayer.post_norm, output))
        for output in outputs:
            stream = self._add(stream, output)
        return self._norm(stage[-1].sum_norm, stream)

    def _mixer(self, mixer: Mixer, x: int) -> int:
        match mixer:
            case AttentionSpec():
                return self._attention(mixer, x)
            case LatentAttentionSpec():
                return self._latent_attention(mixer, x)
            case ExpertsSpec():
                return self._experts(mixer, x)
            case MlpSpec():
                return self._mlp(mixer, x)

    def _attention(self, spec: AttentionSpec, x: int) -> int:
        heads = ops.Heads(spec.num_heads, spec.num_kv_heads, spec.head_dim)

        def row() -> tuple[int]:
            return (self._value(heads.width),)

        x = self._emit(ops.Linear((x,), row(), self._linear_number()))
        if spec.query_norm is not None:
            x = self._emit(
                ops.NormHeads((x,), row(), heads, "queries", self._norm_weights(spec.query_norm))
            )
        if spec.key_norm is not None:
            x = self._emit(
                ops.NormHeads((x,), row(), heads, "keys", self._norm_weights(spec.key_norm))
            )
        if spec.rope is not None:
            x = self._emit(ops.Rope((x,), row(), heads, self._rope(spec.rope)))
        if not spec.is_causal:
            bias = None if self._bias is None else 0
            out = (self._value(heads.query_width),)
            x = self._emit(ops.AttendAll((x,), out, heads, spec.scale, spec.window, bias))
            return self._linear(x, spec.output)
        cache = self._num_caches
        self._num_caches += 1
        x = self._emit(ops.WriteKV((x,), row(), heads, cache))
        out = (self._value(heads.query_width),)
        sinks = None if spec.sinks is None else self._vector(spec.sinks)
        x = self._emit(
            ops.Attend((x,), out, heads, cache, spec.scale, spec.window, spec.soft_cap, sinks)
        )
        return self._linear(x, spec.output)

    def _rope(self, spec: RopeSpec) -> int | None:
        """Return the number of its table; None where each step brings what it turns by."""
        return None if spec.is_of_grid else self._ropes.setdefault(spec, len(self._ropes))

    def _latent_attention(self, spec: LatentAttentionSpec, x: int) -> int:
        table = self._ropes.setdefault(spec.rope, len(self._ropes))
        size, num_heads, is_interleaved = spec.head_dim, spec.num_heads, spec.is_interleaved
        cache = self._num_caches
        self._num_caches += 1
        # first what is kept: the rest needs wanted tokens alone
        row, norm = self._linear(x, spec.down), self._norm_weights(spec.norm)
        kept = (self._value(size),)
        self._emit(ops.WriteLatent((row,), kept, norm, table, is_interleaved, cache))
        if spec.query_down is not None:
            x = self._norm(spec.query_norm, self._linear(x, spec.query_down))
        rest = size - spec.rank
        x = self._head_linear(self._linear(x, spec.query), num_heads, num_heads * size, rest)
        rotated = (self._value(num_heads * size),)
        x = self._emit(ops.RotateTails((x,), rotated, num_heads, table, is_interleaved))
        heads, out = ops.Heads(num_heads, 1, size), (self._value(num_heads * spec.rank),)
        x = self._emit(
            ops.Attend((x,), out, heads, cache, spec.scale, None, None, value_size=spec.rank)
        )
        x = self._head_linear(x, num_heads, sum(part.num_outputs for part in spec.values), 0)
        return self._linear(x, spec.output)

    def _head_linear(self, x: int, num_heads: int, width: int, rest: int) -> int:
        number = self._linear_number()
        return self._emit(ops.HeadLinear((x,), (self._value(width),), number, num_heads, rest))

    def _mlp(self, spec: MlpSpec, x: int) -> int:
        width = spec.up.num_outputs
        if spec.gate is not None:
            x = self._emit(
                ops.GatedLinear((x,), (self._value(width),), self._linear_number(), spec.activation)
            )
        else:
            x = self._emit(
                ops.Activate(
                    (self._linear(x, spec.up),), (self._value(width),), ops.unary(spec.activation)
                )
            )
        return self._linear(x, spec.down)

    def _experts(self, spec: ExpertsSpec, x: int) -> int:
        hidden = self._hidden
        router, up, down = (self._linear_number() for _ in range(3))
        activation = spec.experts[0].activation
        out = self._emit(
            ops.Experts(
                (x,),
                (self._value(hidden),),
                router,
                up,
                down,
                spec.inner,
                spec.routing,
                activation,
                None if spec.choice_bias is None else self._vector(spec.choice_bias),
            )
        )
        if spec.shared is None:
            return out
        shared = self._mlp(spec.shared, x)
        if spec.shared_gate is not None:
            gate = self._linear(x, spec.shared_gate)
            shared = self._emit(ops.GateRows((shared, gate), (self._value(hidden),)))
        return self._add(out, shared)

    def _linear(self, x: int, spec: LinearSpec) -> int:
        return self._emit(ops.Linear((x,), (self._value(spec.num_outputs),), self._linear_number()))

    def _add(self, stream: int, x: int) -> int:
        return self._emit(ops.Add((stream, x), (self._value(self._hidden),)))

    def _norm(self, spec: NormSpec | None, x: int) -> int:
        """Lower a norm; without one, return x."""
        if spec is None:
            return x
        return self._emit(ops.Norm((x,), (self._value(spec.size),), self._norm_weights(spec)))

    def _norm_weights(self, spec: NormSpec) -> ops.NormWeights:
        weight = self._vector(spec.weight)
        bias = None if spec.bias is None else self._vector(spec.bias)
        return ops.NormWeights(spec.kind, weight, bias, spec.eps, spec.weight_offset, spec.size)

    def _vector(self, spec: TensorSpec) -> int:
        self._vectors.append(spec)
        return len(self._vectors) - 1

    def _linear_number(self) -> int:
        """Return the next projection's number: they are lowered in the order of
        `DecoderSpec.projections`."""
        self._num_linears += 1
        return self._num_linears - 1
