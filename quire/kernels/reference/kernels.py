"""`ReferenceKernels`: the functions of this folder as one object with the shape
of the `Kernels` protocol."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.interface import PackedLinear, Weights
from quire.kernels.interpreter import Interpreter
from quire.kernels.reference import attention, elementwise, experts, linear, lora
from quire.kernels.sampling import Draws
from quire.program.operations import Program
from quire.program.passes import select_wanted


class ReferenceKernels:
    """The whole `Kernels` protocol in plain torch. Holds no state."""

    name = "reference"
    device = torch.device("cpu")
    shared_prefix_unit: int | None = None

    pack_linear = staticmethod(linear.pack_linear)
    pack_quantized = staticmethod(linear.pack_quantized)
    gated_linear = staticmethod(linear.gated_linear)
    pack_adapter = staticmethod(lora.pack_adapter)
    add_lora = staticmethod(lora.add_lora)
    add_lora_embedding = staticmethod(lora.add_lora_embedding)
    linear_argmax = staticmethod(linear.linear_argmax)
    table_of = staticmethod(linear.table_of)
    linear = staticmethod(linear.linear)
    embedding = staticmethod(elementwise.embedding)
    rms_norm = staticmethod(elementwise.rms_norm)
    add_rms_norm = staticmethod(elementwise.add_rms_norm)
    layer_norm = staticmethod(elementwise.layer_norm)
    is_finite = staticmethod(elementwise.is_finite)
    finite_rows = staticmethod(elementwise.finite_rows)
    activate = staticmethod(elementwise.activate)
    gated = staticmethod(elementwise.gated)
    gate_rows = staticmethod(elementwise.gate_rows)
    choose_experts = staticmethod(experts.choose_experts)
    apply_experts = staticmethod(experts.apply_experts)
    head_linear = staticmethod(experts.head_linear)
    rope = staticmethod(elementwise.rope)
    write_kv = staticmethod(attention.write_kv)
    copy_blocks = staticmethod(attention.copy_blocks)
    paged_attention = staticmethod(attention.paged_attention)
    bidirectional_attention = staticmethod(attention.bidirectional_attention)

    def linear_draws(self, x: Tensor, weight: PackedLinear, draws: Draws) -> None:
        """See `Kernels.linear_draws`."""

    def reasons_against(self, program: Program) -> list[str]:
        """See `Kernels.reasons_against`: it runs everything that there is."""
        return []

    def compile(self, program: Program, weights: Weights) -> Interpreter:
        """See `Kernels.compile`: the reference is what operations give one by one."""
        return Interpreter(program, select_wanted(program), weights, self)
