"""The words in which a decoder is declared: plain frozen records, no torch, no behaviour beyond
counting.

A family's file builds one `DecoderSpec` with the checkpoint's weight names written inline. Loading,
memory planning, packing, sharding and quantising are generic walks over it; nothing here knows of
devices, tensor parallelism, quantisation or LoRA. Linear weights are [outputs, inputs] whatever a
checkpoint stores.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple

from quire.common.kv_formats import KV_FORMATS
from quire.models.rope import RopeSpec
from quire.program.operations import Gating, Routing

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class StackedPlace(NamedTuple):
    """Where a matrix lies among others of its kind, one after the other in one stored tensor."""

    name: str
    shape: tuple[int, ...]
    """Of the stored tensor; its leading dimensions together are rows."""
    first_row: int
    """Of those rows."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One logical tensor, and where a checkpoint keeps it."""

    name: str
    shape: tuple[int, ...]
    is_transposed: bool = False
    """The checkpoint stores [inputs, outputs]."""
    first_row: int = 0
    """The first of this tensor's rows within the stored one."""
    stored_rows: int | None = None
    """Rows of the stored tensor where it holds more than this one (fused weights)."""
    row_step: int = 1
    """From one of this tensor's rows to its next one, within the stored tensor."""
    centre: float = 0.0
    """What the values scatter around when they are made up (dummy weights)."""
    other_place: StackedPlace | None = None
    """Where checkpoints keep it that do not have `name`."""
    stored_as: tuple[int, ...] | None = None
    """The stored shape, where that has more dimensions (kernels of convolutions)."""
    keeps_float32: bool = False
    """Whatever the model computes in."""
    cut_from: TensorSpec | None = None
    """The tensor that these are some rows of, which one rank holds."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape that the checkpoint must have under `name`."""
        if self.stored_as is not None:
            return self.stored_as
        shape = (self.stored_rows or self.shape[0], *self.shape[1:])
        return shape[::-1] if self.is_transposed else shape

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """y = x @ weight.T + bias."""

    weight: TensorSpec
    bias: TensorSpec | None = None
    keeps_floats: bool = False
    """Never quantized: so small that nothing would be saved, and much depends on it (routers)."""
    share: float = 1.0
    """Of all tokens, those that it computes: below one for an expert."""
    holds_floats: bool = False
    """In memory, whatever the checkpoint stores."""
    is_folded: bool = False
    """The transpose is what is multiplied by: the stored rows are inputs."""

    @property
    def name(self) -> str:
        """The module's, as checkpoints have it."""
        return self.weight.name.removesuffix(".weight")

    @property
    def num_outputs(self) -> int:
        return self.weight.shape[1 if self.is_folded else 0]

    @property
    def num_inputs(self) -> int:
        return self.weight.shape[0 if self.is_folded else 1]

    @property
    def stored(self) -> LinearSpec:
        """The projection that a checkpoint has, where this one is a part of it."""
        weight = self.weight
        shape = (weight.stored_rows or weight.shape[0], weight.shape[1])
        whole = dataclasses.replace(
            weight, shape=shape, first_row=0, stored_rows=None, cut_from=None
        )
        return dataclasses.replace(self, weight=whole, is_folded=False)

    @property
    def is_quantizable(self) -> bool:
        """Whether integers may take the place of floats."""
        return not (self.keeps_floats or self.holds_floats)


@dataclass(frozen=True, slots=True)
class NormSpec:
    """RMS norm, or layer norm, over the last `size` values."""

    kind: Literal["rms", "layer"]
    weight: TensorSpec
    eps: float
    bias: TensorSpec | None = None
    weight_offset: float = 0.0
    """Added to the weight: 1 where a checkpoint stores weights around zero (Gemma)."""

    @property
    def size(self) -> int:
        return self.weight.shape[0]


class KVLayerSpec(NamedTuple):
    """What one layer keeps in the KV cache for every token."""

    num_kv_heads: int
    head_dim: int
    window: int | None
    """Tokens further back than this are never read again; None for full attention."""
    is_latent: bool = False
    """A row is key and value at once."""

    def bytes_per_token(self, kv_format: str) -> int:
        """Return bytes of K and V of one token, with their scales where the format has them."""
        num_rows = self.num_kv_heads * (1 if self.is_latent else 2)
        return num_rows * KV_FORMATS[kv_format].row_bytes(self.head_dim)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Causal self-attention with grouped heads."""

    query: LinearSpec
    key: LinearSpec
    value: LinearSpec
    output: LinearSpec
    head_dim: int
    scale: float
    rope: RopeSpec | None
    query_norm: NormSpec | None = None
    """Over each head, or over the whole projection, as its size says; before RoPE."""
    key_norm: NormSpec | None = None
    window: int | None = None
    """A query at position p sees the keys at positions above p - window."""
    soft_cap: float | None = None
    sinks: TensorSpec | None = None
    """[query heads]: scores of their own, without a value, that join each softmax."""
    is_causal: bool = True
    """Else a query sees all keys of its text, in a window those before and behind it; nothing is
    cached."""

    @property
    def projections(self) -> tuple[tuple[LinearSpec, ...], ...]:
        """Its matrix products, each as the parts that are stacked into one weight."""
        return ((self.query, self.key, self.value), (self.output,))

    @property
    def num_heads(self) -> int:
        return self.query.num_outputs // self.head_dim

    @property
    def num_kv_heads(self) -> int:
        return self.key.num_outputs // self.head_dim

    @property
    def kv_projections(self) -> tuple[LinearSpec, ...]:
        """Those that give what is kept."""
        return (self.key, self.value)

    @property
    def kv_layer(self) -> KVLayerSpec:
        """What is kept of a token."""
        return KVLayerSpec(self.num_kv_heads, self.head_dim, self.window)

    @property
    def flops_per_key(self) -> int:
        """Operations of a query for each key that it sees: scores, and the weighted sum."""
        return 4 * self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class LatentAttentionSpec:
    """Causal attention over one vector per token, which all heads share (DeepSeek V2,
    arXiv:2405.04434, section 2.1).

    The vector, `norm` of the first outputs of `down`, stands for the keys and values of all heads:
    each head has a weight that would make its key of it, and one for its value. Both are folded:
    queries are multiplied by the first, and what attention gives by the second, so that keys and
    values are never made. Behind the vector comes a key that is rotated, for the tail of queries.
    """

    query_down: LinearSpec | None
    """Queries come of a vector of their own; None: of the hidden state."""
    query_norm: NormSpec | None
    query: LinearSpec
    """Of each head: what its key's weight is for, and the tail."""
    down: LinearSpec
    norm: NormSpec
    keys: tuple[LinearSpec, ...]
    """Of each head, folded: from a query to one of the size of the vector."""
    values: tuple[LinearSpec, ...]
    """Of each head: from the size of the vector to a value."""
    output: LinearSpec
    scale: float
    rope: RopeSpec
    is_interleaved: bool
    """Neighbours are rotated as pairs; else the halves are."""

    is_causal: ClassVar[bool] = True
    window: ClassVar[int | None] = None
    sinks: ClassVar[TensorSpec | None] = None

    @property
    def projections(self) -> tuple[tuple[LinearSpec, ...], ...]:
        """Return its matrix products, each as the parts that are stacked into one weight."""
        first = () if self.query_down is None else ((self.query_down,),)
        return ((self.down,), *first, (self.query,), self.keys, self.values, (self.output,))

    @property
    def num_heads(self) -> int:
        """Heads of queries."""
        return len(self.keys)

    @property
    def rank(self) -> int:
        """Elements of the vector."""
        return self.norm.size

    @property
    def head_dim(self) -> int:
        """Elements of what is kept: the vector, and the rotated key."""
        return self.down.num_outputs

    @property
    def kv_projections(self) -> tuple[LinearSpec, ...]:
        """Those that give what is kept."""
        return (self.down,)

    @property
    def kv_layer(self) -> KVLayerSpec:
        """What is kept of a token."""
        return KVLayerSpec(1, self.head_dim, None, is_latent=True)

    @property
    def flops_per_key(self) -> int:
        """Operations of a query for each key that it sees: scores, and the weighted sum."""
        return 2 * self.num_heads * (self.head_dim + self.rank)


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))) without a gate."""

    gate: LinearSpec | None
    up: LinearSpec
    down: LinearSpec
    activation: Gating

    @property
    def projections(self) -> tuple[tuple[LinearSpec, ...], ...]:
        """Its matrix products: gate and up are one."""
        return ((self.up,) if self.gate is None else (self.gate, self.up), (self.down,))


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """Gated MLPs, of which a router chooses some for each token, and one that computes all."""

    router: LinearSpec
    experts: tuple[MlpSpec, ...]
    """Alike, each with a gate."""
    routing: Routing
    shared: MlpSpec | None = None
    """Its output is added."""
    shared_gate: LinearSpec | None = None
    """The shared MLP's output is multiplied by the sigmoid of its only output."""
    choice_bias: TensorSpec | None = None
    """Added to scores for the choice of experts."""

    @property
    def inner(self) -> int:
        """Return the width of an expert's activation."""
        return self.experts[0].down.num_inputs

    @property
    def projections(self) -> tuple[tuple[LinearSpec, ...], ...]:
        """Return its matrix products: all gates and ups are one, in pairs, and so are all downs."""
        ups = tuple(part for each in self.experts for part in each.projections[0])
        downs = tuple(each.down for each in self.experts)
        shared = () if self.shared is None else self.shared.projections
        gate = () if self.shared_gate is None else ((self.shared_gate,),)
        return ((self.router,), ups, downs, *shared, *gate)


AnyAttention = AttentionSpec | LatentAttentionSpec
Mixer = AnyAttention | MlpSpec | ExpertsSpec


@dataclass(frozen=True, slots=True)
class Sublayer:
    """`post_norm(mixer(norm(x)))`; any norm may be absent."""

    norm: NormSpec | None
    mixer: Mixer
    post_norm: NormSpec | None = None
    sum_norm: NormSpec | None = None
    """Of the residual stream, once the output has joined it (as in BERT)."""


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """What the residual stream passes through: stages, one after the other. The sublayers of a
    stage read the same stream, and each adds its output to it.
    """

    stages: tuple[tuple[Sublayer, ...], ...]

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """Those of all sublayers, in order."""
        return tuple(sublayer.mixer for stage in self.stages for sublayer in stage)

    @property
    def projections(self) -> tuple[tuple[LinearSpec, ...], ...]:
        """The block's matrix products, each as the parts that are stacked into one weight."""
        return tuple(parts for mixer in self.mixers for parts in mixer.projections)


def sequential(*sublayers: Sublayer) -> BlockSpec:
    """Return a block whose sublayers follow one another."""
    return BlockSpec(tuple((sublayer,) for sublayer in sublayers))


PoolingKind = Literal["last", "cls", "mean", "max", "mean_sqrt_len", "weighted_mean"]
"""How one vector is made of a text's hidden states."""
DenseActivation = Literal[
    "none", "tanh", "relu", "sigmoid", "gelu", "gelu_tanh", "gelu_sigmoid", "silu"
]


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """A layer on a pooled vector: `norm(activation(linear(x)))`, in float32."""

    linear: LinearSpec
    activation: DenseActivation = "none"
    norm: NormSpec | None = None
    folder: str | None = None
    """The folder inside the model's whose file holds it; None: the checkpoint itself does."""


@dataclass(frozen=True, slots=True)
class ClassifierSpec:
    """From hidden states to the logits of classes."""

    kind: PoolingKind
    layers: tuple[DenseSpec, ...]
    is_per_token: bool = False
    """Whether each token has classes, not the text; `kind` then says nothing."""


@dataclass(frozen=True, slots=True)
class PositionBiasSpec:
    """What all layers add to scores by how far a key is from its query, in buckets that become
    wider with the distance (T5, arXiv:1910.10683)."""

    table: TensorSpec
    """[buckets, heads]: of keys before the query and at it, then of those behind it."""
    max_distance: int
    """Keys further away share the last bucket."""


@dataclass(frozen=True, slots=True)
class RowsSpec:
    """A program over rows that come from outside: `exit(final_norm(blocks(norm(entry(x)))))`, of
    which anything may be absent."""

    width: int
    """Of the rows that come in."""
    entry: LinearSpec | None = None
    positions: TensorSpec | None = None
    """Added behind the entry, by the row's place."""
    first_position: TensorSpec | None = None
    """Added to the first of `positions`: the entry gives nothing there (a class token)."""
    norm: NormSpec | None = None
    blocks: tuple[BlockSpec, ...] = ()
    """Whose attention is not causal."""
    final_norm: NormSpec | None = None
    exit: MlpSpec | None = None

    @property
    def hidden_size(self) -> int:
        """Width of the stream."""
        return self.width if self.entry is None else self.entry.num_outputs

    @property
    def projections(self) -> tuple[tuple[LinearSpec, ...], ...]:
        """Every matrix product as the parts that are stacked into one weight, in order."""
        first = () if self.entry is None else ((self.entry,),)
        last = () if self.exit is None else self.exit.projections
        return (*first, *(parts for block in self.blocks for parts in block.projections), *last)


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """How a model reads images: a tower over patches, and a projector from what it gives to rows
    that stand where tokens' embeddings would."""

    placeholder: int
    """The token that holds the place of each row."""
    patch_size: int
    """Height and width of a patch, whose pixels come by channel, row and column."""
    image_size: int | None
    """Height and width of every image behind the processor; None: multiples of a place's."""
    tower: RowsSpec
    projector: RowsSpec
    num_leading: int = 0
    """Rows of the tower before the patches' (a class token)."""
    drops_leading: bool = False
    """Whether those get no place in the prompt."""
    grids: tuple[tuple[int, int], ...] = ()
    """Heights and widths that an image is brought to and cut into tiles, beside the whole of it;
    none: the whole alone (`quire.models.tiling`)."""
    newline: TensorSpec | None = None
    """The row behind each row of patches, where there are tiles."""
    num_frames: int = 1
    """Pictures of a film that a patch has pixels of; an image is all of them."""
    merge: int = 1
    """Patches along each edge of the square that gets one place: the projector reads their rows as
    one, and the tower has them next to one another."""
    window: int | None = None
    """Places along each edge of the squares within which blocks attend; None: to all."""
    whole_blocks: frozenset[int] = frozenset()
    """Blocks that attend to all all the same."""
    grid: TensorSpec | None = None
    """[side * side, width]: learned positions of a square, resampled to each image's patches and
    added behind the tower's entry."""
    early: tuple[tuple[int, RowsSpec], ...] = ()
    """Blocks of the tower behind which another projector makes rows, for each place as well. Those
    of the n-th are added behind the decoder's n-th block (arXiv:2406.04334)."""

    @property
    def num_projectors(self) -> int:
        """How many times as wide as the decoder's stream what is made for a place is."""
        return 1 + len(self.early)

    @property
    def place_size(self) -> int:
        """Height and width of what gets one place, in pixels."""
        return self.patch_size * self.merge


class FlopsPerToken(NamedTuple):
    """Floating-point operations of the matrix products for one token (a
    multiply and an add are two)."""

    layers: int
    head: int
    outputs: int
    """Of `layers`: what the last one does beyond keys and values,
    which only tokens need whose hidden states are wanted."""


@dataclass(frozen=True)
class DecoderSpec:
    """A whole decoder; or an encoder, whose attention is not causal."""

    architecture: str
    max_position_embeddings: int
    """The context length that the model was made for."""
    dtype: str
    """What the checkpoint says its weights are: float32, bfloat16 or float16."""
    embedding: TensorSpec
    blocks: tuple[BlockSpec, ...]
    final_norm: NormSpec | None
    head: LinearSpec | None
    """Shares the embedding's tensor where the two are tied. None: there are no logits of tokens."""
    embedding_scale: float = 1.0
    position_embedding: TensorSpec | None = None
    final_soft_cap: float | None = None
    optional_prefix: str = "model."
    """Names may come without it (checkpoints of the bare decoder)."""
    embedding_norm: NormSpec | None = None
    token_types: TensorSpec | None = None
    """Added to the tokens' embeddings: of texts, and of second texts in a pair, whose token ids are
    those of the vocabulary plus its size."""
    position_bias: PositionBiasSpec | None = None
    classifier: ClassifierSpec | None = None
    unused: tuple[str, ...] = ()
    """Beginnings of names of tensors that a checkpoint may hold besides."""
    vision: VisionSpec | None = None
    """Of a model that reads images."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Other beginnings of names that checkpoints have, and what stands for each here; the first
    that fits counts."""

    @property
    def vocab_size(self) -> int:
        """Token ids that there are: as many for each type of text."""
        num_types = 1 if self.token_types is None else self.token_types.shape[0]
        return self.embedding.shape[0] * num_types

    @property
    def is_encoder(self) -> bool:
        """Whether hidden states depend on what comes after them."""
        return not all(attention.is_causal for attention in self.attentions)

    @property
    def context_len(self) -> int:
        """The context that the config describes: what it names,
        or what YaRN makes of the length before scaling."""
        scaled = [rope.context_len for rope in self._ropes]
        return max(self.max_position_embeddings, *scaled, 0)

    @property
    def max_context_len(self) -> int:
        """The longest context that the model was made for: with a RoPE that scales itself,
        beyond the usual one."""
        scaled = [rope.max_context_len for rope in self._ropes]
        return max(self.context_len, *scaled, 0)

    @property
    def axes(self) -> tuple[int, ...]:
        """Of each pair of a head, which of a token's three positions turns it; none: a token has
        one."""
        return next((rope.axes for rope in self._ropes if rope.axes), ())

    @property
    def _ropes(self) -> tuple[RopeSpec, ...]:
        return tuple(
            dict.fromkeys(
                attention.rope for attention in self.attentions if attention.rope is not None
            )
        )

    @property
    def hidden_size(self) -> int:
        return self.embedding.shape[1]

    @property
    def is_tied(self) -> bool:
        return self.head is not None and self.head.weight.name == self.embedding.name

    @cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Every tensor once, in the order of the declaration."""
        return tuple(dict.fromkeys(_walk_tensors(self)))

    @cached_property
    def projections(self) -> tuple[tuple[LinearSpec, ...], ...]:
        """Every matrix product as the parts that are stacked into one weight;
        the head, where there is one, is the last."""
        head = () if self.head is None else ((self.head,),)
        return (*(parts for block in self.blocks for parts in block.projections), *head)

    @property
    def attentions(self) -> tuple[AnyAttention, ...]:
        """Every attention; each that is causal has a KV cache, in this order."""
        return tuple(
            mixer
            for block in self.blocks
            for mixer in block.mixers
            if isinstance(mixer, AnyAttention)
        )

    @property
    def kv_layers(self) -> tuple[KVLayerSpec, ...]:
        """For memory planning."""
        return tuple(a.kv_layer for a in self.attentions if a.is_causal)

    @property
    def num_parameters(self) -> int:
        """Trained numbers; a tied head counts once."""
        return sum(tensor.num_elements for tensor in self.tensors)

    @property
    def max_positions(self) -> int | None:
        """The length that the model cannot exceed (learned positions),
        or None where RoPE sets no hard limit."""
        return None if self.position_embedding is None else self.position_embedding.shape[0]

    def weight_bytes(self, dtype: str) -> int:
        """Return memory of the weights in the compute dtype. A tied head is the embedding's own
        memory."""
        wide = sum(tensor.num_elements for tensor in self.tensors if tensor.keeps_float32)
        narrow = self.num_parameters - wide
        return narrow * DTYPE_BYTES[dtype] + wide * DTYPE_BYTES["float32"]

    def flops_per_token(self) -> FlopsPerToken:
        """Matrix products with weights; attention itself (which grows with the context)
        is `attention_flops`."""
        layers = [
            round(
                sum(
                    part.share * part.weight.num_elements
                    for parts in block.projections
                    for part in parts
                )
            )
            for block in self.blocks
        ]
        last = self.attentions[-1]
        keys_and_values = sum(each.weight.num_elements for each in last.kv_projections)
        return FlopsPerToken(
            layers=2 * sum(layers),
            head=0 if self.head is None else 2 * self.head.weight.num_elements,
            outputs=2 * (layers[-1] - keys_and_values) if last.is_causal else 0,
        )

    def attention_flops(self, context_len: int, *, is_wanted: bool = True) -> int:
        """Operations of attention for one token at the end of a context: scores, then the weighted
        sum of values.

        Where the token's hidden state is not needed, the last layer has none.
        """
        return sum(
            a.flops_per_key * (context_len if a.window is None else min(context_len, a.window))
            for a in (self.attentions if is_wanted else self.attentions[:-1])
        )


def linear(name: str, num_inputs: int, num_outputs: int, *, has_bias: bool = False) -> LinearSpec:
    """`name.weight` [outputs, inputs], and `name.bias` [outputs] if there is one."""
    bias = TensorSpec(f"{name}.bias", (num_outputs,)) if has_bias else None
    return LinearSpec(TensorSpec(f"{name}.weight", (num_outputs, num_inputs)), bias)


def rms_norm(name: str, size: int, eps: float, *, weight_offset: float = 0.0) -> NormSpec:
    """`name.weight` alone."""
    weight = TensorSpec(f"{name}.weight", (size,), centre=1.0 - weight_offset)
    return NormSpec("rms", weight, eps, weight_offset=weight_offset)


def layer_norm(name: str, size: int, eps: float, *, has_bias: bool = True) -> NormSpec:
    """`name.weight`, and `name.bias` if there is one."""
    weight = TensorSpec(f"{name}.weight", (size,), centre=1.0)
    bias = TensorSpec(f"{name}.bias", (size,)) if has_bias else None
    return NormSpec("layer", weight, eps, bias=bias)


def _walk_tensors(node: object) -> Iterator[TensorSpec]:
    if isinstance(node, TensorSpec):
        yield node
    elif isinstance(node, tuple):
        for item in node:
            yield from _walk_tensors(item)
    elif dataclasses.is_dataclass(node):
        for field in dataclasses.fields(node):
            yield from _walk_tensors(getattr(node, field.name))
