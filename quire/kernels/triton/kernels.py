"""`TritonKernels`: this folder's functions as one object with the shape of the `Kernels` protocol.
Not run on a GPU yet."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quire.common.capabilities import FP8_CAPABILITY
from quire.errors import ConfigError
from quire.kernels.interface import (
    AttentionBatch,
    EmbeddingTable,
    PackedLinear,
    QuantizedWeight,
    Weights,
)
from quire.kernels.lora import LoraWeight, PackedAdapter, StepAdapters
from quire.kernels.reference import elementwise as reference_elementwise
from quire.kernels.reference.attention import bidirectional_attention as reference_attention
from quire.kernels.sampling import Draws
from quire.kernels.triton import (
    attention,
    cache,
    elementwise,
    experts,
    integer_linear,
    linear,
)
from quire.kernels.triton.activation import NO_ACTIVATION
from quire.kernels.triton.integer_linear import IntegerLinear
from quire.kernels.triton.latent_attention import MAX_LATENT, MAX_TAIL, latent_attention
from quire.kernels.triton.library_attention import LibraryAttention
from quire.kernels.triton.linear import FloatLinear, ProductOptions
from quire.kernels.triton.program import TritonProgram
from quire.kernels.triton.row_argmax import argmax_of_rows
from quire.kernels.triton.tuning import Tuning, tuning_for
from quire.kernels.triton.unfinished import PartialSums
from quire.program import operations as ops
from quire.program.operations import Gating, Program

NO_ADAPTERS = "has no products for adapters yet; they run on the CPU (device='cpu')"
"""Why programs that take adapters are refused."""


class TritonKernels:
    """The whole `Kernels` protocol for one device. Holds its tuning and what it may use, and
    nothing else.

    `is_invariant`: a row's bits depend on nothing but the row. Without it, products of many rows
    may be a library's.
    """

    name = "triton"

    def __init__(
        self,
        device: torch.device,
        tuning: Tuning | None = None,
        *,
        is_invariant: bool = True,
        library_attention: LibraryAttention | None = None,
    ) -> None:
        self.device = device
        self.is_invariant = is_invariant
        self._library_attention = library_attention
        self.tuning = tuning_for(device) if tuning is None else tuning
        self.options = product_options(self.tuning, device, is_invariant=is_invariant)
        self.shared_prefix_unit = (
            None if library_attention is not None else attention.shared_prefix_unit(self.tuning)
        )

    rms_norm = staticmethod(elementwise.rms_norm)
    add_rms_norm = staticmethod(elementwise.add_rms_norm)
    layer_norm = staticmethod(elementwise.layer_norm)
    is_finite = staticmethod(elementwise.is_finite)
    finite_rows = staticmethod(elementwise.finite_rows)
    activate = staticmethod(elementwise.activate)
    gated = staticmethod(elementwise.gated)
    gate_rows = staticmethod(reference_elementwise.gate_rows)
    choose_experts = staticmethod(experts.choose_experts)
    apply_experts = staticmethod(experts.apply_experts)
    head_linear = staticmethod(experts.head_linear)
    rope = staticmethod(cache.rope)
    write_kv = staticmethod(cache.write_kv)
    copy_blocks = staticmethod(cache.copy_blocks)

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """Moves the weight to the device; its layout stays."""
        return linear.pack_linear(weight, bias, self.tuning, self.device, self.options)

    def pack_quantized(self, weight: QuantizedWeight, bias: Tensor | None = None) -> PackedLinear:
        """See `integer_linear`."""
        return integer_linear.pack_quantized(weight, bias, self.tuning, self.device, self.options)

    def table_of(self, weight: PackedLinear) -> Tensor | None:
        """See `Kernels.table_of`: a floating-point weight is its own table."""
        return weight.weight if isinstance(weight, FloatLinear) else None

    def linear(self, x: Tensor, weight: PackedLinear, *, out_dtype: str | None = None) -> Tensor:
        """See `Kernels.linear`; x has the dtype that a floating-point weight has."""
        return self._product(
            x, weight, NO_ACTIVATION, x.dtype if out_dtype is None else getattr(torch, out_dtype)
        )

    def gated_linear(self, x: Tensor, weight: PackedLinear, activation: Gating) -> Tensor:
        """See `Kernels.gated_linear`."""
        return self._product(x, weight, linear.gated_code(weight, activation), x.dtype)

    def _product(
        self, x: Tensor, weight: PackedLinear, activation: int, dtype: torch.dtype
    ) -> Tensor:
        if isinstance(weight, FloatLinear):
            return linear.float_linear(x, weight, activation, dtype)
        if isinstance(weight, IntegerLinear):
            return integer_linear.integer_linear(x, weight, activation, dtype)
        raise TypeError(
            f"linear: the weight was packed by another back end ({type(weight).__name__})"
        )

    def unfinished_linear(self, x: Tensor, weight: PackedLinear) -> Tensor | PartialSums:
        """See `FinishingKernels`; of integers, `linear`."""
        found = linear.unfinished_linear(x, weight) if isinstance(weight, FloatLinear) else None
        return self.linear(x, weight) if found is None else found

    def finish(self, x: Tensor | PartialSums) -> Tensor:
        """See `FinishingKernels`."""
        return x if isinstance(x, Tensor) else linear.finish(x)

    def linear_argmax(self, x: Tensor, weight: PackedLinear) -> tuple[Tensor, Tensor]:
        """See `Kernels.linear_argmax`; of floating-point weights no product is stored."""
        if isinstance(weight, FloatLinear):
            return linear.float_argmax(x, weight)
        return argmax_of_rows(self.linear(x, weight, out_dtype="float32"), None)

    def linear_draws(self, x: Tensor, weight: PackedLinear, draws: Draws) -> None:
        """See `Kernels.linear_draws`."""

    def embedding(self, token_ids: Tensor, table: EmbeddingTable) -> Tensor:
        """See `Kernels.embedding`; the tables of this back end are tensors."""
        if not isinstance(table, Tensor):
            raise TypeError(
                f"embedding: the table belongs to another back end ({type(table).__name__})"
            )
        return elementwise.embedding(token_ids, table)

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
        """See `Kernels.bidirectional_attention`: the reference, a sequence after the other."""
        return reference_attention(query, key, value, batch, scale=scale, window=window, bias=bias)

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
        """See `Kernels.paged_attention`; with a `value_size`, the caches are one tensor."""
        if key_ends is not None:
            raise ValueError("paged_attention: these kernels attend to no later positions")
        if value_size is not None:
            if window is not None or soft_cap is not None or sinks is not None:
                raise ValueError("latent attention has no windows, soft caps or sinks")
            return latent_attention(
                query, key_cache, batch, self.tuning, scale=scale, value_size=value_size,
                has_fp8=self.options.has_fp8,
            )  # fmt: skip
        if self._library_attention is not None and query.shape[0]:
            if sinks is not None:
                raise ValueError("paged_attention: the libraries' attention is used without sinks")
            caches = (key_cache, value_cache)
            return self._library_attention(
                query, caches, batch, scale=scale, window=window, soft_cap=soft_cap
            )
        return attention.paged_attention(
            query, key_cache, value_cache, batch, self.tuning, scale=scale, window=window,
            soft_cap=soft_cap, sinks=sinks, has_fp8=self.options.has_fp8,
        )  # fmt: skip

    def reasons_against(self, program: Program) -> list[str]:
        """See `Kernels.reasons_against`: what is not fused is run operation by operation."""
        takes_adapters = any(
            isinstance(each, ops.Linear | ops.GatedLinear) and each.is_adaptable
            for each in program.operations
        )
        latents = {
            (each.value_size, each.heads.head_dim - each.value_size)
            for each in program.operations
            if isinstance(each, ops.Attend) and each.value_size is not None
        }
        wide = [
            f"attends to latents of up to {MAX_LATENT} elements and {MAX_TAIL} rotated ones, not "
            f"of {size} and {tail}"
            for size, tail in sorted(latents)
            if size > MAX_LATENT or tail > MAX_TAIL
        ]
        return [NO_ADAPTERS] * takes_adapters + wide

    def pack_adapter(self, weights: Mapping[int, LoraWeight], num_weights: int) -> PackedAdapter:
        """Refused, as are programs that take adapters."""
        raise ConfigError(NO_ADAPTERS)

    def add_lora(
        self, y: Tensor, x: Tensor, adapters: StepAdapters, number: int, first_output: int = 0
    ) -> None:
        """Refused, as are programs that take adapters."""
        raise ConfigError(NO_ADAPTERS)

    def add_lora_embedding(
        self, y: Tensor, token_ids: Tensor, adapters: StepAdapters, number: int
    ) -> None:
        """Refused, as are programs that take adapters."""
        raise ConfigError(NO_ADAPTERS)

    def compile(self, program: Program, weights: Weights) -> TritonProgram:
        """See `program`. Experts are arranged here, so that no step has to."""
        for each in program.operations:
            if isinstance(each, ops.Experts):
                for number in (each.up, each.down):
                    experts.arrange_experts(weights.linears[number], each.routing.num_experts)
        return TritonProgram(program, weights, self)


def product_options(tuning: Tuning, device: torch.device, *, is_invariant: bool) -> ProductOptions:
    """Return what the tuning file and the device allow."""
    has_fp8 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY
    if is_invariant:
        return ProductOptions(has_fp8=has_fp8)
    return ProductOptions(tuning.min_library_rows, tuning.min_scaled_rows, has_fp8)
