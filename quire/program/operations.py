"""The operations of a forward pass on numbered values, and the list of them that a decoder is
lowered to.

A value is an activation [rows, width] in the compute dtype. Each is written once, by the operation
that has its number among `outputs`, and its rows are the step's tokens, or, from a `Select` on,
those whose hidden states are wanted. Weights, tables of RoPE and caches are numbers too: what they
stand for is `quire.kernels.interface.Weights`, and the caches of the step. So a program is plain
data that knows no tensor and no back end. Operations run in the order of the list; only `WriteKV`,
`WriteLatent` and `Attend` touch anything but their values.
"""

from __future__ import annotations

from typing import Literal, get_args

from quire.common.frozen_record import FrozenRecord

Activation = Literal["silu", "gelu", "gelu_tanh", "gelu_sigmoid"]
"""A function of one number; `gelu_sigmoid` is `x * sigmoid(1.702 x)` (CLIP)."""
Gating = Literal["silu", "gelu", "gelu_tanh", "gelu_sigmoid", "clamped_swish"]
"""What becomes of gate and up: `activation(gate) * up`, or, with `clamped_swish` (gpt-oss),
`swish(min(gate, 7)) * (clamp(up, -7, 7) + 1)`, where `swish(x)` is `x * sigmoid(1.702 x)`."""


def activation_code(activation: str) -> int:
    """Return an activation's number in all back ends; ValueError where it has none."""
    return _place(activation, get_args(Activation))


def gating_code(gating: str) -> int:
    """Return the same number, or that of a gating of both sides."""
    return _place(gating, get_args(Gating))


def unary(gating: Gating) -> Activation:
    """Return a gating as an activation; ValueError where it is one of both sides alone."""
    if gating == "clamped_swish":
        raise ValueError(f"activation {gating!r} needs a gate")
    return gating


def _place(name: str, names: tuple[str, ...]) -> int:
    if name not in names:
        raise ValueError(f"activation {name!r} is not one of {', '.join(names)}")
    return names.index(name)


class Operation(FrozenRecord):
    """Computes values from values."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Embed(Operation):
    """Gathers the rows of a table that the token ids, or the positions, name."""

    table: int
    of: Literal["token_ids", "positions"]


class AdaptEmbedding(Operation):
    """Adds to tokens' embeddings what the adapters of their rows add to them."""

    number: int
    """By which adapters know the embedding."""


class Place(Operation):
    """Replaces rows by the first columns of those that the step brings for them from outside, if it
    brings any."""


class AddPlaced(Operation):
    """Adds to rows some columns of those that the step brings for them from outside."""

    first_column: int


class Take(Operation):
    """The rows that the step brings from outside; zeros for tokens that it brings none for."""


class Join(Operation):
    """The columns of the first input, then those of the second."""


class Scale(Operation):
    """Multiplies by a number, which is rounded to the compute dtype first."""

    factor: float


class Add(Operation):
    """Adds two values; in the residual stream the first one is the stream."""


class NormWeights(FrozenRecord):
    """An RMS norm, or a layer norm, of each `size` neighbouring elements of a row."""

    kind: Literal["rms", "layer"]
    weight: int
    bias: int | None
    eps: float
    weight_offset: float
    size: int


class Norm(Operation):
    """Normalises each row."""

    norm: NormWeights


class AddNorm(Operation):
    """`(x, residual)` to `(norm(x + residual), x + residual)`,
    the sum rounded before it is normalised."""

    norm: NormWeights


class Linear(Operation):
    """`x @ weight.T + bias`, or some neighbouring columns of it."""

    weight: int
    columns: range | None = None
    is_adaptable: bool = False
    """Rows that use an adapter get what it adds to these outputs, once they are rounded."""


class GatedLinear(Operation):
    """`activation(x @ gate.T) * (x @ up.T)`; the weight has the gate's
    outputs before the other ones."""

    weight: int
    activation: Gating
    is_adaptable: bool = False
    """Rows that use an adapter get what it adds to both products, in float32,
    before the activation."""


class Routing(FrozenRecord):
    """How experts are chosen by logits: the largest, the lowest id first among equals.

    With the "sigmoid" of a logit as score, an expert is chosen by its score plus a bias, and weighs
    its score alone (DeepSeek V3, arXiv:2412.19437). Where there are groups, as many experts in
    each, the best groups are chosen first, and then among their experts.
    """

    num_experts: int
    num_chosen: int
    is_normalised: bool
    """An expert weighs its share of the softmax over those chosen, not over all; or its share of
    the chosen scores."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = 1
    num_groups_chosen: int = 1
    group_value: Literal["best", "best_two"] = "best"
    """What a group is chosen by: its largest value, or the sum of its largest two."""
    factor: float = 1.0
    """On weights."""

    @property
    def group_size(self) -> int:
        """Experts of a group."""
        return self.num_experts // self.num_groups

    @property
    def is_possible(self) -> bool:
        """Whether there are as many experts and groups as are to be chosen."""
        return (
            1 <= self.num_groups_chosen <= self.num_groups <= self.num_experts
            and self.num_experts % self.num_groups == 0
            and 1 <= self.num_chosen <= self.num_groups_chosen * self.group_size
            and (self.group_value == "best" or self.group_size > 1)
        )


class Experts(Operation):
    """The sum of what the chosen experts make of each row, in the order of the choices.

    `router` gives the logits. An expert is a gated MLP; in the weights `up`, which has each one's
    gate before its other outputs, and `down`, experts follow one another.
    """

    router: int
    up: int
    down: int
    inner: int
    """Width of an expert's activation."""
    routing: Routing
    activation: Gating
    bias: int | None = None
    """The vector, float32, that is added to scores for the choice."""
    held: range | None = None
    """Of several ranks, the experts that this one has; None where there is one."""
    columns: range | None = None
    """Of each expert's activation, those that this rank computes; None: all."""
    is_adaptable: bool = False
    """Rows that use an adapter get what it adds to the router's logits and to experts' outputs, in
    float32."""


class GateRows(Operation):
    """Multiplies each row of the first input by the sigmoid of the second one's only column."""


class Activate(Operation):
    """Applies an activation to each element."""

    activation: Activation


class Heads(FrozenRecord):
    """A row of heads: queries, then keys, then as many values."""

    num_queries: int
    num_keys: int
    head_dim: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """As a tuple."""
        return self.num_queries, self.num_keys, self.head_dim

    @property
    def width(self) -> int:
        """Elements of the row."""
        return (self.num_queries + 2 * self.num_keys) * self.head_dim

    @property
    def query_width(self) -> int:
        """Elements of all queries."""
        return self.num_queries * self.head_dim

    @property
    def key_width(self) -> int:
        """Elements of all keys."""
        return self.num_keys * self.head_dim


class InPlaceOperation(Operation):
    """Changes rows in place: the output takes the memory of the input, which nothing else reads."""


class HeadOperation(InPlaceOperation):
    """Changes rows of heads."""

    heads: Heads


class NormHeads(HeadOperation):
    """Norm of the queries, or of the keys: of each head, or of all of them together,
    as the norm's size says."""

    of: Literal["queries", "keys"]
    norm: NormWeights


class Rope(HeadOperation):
    """Rotates queries and keys: by what the step brings for each token, or by their positions."""

    table: int | None
    """By positions; None: the step brings what turns all pairs of a head."""


class WriteKV(HeadOperation):
    """Stores keys and values in a cache; the row stays as it is."""

    cache: int


class PrepareHeads(HeadOperation):
    """Several operations on a row of heads in one;
    `parts` name the fused operation's values at both ends."""

    parts: tuple[NormHeads | Rope | WriteKV, ...]

    def norm_of(self, of: Literal["queries", "keys"]) -> NormWeights | None:
        """Return the norm of the queries, or of the keys."""
        return next(
            (part.norm for part in self.parts if isinstance(part, NormHeads) and part.of == of),
            None,
        )

    @property
    def rope(self) -> Rope | None:
        """What rotates; None where nothing does."""
        return next((part for part in self.parts if isinstance(part, Rope)), None)

    @property
    def cache(self) -> int | None:
        """That keys and values go to; None where they go nowhere."""
        return next((part.cache for part in self.parts if isinstance(part, WriteKV)), None)


class HeadLinear(Operation):
    """Multiplies the first elements of each head by a weight of the head's own. What is behind them
    follows the product."""

    weight: int
    """Of floats: the heads' outputs follow one another."""
    num_heads: int
    rest: int
    """Elements of a head behind those that are multiplied."""


class RotateTails(InPlaceOperation):
    """Rotates the last elements of each head by their position, as many as the table has."""

    num_heads: int
    table: int
    is_interleaved: bool
    """Neighbours are pairs; else the halves are."""


class WriteLatent(InPlaceOperation):
    """Stores each row in a cache, as the only key of its token and its value: normalised, but for
    what is behind the norm's width, which is rotated (arXiv:2405.04434, section 2.1)."""

    norm: NormWeights
    table: int
    is_interleaved: bool
    """As in `RotateTails`."""
    cache: int


class Attend(Operation):
    """Causal attention of the queries, which the input's rows begin with, over a cache."""

    heads: Heads
    cache: int
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: int | None = None
    """The vector with a score of each head that joins every softmax and has no value."""
    value_size: int | None = None
    """Where the cache has no values: what counts as one are so many of the first elements of a
    key. The output's heads are as long."""


class AttendAll(Operation):
    """Attention of the input's rows of heads over one another, in each sequence: before and
    behind, or less than `window` away."""

    heads: Heads
    scale: float
    window: int | None
    bias: int | None
    """Added to scores, by how far the key is from the query."""


class Select(Operation):
    """Keeps the rows of the wanted tokens alone."""


class Scatter(Operation):
    """The first input, with the wanted tokens' rows replaced by those of the second."""


class Gather(Operation):
    """The whole value, of which each rank has some columns: no sum crosses ranks."""

    columns: tuple[range, ...]
    """Of the output, that the input has side by side."""
    width: int
    """Of the output."""


class EmbedGathered(Operation):
    """`Embed` of token ids, of whose table each rank has some rows."""

    table: int
    ids: range
    """That this rank has the rows of."""
    num_ids: int


class Head(FrozenRecord):
    """From hidden states to logits, where they are needed:
    `soft_cap * tanh(linear(norm(x)) / soft_cap)`, in float32."""

    norm: NormWeights | None
    weight: int | None
    """None: there are no logits."""
    soft_cap: float | None


class Program(FrozenRecord):
    """A decoder from token ids to hidden states, and its head."""

    operations: tuple[Operation, ...]
    widths: tuple[int, ...]
    """Of each value."""
    result: int
    """The hidden states, before the head's norm."""
    head: Head

    def last_reads(self) -> list[tuple[int, ...]]:
        """Return for each operation the values that are not read after it, its own outputs
        included."""
        read: set[int] = {self.result}
        found = []
        for operation in reversed(self.operations):
            dying = tuple(sorted({*operation.inputs, *operation.outputs} - read))
            read.update(dying)
            found.append(dying)
        return found[::-1]

    def rows_wanted(self) -> list[bool]:
        """Return for each operation whether it computes rows of wanted tokens alone."""
        narrow: set[int] = set()
        found = []
        for operation in self.operations:
            is_narrow = isinstance(operation, Select) or (
                not narrow.isdisjoint(operation.inputs) and not isinstance(operation, Scatter)
            )
            narrow.update(operation.outputs if is_narrow else ())
            found.append(is_narrow)
        return found
