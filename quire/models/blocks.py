"""The words in which a model's blocks are declared: attention, MLPs and experts, and how they
follow one another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from quire.common.frozen_record import FrozenRecord
from quire.common.kv_formats import KV_FORMATS
from quire.models.rope import RopeSpec
from quire.models.tensors import LinearSpec, NormSpec, TensorSpec
from quire.program.operations import Gating, Routing


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


class AttentionSpec(FrozenRecord):
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


class LatentAttentionSpec(FrozenRecord):
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


class ExpertsSpec(FrozenRecord):
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


class Sublayer(FrozenRecord):
    """`post_norm(mixer(norm(x)))`; any norm may be absent."""

    norm: NormSpec | None
    mixer: Mixer
    post_norm: NormSpec | None = None
    sum_norm: NormSpec | None = None
    """Of the residual stream, once the output has joined it (as in BERT)."""


class BlockSpec(FrozenRecord):
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
