"""A program behind one native call (csrc/cpu/program.cpp): its weights are checked once, a step's
tensors at each call.

Owns the tensors that the native operations point to, and where values lie in the arena.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire.kernels.cpu import _native, experts
from quire.kernels.cpu.attention import (
    MAX_HEAD_SIZE,
    bias_address,
    check_batch,
    native_cache,
    native_sinks,
)
from quire.kernels.cpu.checks import (
    FLOAT_CODES,
    address,
    float_code,
    indices_address,
    int32_address,
    require,
    vector_address,
)
from quire.kernels.cpu.elementwise import native_lookup
from quire.kernels.cpu.experts import PANEL
from quire.kernels.cpu.linear import CpuLinear
from quire.kernels.cpu.lora import native_adapters
from quire.kernels.cpu.paging import naming_files
from quire.kernels.interface import AttentionBatch, Weights
from quire.kernels.interpreter import rounded
from quire.kernels.lora import StepAdapters
from quire.kernels.placed import PlacedRows, Rotations, StepContent
from quire.program import operations as ops
from quire.program.arena import place_values
from quire.program.operations import Program, activation_code, gating_code
from quire.program.passes import fuse_add_norm, fuse_heads, select_wanted

KINDS: dict[type[ops.Operation], int] = {
    ops.Embed: 0, ops.Scale: 1, ops.Add: 2, ops.Norm: 3, ops.AddNorm: 3, ops.Linear: 4,
    ops.GatedLinear: 5, ops.Activate: 6, ops.PrepareHeads: 7, ops.Attend: 8,
    ops.AttendAll: 8, ops.Select: 9, ops.Scatter: 10, ops.Experts: 11, ops.GateRows: 12,
    ops.Place: 13, ops.Take: 14,
    ops.HeadLinear: 15, ops.RotateTails: 16, ops.WriteLatent: 17, ops.AddPlaced: 18,
    ops.Gather: 19, ops.EmbedGathered: 20, ops.AdaptEmbedding: 21,
}  # fmt: skip
"""The extension's numbers (csrc/cpu/program.hpp)."""
ONE_BY_ONE = (ops.Join,)
"""Operations that the extension does not have: a program with any of them is interpreted, with the
extension's kernels for the others."""
NO_FIELDS: dict[str, Any] = {
    "table": None, "of_positions": False, "factor": 1.0, "norm": None, "key_norm": None,
    "weight": None, "first_output": 0, "number": -1, "activation": 0, "heads": (0, 0, 1), "rope": 0,
    "rope_half": 0, "cache": -1, "scale": 1.0, "soft_cap": 0.0, "window": 0, "sinks": 0,
    "bias": 0, "bias_reach": 0,
    "down": None, "router": None, "routing": None, "is_interleaved": False, "value_size": 0,
    "pool": None, "gathering": None, "columns": [], "first_id": 0, "num_ids": 0,
    "numbers": (-1, -1, -1),
}  # fmt: skip
"""What an operation has where its kind says nothing."""


def reasons_against(program: Program) -> list[str]:
    """See `Kernels.reasons_against`."""
    unknown = {
        type(each).__name__
        for each in _fused(program).operations
        if type(each) not in KINDS and not isinstance(each, ONE_BY_ONE)
    }
    attends = [each for each in program.operations if isinstance(each, ops.Attend | ops.AttendAll)]
    sizes = {each.heads.head_dim for each in attends}
    reasons = [f"has no operation {name}" for name in sorted(unknown)]
    reasons += [
        f"has heads of at most {MAX_HEAD_SIZE}, not of {size}"
        for size in sorted(sizes)
        if size > MAX_HEAD_SIZE
    ]
    widths = {
        (program.widths[each.outputs[0]], each.inner)
        for each in program.operations
        if isinstance(each, ops.Experts)
    }
    reasons += [each for pair in sorted(widths) for each in experts.reasons_against(*pair)]
    outputs = {
        program.widths[each.outputs[0]] // each.num_heads - each.rest
        for each in program.operations
        if isinstance(each, ops.HeadLinear)
    }
    return reasons + [
        f"has weights of heads with outputs that {PANEL} divides, not {size}"
        for size in sorted(outputs)
        if size % PANEL
    ]


def _fused(program: Program) -> Program:
    return fuse_add_norm(fuse_heads(program))


class NativeProgram:
    """Implements `ForwardPass`."""

    def __init__(self, program: Program, weights: Weights) -> None:
        self._weights = weights  # keeps the memory alive that the native operations point to
        self._width, self._dtype = program.widths[program.result], weights.tables[0].dtype
        writers = [
            _Writer(_fused(each), weights) for each in (program, select_wanted(program, PANEL))
        ]
        whole, wanted = (writer.written() for writer in writers)
        self.derived = [tensor for writer in writers for tensor in writer.held]  # likewise
        """What was made of the weights for the operations to point to."""
        num_positions = min(
            [weights.max_model_len, *(table.shape[0] for table in weights.tables[1:])]
        )
        self._native = _native.Program(whole, wanted, num_positions)
        self._caches: list[weakref.ref[Tensor]] = []
        self._groups: tuple[int, ...] = ()

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
        self._attach(kv_caches, batch.group_of or (0,) * len(kv_caches))
        num_tokens, brought = token_ids.numel(), content or StepContent()
        of_adapters = ([], 0) if adapters is None else native_adapters(adapters, num_tokens)
        num_sequences = check_batch(batch)
        for each in batch.others:
            fits = each.block_tables.shape == batch.block_tables.shape
            require(fits, "step: block tables of another shape", each.block_tables)
        out = torch.empty((num_tokens, self._width), dtype=self._dtype)
        with naming_files():
            self._native.forward(
                indices_address(token_ids, "token_ids", num_tokens),
                indices_address(positions, "positions", num_tokens),
                int32_address(batch.query_start, "query_start"),
                int32_address(batch.context_len, "context_len"),
                num_sequences,
                num_tokens,
                [
                    (
                        indices_address(each.slots, "slots", num_tokens),
                        int32_address(each.block_tables, "block_tables"),
                    )
                    for each in (batch, *batch.others)
                ],
                batch.block_tables.shape[1],
                0
                if num_wanted is None
                else vector_address(num_wanted, "num_wanted", torch.int32, num_sequences),
                *of_adapters,
                *_native_rows(brought.placed, self._dtype),
                *_native_rotations(brought.rotations, num_tokens),
                0
                if brought.key_ends is None
                else vector_address(brought.key_ends, "key_ends", torch.int32, num_tokens),
                out.data_ptr(),
            )
        return out

    def _attach(self, kv_caches: Sequence[tuple[Tensor, Tensor]], groups: tuple[int, ...]) -> None:
        """Point the native step to these caches, unless they are those of the last call.
        Does not keep them alive."""
        tensors = [tensor for pair in kv_caches for tensor in pair]
        known = self._caches
        if (
            len(known) == len(tensors)
            and all(ref() is tensor for ref, tensor in zip(known, tensors, strict=True))
            and groups == self._groups
        ):
            return
        self._native.set_caches([native_cache(*pair) for pair in kv_caches], list(groups))
        self._groups = groups
        self._caches = [weakref.ref(tensor) for tensor in tensors]


def _native_rows(placed: PlacedRows | None, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Return what the extension takes of rows from outside: two addresses, count and width."""
    if placed is None:
        return 0, 0, 0, 0
    tokens, rows = placed
    fits = rows.dim() == 2 and rows.dtype == dtype and rows.is_contiguous()
    require(fits, f"step: expected rows of {dtype} [M, width] to be placed", rows)
    count, width = rows.shape
    return indices_address(tokens, "placed_tokens", count), rows.data_ptr(), count, width


def _native_rotations(rotations: Rotations | None, num_tokens: int) -> tuple[int, int, int, int]:
    """Return what the extension takes of rotations: two addresses, rows of the table and pairs."""
    if rotations is None:
        return 0, 0, 0, 0
    rows, table = rotations
    fits = table.dim() == 3 and table.shape[1] == 2 and table.dtype == torch.float32
    require(fits, "step: expected rotations float32 [rows, 2, R / 2]", table)
    count, _, half = table.shape
    found = address(table, "rotations")
    return indices_address(rows, "rotated_by", num_tokens), found, count, half


class _Writer:
    """Hands one program over to the extension, operation by operation."""

    def __init__(self, program: Program, weights: Weights) -> None:
        self._program, self._weights = program, weights
        self._dtype = weights.tables[0].dtype
        self.held: list[Tensor] = []
        """What was made for the operations to point to."""

    def written(self) -> _native.Operations:
        program = self._program
        native = _native.Operations(FLOAT_CODES[self._dtype], program.widths[program.result])
        places = list(zip(place_values(program).columns, program.widths, strict=True))
        for operation, is_narrow in zip(program.operations, program.rows_wanted(), strict=True):
            inputs, outputs = (
                [places[value] for value in values]
                for values in (operation.inputs, operation.outputs)
            )
            native.add(
                KINDS[type(operation)],
                is_narrow,
                inputs,
                outputs,
                **NO_FIELDS | self._fields(operation),
            )
        return native

    def _fields(self, operation: ops.Operation) -> dict[str, Any]:
        """Return what the extension needs to know besides values."""
        match operation:
            case ops.Embed(table=table, of=of):
                return {
                    "table": native_lookup(self._weights.tables[table]),
                    "of_positions": of == "positions",
                }
            case ops.Gather(columns=columns):
                places = [(part.start, part.stop) for part in columns]
                return {"gathering": self._gathering(), "columns": places}
            case ops.EmbedGathered(table=table, ids=ids, num_ids=num_ids):
                return {
                    "table": native_lookup(self._weights.tables[table]),
                    "gathering": self._gathering(), "first_id": ids.start, "num_ids": num_ids,
                }  # fmt: skip
            case ops.Scale(factor=factor):
                return {"factor": rounded(factor, self._dtype)}
            case ops.Norm(norm=norm) | ops.AddNorm(norm=norm):
                return {"norm": self._norm_weight(norm)}
            case ops.Linear(weight=weight, columns=columns, is_adaptable=is_adaptable):
                return {
                    "weight": self._linear_weight(weight),
                    "first_output": 0 if columns is None else columns.start,
                    "number": weight if is_adaptable else -1,
                }
            case ops.GatedLinear(weight=weight, activation=activation, is_adaptable=is_adaptable):
                return {
                    "weight": self._linear_weight(weight),
                    "activation": gating_code(activation),
                    "number": weight if is_adaptable else -1,
                }
            case ops.Experts():
                return self._experts(operation)
            case ops.AdaptEmbedding(number=number):
                return {"number": number}
            case ops.AddPlaced(first_column=first):
                return {"first_output": first}
            case ops.Activate(activation=activation):
                return {"activation": activation_code(activation)}
            case ops.PrepareHeads():
                return self._preparation(operation)
            case ops.HeadLinear() | ops.RotateTails() | ops.WriteLatent():
                return self._latent_fields(operation)
            case ops.Attend():
                return self._attention_fields(operation)
            case ops.AttendAll(heads=heads, scale=scale, window=window, bias=bias):
                fields = {"heads": heads.sizes, "scale": scale, "window": window or 0}
                if bias is None:
                    return fields
                offsets = self._weights.biases[bias]
                reach = offsets.shape[1] // 2
                return fields | {
                    "bias": bias_address(offsets, heads.num_queries), "bias_reach": reach,
                }  # fmt: skip
        return {}

    def _gathering(self) -> _native.Gathering:
        exchange = self._weights.exchange
        assert exchange is not None, "a divided program needs the other ranks"
        return exchange.native

    def _preparation(self, operation: ops.PrepareHeads) -> dict[str, Any]:
        fields: dict[str, Any] = {"heads": operation.heads.sizes}
        for name, norm in (
            ("norm", operation.norm_of("queries")),
            ("key_norm", operation.norm_of("keys")),
        ):
            if norm is not None:
                fields[name] = self._norm_weight(norm)
        if operation.rope is not None and operation.rope.table is None:
            fields["rope_half"] = operation.heads.head_dim // 2
        elif operation.rope is not None:
            assert operation.rope.table is not None
            rope = self._rope(operation.rope.table, operation.heads.head_dim)
            fields |= {"rope": address(rope, "rope"), "rope_half": rope.shape[-1]}
        if operation.cache is not None:
            fields["cache"] = operation.cache
        return fields

    def _attention_fields(self, operation: ops.Attend) -> dict[str, Any]:
        heads, sinks = operation.heads, operation.sinks
        fields = {
            "heads": heads.sizes, "cache": operation.cache, "scale": operation.scale,
            "soft_cap": operation.soft_cap or 0.0, "window": operation.window or 0,
            "value_size": operation.value_size or 0,
        }  # fmt: skip
        return fields if sinks is None else fields | {"sinks": self._sinks(sinks, heads)}

    def _latent_fields(
        self, operation: ops.HeadLinear | ops.RotateTails | ops.WriteLatent
    ) -> dict[str, Any]:
        width = self._program.widths[operation.inputs[0]]
        fields: dict[str, Any] = {}
        if isinstance(operation, ops.WriteLatent):
            shape = (0, 1, width)
            fields = {"norm": self._norm_weight(operation.norm), "cache": operation.cache}
        else:
            shape = (operation.num_heads, 0, width // operation.num_heads)
        if isinstance(operation, ops.HeadLinear):
            return {"heads": shape, "weight": self._linear_weight(operation.weight)}
        rope = self._rope(operation.table, shape[2])
        return fields | {
            "heads": shape, "rope": address(rope, "rope"), "rope_half": rope.shape[-1],
            "is_interleaved": operation.is_interleaved,
        }  # fmt: skip

    def _experts(self, operation: ops.Experts) -> dict[str, Any]:
        linears = self._weights.linears
        weights = experts.native_experts(linears[operation.up], linears[operation.down])
        held, columns = operation.held, operation.columns
        of_rank: dict[str, Any] = {}
        if held is not None and columns is not None:
            of_rank = {
                "gathering": self._gathering(), "first_id": held.start, "num_ids": len(held),
                "columns": [(columns.start, columns.stop)],
            }  # fmt: skip
        return of_rank | {
            "router": self._linear_weight(operation.router),
            "weight": weights.up,
            "down": weights.down,
            "pool": weights.pool,
            "number": weights.number,
            "numbers": (
                (operation.router, operation.up, operation.down)
                if operation.is_adaptable
                else (-1, -1, -1)
            ),
            "routing": self._routing(operation),
            "activation": gating_code(operation.activation),
        }

    def _routing(self, operation: ops.Experts) -> _native.ExpertRouting:
        bias = None if operation.bias is None else self._weights.vectors[operation.bias]
        size = operation.routing.num_experts
        if bias is not None:
            fits = bias.dtype == torch.float32 and bias.shape == (size,)
            require(fits, f"step: expected a router's bias float32 [{size}]", bias)
        return experts.native_routing(operation.routing, bias)

    def _linear_weight(self, index: int) -> _native.LinearWeight:
        weight = self._weights.linears[index]
        if not isinstance(weight, CpuLinear):
            raise TypeError(
                f"step: a weight was packed by another back end ({type(weight).__name__})"
            )
        return weight.native

    def _sinks(self, index: int, heads: ops.Heads) -> int:
        self.held.append(native_sinks(self._weights.vectors[index], heads.num_queries))
        return address(self.held[-1], "sinks")

    def _rope(self, index: int, head_dim: int) -> Tensor:
        table, length = self._weights.ropes[index], self._weights.max_model_len
        fits = (
            table.dtype == torch.float32
            and table.shape == (length, 2, table.shape[-1])
            and 2 * table.shape[-1] <= head_dim
        )
        require(
            fits, f"step: expected RoPE float32 [{length}, 2, R / 2] for heads of {head_dim}", table
        )
        return table

    def _norm_weight(self, norm: ops.NormWeights) -> _native.NormWeight:
        weight = self._weights.vectors[norm.weight]
        bias = None if norm.bias is None else self._weights.vectors[norm.bias]
        require(weight.shape == (norm.size,), f"step: expected a norm over {norm.size}", weight)
        if bias is not None and (bias.shape != weight.shape or bias.dtype != weight.dtype):
            raise ValueError(
                f"step: a norm of {weight.dtype} {list(weight.shape)} with bias {bias.dtype} "
                f"{list(bias.shape)}"
            )
        return _native.NormWeight(
            weight=address(weight, "norm"),
            bias=0 if bias is None else address(bias, "norm bias"),
            dtype=float_code(weight, "norm"),
            width=norm.size,
            eps=norm.eps,
            offset=norm.weight_offset,
            is_layer=norm.kind == "layer",
        )
