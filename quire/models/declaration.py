"""The words in which a model is declared, above its tensors (`quire.models.tensors`) and blocks
(`quire.models.blocks`): plain frozen records, no torch, no behaviour beyond counting.

A family's file builds one `DecoderSpec` with the checkpoint's weight names written inline. Loading,
memory planning, packing, sharding and quantising are generic walks over it; nothing here knows of
devices, tensor parallelism, quantisation or LoRA.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Literal, NamedTuple

from quire.common.frozen_record import FrozenRecord
from quire.models.blocks import AnyAttention, BlockSpec, KVLayerSpec, MlpSpec
from quire.models.rope import RopeSpec
from quire.models.tensors import DTYPE_BYTES, LinearSpec, NormSpec, TensorSpec

PoolingKind = Literal["last", "cls", "mean", "max", "mean_sqrt_len", "weighted_mean"]
"""How one vector is made of a text's hidden states."""
DenseActivation = Literal[
    "none", "tanh", "relu", "sigmoid", "gelu", "gelu_tanh", "gelu_sigmoid", "silu"
]


class DenseSpec(FrozenRecord):
    """A layer on a pooled vector: `norm(activation(linear(x)))`, in float32."""

    linear: LinearSpec
    activation: DenseActivation = "none"
    norm: NormSpec | None = None
    folder: str | None = None
    """The folder inside the model's whose file holds it; None: the checkpoint itself does."""


class ClassifierSpec(FrozenRecord):
    """From hidden states to the logits of classes."""

    kind: PoolingKind
    layers: tuple[DenseSpec, ...]
    is_per_token: bool = False
    """Whether each token has classes, not the text; `kind` then says nothing."""


class PositionBiasSpec(FrozenRecord):
    """What all layers add to scores by how far a key is from its query, in buckets that become
    wider with the distance (T5, arXiv:1910.10683)."""

    table: TensorSpec
    """[buckets, heads]: of keys before the query and at it, then of those behind it."""
    max_distance: int
    """Keys further away share the last bucket."""


class RowsSpec(FrozenRecord):
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
    exit: MlpSpec | LinearSpec | None = None

    @property
    def hidden_size(self) -> int:
        """Width of the stream."""
        return self.width if self.entry is None else self.entry.num_outputs

    @property
    def projections(self) -> tuple[tuple[LinearSpec, ...], ...]:
        """Every matrix product as the parts that are stacked into one weight, in order."""
        first = () if self.entry is None else ((self.entry,),)
        last: tuple[tuple[LinearSpec, ...], ...] = ()
        if self.exit is not None:
            last = ((self.exit,),) if isinstance(self.exit, LinearSpec) else self.exit.projections
        return (*first, *(parts for block in self.blocks for parts in block.projections), *last)


class VisionSpec(FrozenRecord):
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
    pool: int = 1
    """Patches along each edge of the square whose rows' mean the projector reads, and that gets one
    place."""
    sees_whole: bool = False
    """Whether the decoder's tokens in places of an image attend to all of its places, those behind
    them too; else to those before them, as text does."""
    frame: tuple[int, int] | None = None
    """Tokens before and behind the places, set apart by empty lines. A prompt has the first alone,
    where an image is to stand. None: a prompt has the placeholder."""

    @property
    def num_projectors(self) -> int:
        """How many times as wide as the decoder's stream what is made for a place is."""
        return 1 + len(self.early)

    @property
    def place_size(self) -> int:
        """Height and width of what gets one place, in pixels."""
        return self.patch_size * self.merge


class StatesSpec(FrozenRecord):
    """What a draft head reads of each token: its embedding, and a hidden state of the target at the
    token before it, joined in this order. `entry` makes the stream of both. Without one, the first
    mixer reads both, and the state is the stream."""

    embedding_norm: NormSpec | None = None
    state_norm: NormSpec | None = None
    entry: LinearSpec | None = None
    is_stream_normed: bool = False
    """Where the state is the stream: behind its norm."""


class FlopsPerToken(NamedTuple):
    """Floating-point operations of the matrix products for one token (a
    multiply and an add are two)."""

    layers: int
    head: int
    outputs: int
    """Of `layers`: what the last one does beyond keys and values,
    which only tokens need whose hidden states are wanted."""


class DecoderSpec(FrozenRecord):
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
    states: StatesSpec | None = None
    """Of a draft head: it reads hidden states, too, which each step brings."""
    kept: tuple[int, ...] = ()
    """Blocks before which the stream is kept for a draft head, behind the result's columns."""
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
        entry = None if self.states is None else self.states.entry
        first = () if entry is None else ((entry,),)
        return (*first, *(parts for block in self.blocks for parts in block.projections), *head)

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


def _walk_tensors(node: object) -> Iterator[TensorSpec]:
    if isinstance(node, TensorSpec):
        yield node
    elif isinstance(node, tuple):
        for item in node:
            yield from _walk_tensors(item)
    else:  # a record, or a dataclass; anything else has no fields
        for name in getattr(node, "__match_args__", ()):
            yield from _walk_tensors(getattr(node, name))
