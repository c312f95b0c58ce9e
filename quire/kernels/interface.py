"""The kernel seam: every operation that a model or the worker needs, as one protocol on tensors.

A back end (`reference`, `cpu`, later `triton`) implements `Kernels`. It knows tensors and shapes,
never a model's name and never a request. All tensors are contiguous unless said otherwise.

The contract beyond the arithmetic is *row invariance*: an output row is computed by the same
sequence of floating-point operations whatever other rows are in the call, however many there are,
and at any number of threads. Accumulation is float32 for bfloat16 and float32 inputs; results are
rounded once to the output dtype.

Shapes: T tokens in the step, S sequences, H hidden, N outputs, K inputs, D head size, B blocks, P
positions, E experts of a layer, k of them for a token, F their inner width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from quire.kernels.exchange import Exchange
from quire.kernels.lora import ExpertAdapters, LoraWeight, PackedAdapter, StepAdapters
from quire.kernels.placed import StepContent
from quire.kernels.sampling import Draws
from quire.program.operations import Activation, Gating, Program, Routing

InputFormat = Literal["int8", "fp8", "float"]
"""What the inputs of a quantized weight are multiplied as."""


class PackedLinear(Protocol):
    """A weight in the layout that a back end's GEMM wants. Opaque to everyone else."""

    num_outputs: int
    num_inputs: int

    @property
    def num_bytes(self) -> int: ...

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All memory that it holds."""
        ...


class EmbeddingTable(Protocol):
    """Rows that token ids choose from, [V, H]: a tensor,
    or what a back end made of one (see `Kernels.table_of`)."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [N, K] as small integers, or e4m3 numbers:
    `w[n, k] = scales[n, g] * values[n, k] + offsets[n, g]` with g = k // group_size.

    The one form that every way of quantizing (at load, GPTQ, AWQ, compressed-tensors, GGUF) is
    brought to before a back end packs it; it exists for one projection at a time. With
    `activations="int8"` the inputs are quantized too, row by row as they come: `s = max |x| / 127`,
    `q = round_half_even(x / s)`; the sums of products are then exact integers per group,
    `y = s * sum over g of (scales[n, g] * sum(q * values) + offsets[n, g] *
    sum(q))`, groups in ascending order in float32, each multiplication and addition rounded by
    itself: so every back end gives the same bits. A row whose `s` is below the smallest normal
    number counts as zeros; a row that is not finite gives not-a-numbers. With "float" the weight
    counts as its dequantized float32 values and the inputs stay as they are. With "fp8", for e4m3
    values alone, inputs become e4m3 as rows of the KV cache do (`Kernels.write_kv`), and groups are
    summed in float32, in an order that is a back end's own. Not every back end takes e4m3 values.
    """

    values: Tensor
    """int8 [N, K]: -128 ... 127, or -8 ... 7 where bits is 4; or float8_e4m3fn,
    with 8 bits and no offsets."""
    scales: Tensor
    """float32 [N, K / group_size]"""
    offsets: Tensor | None
    """float32 [N, K / group_size]; None: all zero."""
    bits: Literal[4, 8]
    group_size: int
    """Inputs that share a scale; a divisor of K, and K itself for one scale per output."""
    activations: InputFormat
    is_mxfp4: bool = False
    """Values are twice e2m1 numbers (0, 1, 2, 3, 4, 6, 8, 12 and their negatives), in 4 bits
    without offsets; scales are halves of those of the format, powers of two from 2^-126 to 2^124
    (OCP Microscaling Formats, version 1.0). Inputs are floating point."""

    @property
    def is_fp8(self) -> bool:
        """Whether the values are e4m3 numbers."""
        return self.values.dtype is torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """Which experts compute each token, and what each counts."""

    ids: Tensor
    """int64 [T, k], different ones in a row. One outside 0 ... E - 1 counts nothing, as an expert
    that is held elsewhere."""
    weights: Tensor
    """float32 [T, k]"""


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Neighbouring sequences of a batch whose contexts begin with the same blocks: G *runs*, most
    of them of one sequence.

    A run shares a number of positions that is a multiple of `Kernels.shared_prefix_unit`, zero
    where it shares none; all its new tokens lie behind them. A back end may read them once for the
    whole run; no bit of the result depends on it.
    """

    query_start: Tensor
    """int32 [G + 1]: the query rows of a run, which are those of its sequences."""
    context_len: Tensor
    """int32 [G]: shared positions and query rows of a run."""
    block_tables: Tensor
    """int32 [G, most shared blocks]"""
    shared_len: Tensor
    """int32 [G]: positions that a run shares."""
    known_len: Tensor
    """int32 [S]: the same for each sequence."""


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """A ragged batch as attention sees it: S sequences, each with `query_len` new tokens that end
    its context: one or more. The GPU's kernels and the reference also take sequences without new
    tokens, with which recorded steps are padded.

    Sequence s owns query rows `query_start[s] : query_start[s + 1]`; its last query row sits at
    absolute position `context_len[s] - 1`. The K and V of all its positions below `context_len[s]`
    are in the cache already (the step's own tokens are written before attention runs).
    """

    query_start: Tensor
    """int32 [S + 1]"""
    context_len: Tensor
    """int32 [S]"""
    block_tables: Tensor
    """int32 [S, max blocks]; entries beyond a sequence's context are undefined, and so are those of
    blocks all of whose positions are behind the window of all of the sequence's queries."""
    slots: Tensor
    """int64 [T]: physical slot (block * block_size + offset)
    that each of the step's tokens is written to."""
    positions: Tensor
    """int64 [T]: absolute position of each token."""
    max_query_len: int
    max_context_len: int
    shared: SharedPrefixes | None = None
    """Where sequences share blocks, for a back end that has a `shared_prefix_unit`."""
    others: tuple[AttentionBatch, ...] = ()
    """The same batch for groups of layers beyond the first: with their slots and block tables. Such
    groups may share tensors, as their block tables share no block."""
    group_of: tuple[int, ...] = ()
    """Of each cache, by its number, the group of layers that it belongs to; empty: all the first.
    """

    def of_cache(self, cache: int) -> AttentionBatch:
        """The batch as the layer with this cache sees it."""
        group = self.group_of[cache] if self.group_of else 0
        return self.others[group - 1] if group else self


@dataclass(frozen=True, slots=True)
class Weights:
    """What the numbers of a `Program` stand for, packed and in the compute dtype."""

    linears: tuple[PackedLinear, ...]
    tables: tuple[EmbeddingTable, ...]
    """[V, H] of the tokens, whose dtype is that of all activations, and [positions,
    H] if there are learned positions."""
    vectors: tuple[Tensor, ...]
    """Weights and biases of norms, sinks of attention, and biases of routers, which are float32."""
    ropes: tuple[Tensor, ...]
    """As `Kernels.rope` takes them, halves paired; each has `max_model_len` positions."""
    max_model_len: int
    """Positions are below it."""
    biases: tuple[Tensor, ...] = ()
    """As `Kernels.bidirectional_attention` takes them, for `max_model_len` positions."""
    exchange: Exchange | None = None
    """With the other ranks that hold a part of these weights; None where there are none."""

    @property
    def tensors(self) -> list[Tensor]:
        """All memory that they hold, each tensor once, in an order that the program decides."""
        of_linears = [tensor for linear in self.linears for tensor in linear.tensors]
        # a table of another type is a linear's
        tables = [table for table in self.tables if isinstance(table, Tensor)]
        held = [*of_linears, *tables, *self.vectors, *self.ropes, *self.biases]
        return list({id(tensor): tensor for tensor in held}.values())


class ForwardPass(Protocol):
    """A program that a back end runs: all blocks of a decoder in one call."""

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        kv_caches: Sequence[tuple[Tensor, Tensor]],
        num_wanted: Tensor | None = None,
        adapters: StepAdapters | None = None,
        content: StepContent | None = None,
    ) -> Tensor:
        """Ids and positions int64 [T] to hidden states [T, H], before the final norm; writes K and
        V of every token.

        `num_wanted`, int32 [S] on the host: of each sequence, how many of its last tokens' hidden
        states are wanted; None:
        all of them. Those of the others may be as an earlier layer left them: the last one need not
        compute them. Only a program that reads rows from outside takes any in `content`.
        """
        ...


class Kernels(Protocol):
    """One back end."""

    name: str
    device: torch.device
    """Where weights, caches and all arguments of its operations lie."""
    shared_prefix_unit: int | None
    """Prefixes of multiples of so many positions can be read once for several sequences; None:
    they cannot."""

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """Take a weight [N, K] (and bias [N]) into this back end's layout.
        The caller drops the original."""
        ...

    def pack_quantized(self, weight: QuantizedWeight, bias: Tensor | None = None) -> PackedLinear:
        """Pack as `pack_linear` does, for a weight of integers; `linear` takes either kind."""
        ...

    def linear(self, x: Tensor, weight: PackedLinear, *, out_dtype: str | None = None) -> Tensor:
        """`x [T, K] @ weight.T + bias -> [T, N]`, in x's dtype or, with `out_dtype="float32"`,
        unrounded."""
        ...

    def gated_linear(self, x: Tensor, weight: PackedLinear, activation: Gating) -> Tensor:
        """`activation(x @ gate.T) * (x @ up.T) -> [T, F]` in x's dtype, where weight [2 * F, K] is
        gate, then up (and so is its bias). The products are float32 throughout and the result is
        rounded once.
        """
        ...

    def pack_adapter(self, weights: Mapping[int, LoraWeight], num_weights: int) -> PackedAdapter:
        """Take an adapter of one dtype for a program of so many weights, some of which it changes,
        by their numbers."""
        ...

    def add_lora(
        self, y: Tensor, x: Tensor, adapters: StepAdapters, number: int, first_output: int = 0
    ) -> None:
        """Add to y [T, width], which holds what weight `number` gave for x [T, K] from column
        `first_output` on, what each token's adapter adds to these columns: `LoraWeight`'s sums in
        float32, rounded once with y. Parts that are not within the columns are left out. Rows
        without an adapter are not touched.
        """
        ...

    def add_lora_embedding(
        self, y: Tensor, token_ids: Tensor, adapters: StepAdapters, number: int
    ) -> None:
        """Add to y [T, H], the embeddings of token ids int64 [T], what each token's adapter adds to
        the embedding that has this number, as `add_lora` does."""
        ...

    def linear_argmax(self, x: Tensor, weight: PackedLinear) -> tuple[Tensor, Tensor]:
        """`SamplingKernels.argmax` of `linear(x, weight, out_dtype="float32")`: each row's largest
        output, the lowest of
        equals: ids int64 [T], values float32 [T]. A back end need not materialise the logits.
        """
        ...

    def linear_draws(
        self, x: Tensor, weight: PackedLinear, draws: Draws
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Run the LM head fused with unfiltered sampling: `linear_argmax`, and the tokens int64 [n]
        that `SamplingKernels.draw` gives for those logits without thresholds (any, for rows whose
        max logit is not finite). None if the back end has no fused version.
        """
        ...

    def table_of(self, weight: PackedLinear) -> EmbeddingTable | None:
        """Return the table [N, K] whose rows are those that `weight` was packed from, bit for bit,
        in memory that the two share; None where they cannot be had back (integers). So a head that
        is tied to the embedding exists once.
        """
        ...

    def embedding(self, token_ids: Tensor, table: EmbeddingTable) -> Tensor:
        """Gather rows: ids int64 [T], table [V, H] -> [T, H]."""
        ...

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0
    ) -> Tensor:
        """`x / sqrt(mean(x^2) + eps) * (weight + weight_offset)` over the last dimension;
        x is [..., H]."""
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Residual add, then norm: `(rms_norm(x + residual), x + residual)`,
        the sum rounded to x's dtype first."""
        ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Ordinary layer norm over the last dimension."""
        ...

    def is_finite(self, x: Tensor) -> bool:
        """Return whether no element of x, of any shape, is NaN or infinite. Waits for the
        device."""
        ...

    def finite_rows(self, x: Tensor) -> Tensor:
        """Return which rows of x [T, H] are finite: bool [T]. Waits for nothing."""
        ...

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        """Elementwise activation."""
        ...

    def gated(self, gate_up: Tensor, activation: Gating) -> Tensor:
        """`activation(gate) * up` where gate_up is [T, 2 * F], gate first -> [T, F]; see
        `Gating` for one that changes both."""
        ...

    def choose_experts(
        self, logits: Tensor, routing: Routing, bias: Tensor | None = None
    ) -> ExpertChoice:
        """Choose the largest of each row of float32 logits [T, E], larger first, the lowest id
        first among equals.

        They weigh their share of the softmax over all E or over those chosen, as `routing` says.
        With sigmoids, `sigmoid(logits) + bias` is chosen from, in float32 (bias float32 [E]; None:
        zero), and the sigmoids are the weights, divided by their sum plus 1e-20 if `routing`
        normalises. Groups are chosen by the same values, the lowest first among equals, and experts
        of other groups never. Weights are multiplied by `routing.factor` last. A row that holds a
        number that is not finite gives weights that are not.
        """
        ...

    def apply_experts(
        self,
        x: Tensor,
        up: PackedLinear,
        down: PackedLinear,
        choice: ExpertChoice,
        activation: Gating,
        adapters: ExpertAdapters | None = None,
    ) -> Tensor:
        """Return `sum over j of weights[t, j] * down(activation(gate(x[t])) * up(x[t]))`, [T, H],
        in x's dtype.

        The weights stack all experts: up [E * 2 * F, H], each expert's gate first, and down
        [E * H, F], packed by `Kernels.pack_linear` or `pack_quantized`. Each expert's products are
        those of `Kernels.gated_linear`, rounded to x's dtype, and of `Kernels.linear` in float32;
        these are weighed and added in the order of j, each multiplication and addition rounded by
        itself, from zero. What a token's adapter adds to an expert's outputs of either weight is
        added as by `add_lora`, in float32.
        """
        ...

    def gate_rows(self, x: Tensor, gate: Tensor) -> Tensor:
        """Multiply x [T, H] by the sigmoid of gate [T, 1], rounded once."""
        ...

    def head_linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        """Multiply each head by a weight of its own: [T, heads, K + rest] -> [T, heads, N + rest].

        The weight, of floats, stacks those of the heads: [heads * N, K]. The first K elements of a
        head give the products, which are those of `linear`, and the rest follows unchanged.
        """
        ...

    def rope(
        self,
        x: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        *,
        interleaved: bool = False,
        start: int = 0,
    ) -> None:
        """Rotate `x [T, heads, D]` in place by its positions (int64 [T]).

        `cos_sin` is float32 [P, 2, R / 2]: cosines, then sines, of the R rotated dimensions, which
        begin at `start`. Halves are paired (i, i + R / 2) as in Llama's Hugging Face layout, or
        neighbours (2 i, 2 i + 1) with `interleaved`. x may be a strided view whose last two
        dimensions are contiguous.
        """
        ...

    def write_kv(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
    ) -> None:
        """Store `key`, `value` [T, KV heads, D] into the caches [B, KV heads, block size, row] at
        `slots` (int64 [T]).

        The caches' dtype is their format (`quire.kernels.kv_cache`). float32 and bfloat16 keep the
        values, rounded to nearest even where they are narrower. int8 and fp8 keep a row x [D] as
        `q` and a float32 `s`, all in float32:
        `s = max(max |x| / M, 2**-126)` with M = 127 or 448, and `q = x / s` rounded to the nearest
        integer or e4m3 number, ties to even; the row then counts as the float32 products `q * s`.
        Where x holds a number that is not finite, all of the row counts as such. key and value may
        be strided views whose last two dimensions are contiguous. Where `value_cache` is
        `key_cache`, a row is key and value at once, and `value` is not looked at.
        """
        ...

    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        value_size: int | None = None,
        key_ends: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of a ragged batch over block tables: query [T, heads, D] -> [T, heads,
        D], contiguous.

        With a `value_size`, values are that many of the first elements of their rows, and so the
        output is [T, heads, value_size]; the caches may then be one tensor (latent attention).

        query may be a strided view whose last two dimensions are contiguous.

        `window` limits a query at position p to keys at positions above `p - window`; what is
        behind the windows of all queries of a sequence is not read. `soft_cap` replaces a score s
        by `soft_cap * tanh(s / soft_cap)` before masking. `sinks`, floats [heads], are scores that
        join the softmax of every query of their head, neither scaled nor capped, and have no value:
        the weights of keys add up to less than one (Xiao et al., arXiv:2309.17453, as gpt-oss
        learns them). `key_ends`, int32 [T], says of each query one behind the last position that it
        sees: its own, or a later one of its context, and never less than of the query before it;
        what a window hides does not change. KV tiles are aligned to absolute positions, never to
        blocks, so that the block size does not change a bit of the result.
        """
        ...

    def bidirectional_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Attention of whole sequences over themselves, without a cache: query [T, heads, D], key
        and value [T, KV heads, D] -> [T, heads, D], contiguous.

        They are views of one tensor of rows, whose last two dimensions are contiguous. Every
        sequence's context is its query rows, or the first of them: no row attends to those behind,
        and each must see one at least. `window` limits a query to keys less than that away,
        on both sides. `bias`, float32 [heads, 2 * P - 1], is added to scaled scores: column
        P - 1 + (key position - query position).
        """
        ...

    def reasons_against(self, program: Program) -> list[str]:
        """Return why this back end cannot run a program; empty where it can."""
        ...

    def compile(self, program: Program, weights: Weights) -> ForwardPass:
        """Return the program behind one call, for caches in the order of their numbers. The bits
        are those that this back end's operations give one by one (`quire.kernels.interpreter`).
        """
        ...

    def copy_blocks(self, caches: list[Tensor], sources: Tensor, destinations: Tensor) -> None:
        """Copy whole blocks within each cache [B, ...]: ids int64 [n];
        all reads happen before any write."""
        ...
