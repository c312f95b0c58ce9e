"""Runs a program operation by operation on a back end's kernels: what every faster way must give,
bit for bit.

With the reference kernels this is the definition of each operation. A back end that computes some
of them otherwise overrides `Interpreter.compute`. Values are tensors [rows, width], each let go
when it has been read for the last time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from quire.kernels.interface import AttentionBatch, Kernels, Weights
from quire.kernels.lora import ExpertAdapters, StepAdapters
from quire.kernels.placed import PlacedRows, Rotations, StepContent
from quire.program import operations as ops
from quire.program.operations import Program


class WantedTokens(NamedTuple):
    """The tokens whose hidden states are wanted: the last ones of their sequences."""

    rows: Tensor
    """Their places in the batch, int64 [W], ascending."""
    batch: AttentionBatch
    """The batch with these queries alone; its slots and positions are the whole one's."""


def wanted_tokens(num_wanted: Tensor, batch: AttentionBatch) -> WantedTokens | None:
    """Return of each sequence the last `num_wanted`, int32 [S] on the host; None where these are
    all, or most.

    Waits for nothing: how many there are is known on the host, and where they are is found on the
    device.
    """
    count, num_tokens = int(num_wanted.sum()), batch.positions.numel()
    if 2 * count > num_tokens:
        return None
    device = batch.query_start.device
    counts = (num_wanted.pin_memory() if device.type == "cuda" else num_wanted).to(
        device, non_blocking=True
    )
    ends = counts.cumsum(0, dtype=torch.int32)
    shifts = torch.repeat_interleave(batch.query_start[1:] - ends, counts, output_size=count)
    rows = shifts + torch.arange(count, dtype=torch.int64, device=device)
    starts = torch.nn.functional.pad(ends, (1, 0))
    narrow, *others = (
        replace(each, query_start=starts, max_query_len=int(num_wanted.max()), shared=None)
        for each in (batch, *batch.others)
    )
    return WantedTokens(rows, replace(narrow, others=tuple(others)))


@dataclass(frozen=True, slots=True)
class StepTensors:
    """What operations read besides values and weights."""

    token_ids: Tensor
    all_positions: Tensor
    kv_caches: Sequence[tuple[Tensor, Tensor]]
    batch: AttentionBatch
    """Of the rows that are computed."""
    wanted: WantedTokens | None = None
    is_narrow: bool = False
    """Whether those are the wanted tokens' rows alone."""
    adapters: StepAdapters | None = None
    """Of the rows that are computed; None where none of them uses one."""
    placed: PlacedRows | None = None
    rotations: Rotations | None = None
    """Of the rows that are computed."""
    key_ends: Tensor | None = None
    """Likewise."""

    @property
    def positions(self) -> Tensor:
        """Of the rows that are computed."""
        return (
            self.all_positions
            if not self.is_narrow
            else self.all_positions.index_select(0, self.wanted_rows)
        )

    @property
    def wanted_rows(self) -> Tensor:
        """The wanted tokens' places in the batch."""
        assert self.wanted is not None
        return self.wanted.rows


class Interpreter:
    """Implements `ForwardPass`."""

    def __init__(self, whole: Program, wanted: Program, weights: Weights, kernels: Kernels) -> None:
        """`wanted` runs where no more than half of the hidden states are wanted;
        see `quire.program.passes`."""
        self._weights, self._kernels = weights, kernels
        self._whole, self._wanted = _with_lifetimes(whole), _with_lifetimes(wanted)

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
        """See `ForwardPass`."""
        wanted = None if num_wanted is None else wanted_tokens(num_wanted, batch)
        whole = StepTensors(
            token_ids, positions, kv_caches, batch, wanted, adapters=adapters, **_brought(content)
        )
        narrow = whole if wanted is None else _narrowed(whole, wanted)
        values: dict[int, Any] = {}
        for operation, is_narrow, dying in self._whole if wanted is None else self._wanted:
            inputs = [values[index] for index in operation.inputs]
            outputs = self.compute(operation, narrow if is_narrow else whole, *inputs)
            values.update(
                zip(
                    operation.outputs,
                    outputs if isinstance(outputs, tuple) else (outputs,),
                    strict=True,
                )
            )
            for index in dying:
                del values[index]
        [found] = values.values()
        return cast(Tensor, found)

    def compute(
        self, operation: ops.Operation, step: StepTensors, x: Any = None, y: Any = None
    ) -> Any:
        """Return the output of an operation, or a tuple of several, from its inputs.
        Rows of heads are changed in place."""
        kernels, weights = self._kernels, self._weights
        match operation:
            case ops.Linear():
                return self._linear(operation, step, x)
            case ops.AddNorm(norm=norm) if norm.kind == "rms":
                weight = weights.vectors[norm.weight]
                return kernels.add_rms_norm(
                    x, y, weight, norm.eps, weight_offset=norm.weight_offset
                )
            case ops.AddNorm(norm=norm):
                return normed(kernels, weights, norm, total := x + y), total
            case ops.GatedLinear():
                return self._gated_linear(operation, step, x)
            case ops.PrepareHeads(parts=parts):
                return reduce(lambda rows, part: self.compute(part, step, rows), parts, x)
            case ops.Experts():
                return self._apply_experts(operation, step, x)
            case ops.GateRows():
                return kernels.gate_rows(x, y)
            case ops.Add():
                return x + y
            case ops.Norm(norm=norm):
                return normed(kernels, weights, norm, x)
            case ops.Activate(activation=activation):
                return kernels.activate(x, activation)
            case ops.Scale(factor=factor):
                return x * rounded(factor, x.dtype)
            case ops.Join():
                return torch.cat((x, y), 1)
            case ops.Gather(columns=columns):
                assert weights.exchange is not None, "a divided program needs the other ranks"
                return weights.exchange.columns(x, columns, operation.width)
            case ops.Select():
                return x.index_select(0, step.wanted_rows)
            case ops.Scatter():
                return x.index_copy(0, step.wanted_rows, y)
            case ops.Embed() | ops.EmbedGathered() | ops.AdaptEmbedding():
                return self._embed(operation, step, x)
            case ops.Place() | ops.AddPlaced() | ops.Take():
                return self._place(operation, step, x)
        return self._compute_heads(operation, step, x)

    def _compute_heads(self, operation: ops.Operation, step: StepTensors, x: Tensor) -> Tensor:
        """Compute what reads rows as heads: their norms, rotations, caches and attention."""
        kernels, weights = self._kernels, self._weights
        match operation:
            case ops.Attend():
                return self._attend(operation, step, x)
            case ops.AttendAll(heads=heads, scale=scale, window=window, bias=bias):
                table = None if bias is None else weights.biases[bias]
                attended = kernels.bidirectional_attention(
                    *split_heads(x, heads), step.batch, scale=scale, window=window, bias=table
                )
                return attended.flatten(1)
            case ops.NormHeads(heads=heads, of=of, norm=norm):
                part = split_heads(x, heads)[0 if of == "queries" else 1]
                rows = part.contiguous().view(-1, norm.size)
                part.copy_(normed(kernels, weights, norm, rows).view(part.shape))
                return x
            case ops.Rope(heads=heads):
                positions, angles = self._rotations(step, operation.table)
                for part in split_heads(x, heads)[:2]:
                    kernels.rope(part, positions, angles)
                return x
            case ops.WriteKV(heads=heads, cache=cache):
                slots = step.batch.of_cache(cache).slots
                kernels.write_kv(*split_heads(x, heads)[1:], *step.kv_caches[cache], slots)
                return x
            case ops.HeadLinear(weight=index, num_heads=num_heads):
                heads_of_x = x.view(len(x), num_heads, x.shape[1] // num_heads)
                return kernels.head_linear(heads_of_x, weights.linears[index]).flatten(1)
            case ops.RotateTails(num_heads=num_heads, table=table, is_interleaved=is_interleaved):
                heads_of_x = x.view(len(x), num_heads, x.shape[1] // num_heads)
                self._rotate_tails(heads_of_x, step, table, is_interleaved)
                return x
            case ops.WriteLatent():
                return self._write_latent(operation, step, x)
        raise NotImplementedError(f"the interpreter has no {type(operation).__name__}")

    def _embed(
        self,
        operation: ops.Embed | ops.EmbedGathered | ops.AdaptEmbedding,
        step: StepTensors,
        x: Any,
    ) -> Tensor:
        """Return the embeddings that `operation` looks up, or x with what adapters add to it."""
        match operation:
            case ops.EmbedGathered():
                return self._embed_gathered(operation, step.token_ids)
            case ops.Embed(table=table, of=of):
                ids = step.token_ids if of == "token_ids" else step.all_positions
                return self._kernels.embedding(ids, self._weights.tables[table])
        rows = cast(Tensor, x)
        if step.adapters is not None:
            rows = rows.clone()
            self._kernels.add_lora_embedding(rows, step.token_ids, step.adapters, operation.number)
        return rows

    @staticmethod
    def _place(
        operation: ops.Place | ops.AddPlaced | ops.Take, step: StepTensors, x: Any
    ) -> Tensor:
        """Return x with the rows that the step brings for some tokens, if any; see `PlacedRows`."""
        placed = step.placed
        if isinstance(operation, ops.Take):
            assert placed is not None, "this program computes rows from outside"
            blank = placed.rows.new_zeros(len(step.token_ids), placed.rows.shape[1])
            return blank.index_copy(0, placed.tokens, placed.rows)
        rows = cast(Tensor, x)
        if placed is None:
            return rows
        width = rows.shape[1]
        if isinstance(operation, ops.Place):
            return rows.index_copy(0, placed.tokens, placed.rows[:, :width])
        first = operation.first_column
        return rows.index_add(0, placed.tokens, placed.rows[:, first : first + width].contiguous())

    def _rotations(self, step: StepTensors, table: int | None) -> tuple[Tensor, Tensor]:
        """Return of each token the row of a table that turns it, and the table."""
        if step.rotations is not None:
            return step.rotations
        assert table is not None, "this program takes rotations from outside"
        return step.positions, self._weights.ropes[table]

    def _linear(self, operation: ops.Linear, step: StepTensors, x: Tensor) -> Tensor:
        index, columns = operation.weight, operation.columns
        found = self._kernels.linear(x, self._weights.linears[index])
        first = 0 if columns is None else columns.start
        if columns is not None:
            found = found[:, first : columns.stop].contiguous()
        if operation.is_adaptable and step.adapters is not None:
            self._kernels.add_lora(found, x, step.adapters, index, first)
        return found

    def _gated_linear(self, operation: ops.GatedLinear, step: StepTensors, x: Tensor) -> Tensor:
        kernels, weight = self._kernels, self._weights.linears[operation.weight]
        if not operation.is_adaptable or step.adapters is None:
            return kernels.gated_linear(x, weight, operation.activation)
        products = kernels.linear(x, weight, out_dtype="float32")
        kernels.add_lora(products, x, step.adapters, operation.weight)
        return kernels.gated(products, operation.activation).to(x.dtype)

    def _attend(self, operation: ops.Attend, step: StepTensors, x: Tensor) -> Tensor:
        heads, sinks = operation.heads, operation.sinks
        queries = x.view(len(x), x.shape[1] // heads.head_dim, heads.head_dim)
        attended = self._kernels.paged_attention(
            queries[:, : heads.num_queries],
            *step.kv_caches[operation.cache],
            step.batch.of_cache(operation.cache),
            scale=operation.scale,
            window=operation.window,
            soft_cap=operation.soft_cap,
            sinks=None if sinks is None else self._weights.vectors[sinks],
            value_size=operation.value_size,
            key_ends=step.key_ends,
        )
        return attended.flatten(1)

    def _apply_experts(self, operation: ops.Experts, step: StepTensors, x: Tensor) -> Tensor:
        if operation.held is not None:
            raise NotImplementedError("experts that ranks divide are computed by native programs")
        kernels, linears = self._kernels, self._weights.linears
        logits = kernels.linear(x, linears[operation.router], out_dtype="float32")
        adapters = None
        if operation.is_adaptable and step.adapters is not None:
            kernels.add_lora(logits, x, step.adapters, operation.router)
            adapters = ExpertAdapters(step.adapters, operation.up, operation.down)
        added = None if operation.bias is None else self._weights.vectors[operation.bias]
        choice = kernels.choose_experts(logits, operation.routing, added)
        up, down = linears[operation.up], linears[operation.down]
        if adapters is None:  # not every back end takes any
            return kernels.apply_experts(x, up, down, choice, operation.activation)
        return kernels.apply_experts(x, up, down, choice, operation.activation, adapters)

    def _embed_gathered(self, operation: ops.EmbedGathered, token_ids: Tensor) -> Tensor:
        exchange, ids = self._weights.exchange, operation.ids
        assert exchange is not None, "a divided program needs the other ranks"
        if not bool(((token_ids >= 0) & (token_ids < operation.num_ids)).all()):
            raise IndexError(f"a token id is outside the table of {operation.num_ids} rows")
        places = token_ids - ids.start
        is_own = (places >= 0) & (places < len(ids))
        table = self._weights.tables[operation.table]
        rows = self._kernels.embedding(torch.where(is_own, places, 0), table)
        return exchange.rows(rows.contiguous(), is_own)

    def _rotate_tails(
        self, heads: Tensor, step: StepTensors, table: int, is_interleaved: bool
    ) -> None:
        """Rotate the last elements of heads [T, heads, D] in place."""
        rows, angles = self._rotations(step, table)
        start = heads.shape[2] - 2 * angles.shape[2]
        self._kernels.rope(heads, rows, angles, interleaved=is_interleaved, start=start)

    def _write_latent(self, operation: ops.WriteLatent, step: StepTensors, x: Tensor) -> Tensor:
        latent, row = x[:, : operation.norm.size], x.unsqueeze(1)
        latent.copy_(normed(self._kernels, self._weights, operation.norm, latent.contiguous()))
        self._rotate_tails(row, step, operation.table, operation.is_interleaved)
        slots = step.batch.of_cache(operation.cache).slots
        self._kernels.write_kv(row, row, *step.kv_caches[operation.cache], slots)
        return x


def _brought(content: StepContent | None) -> dict[str, Any]:
    return {} if content is None else content._asdict()


def _narrowed(whole: StepTensors, wanted: WantedTokens) -> StepTensors:
    """The wanted tokens' rows of a step."""
    adapters = whole.adapters
    if adapters is not None:
        adapters = adapters._replace(of_token=adapters.of_token[wanted.rows])
    rotations = whole.rotations
    if rotations is not None:
        rotations = rotations._replace(rows=rotations.rows[wanted.rows])
    key_ends = None if whole.key_ends is None else whole.key_ends[wanted.rows]
    return replace(
        whole,
        batch=wanted.batch,
        is_narrow=True,
        adapters=adapters,
        rotations=rotations,
        key_ends=key_ends,
    )


def _with_lifetimes(program: Program) -> list[tuple[ops.Operation, bool, tuple[int, ...]]]:
    """Return the operations; whether each computes the wanted tokens' rows alone;
    the values that are not read after it."""
    return list(zip(program.operations, program.rows_wanted(), program.last_reads(), strict=True))


def normed(kernels: Kernels, weights: Weights, norm: ops.NormWeights, x: Tensor) -> Tensor:
    """Return the norm over the last dimension of x, which is as wide as the norm."""
    weight = weights.vectors[norm.weight]
    if norm.kind == "layer":
        bias = None if norm.bias is None else weights.vectors[norm.bias]
        return kernels.layer_norm(x, weight, bias, norm.eps)
    return kernels.rms_norm(x, weight, norm.eps, weight_offset=norm.weight_offset)


def split_heads(x: Tensor, heads: ops.Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows [T, heads * D] as views: queries, keys and values [T, heads, D]."""
    rows = x.view(len(x), heads.width // heads.head_dim, heads.head_dim)
    queries, keys, values = rows.split_with_sizes(
        (heads.num_queries, heads.num_keys, heads.num_keys), dim=1
    )
    return queries, keys, values


def rounded(number: float, dtype: torch.dtype) -> float:
    """Return a number as a tensor of `dtype` would hold it."""
    return torch.tensor(number, dtype=dtype).item()
