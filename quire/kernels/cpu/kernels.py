"""`CpuKernels`: the functions of this folder as one object with the shape
of the `Kernels` protocol."""

from __future__ import annotations

import torch

from quire.kernels.cpu import attention, elementwise, experts, linear, lora, program
from quire.kernels.interface import ForwardPass, Weights
from quire.kernels.interpreter import Interpreter
from quire.kernels.reference import elementwise as reference_elementwise
from quire.program.operations import Program
from quire.program.passes import select_wanted


class CpuKernels:
    """The whole `Kernels` protocol in native code, for float32 and bfloat16 on the CPU.
    Holds no state."""

    name = "cpu"
    device = torch.device("cpu")
    # native code finds those who share by itself (csrc/cpu/shared_prefixes.hpp)
    shared_prefix_unit: int | None = None

    pack_linear = staticmethod(linear.pack_linear)
    pack_quantized = staticmethod(linear.pack_quantized)
    gated_linear = staticmethod(linear.gated_linear)
    pack_adapter = staticmethod(lora.pack_adapter)
    add_lora = staticmethod(lora.add_lora)
    add_lora_embedding = staticmethod(lora.add_lora_embedding)
    linear_argmax = staticmethod(linear.linear_argmax)
    linear_draws = staticmethod(linear.linear_draws)
    table_of = staticmethod(linear.table_of)
    linear = staticmethod(linear.linear)
    embedding = staticmethod(elementwise.embedding)
    rms_norm = staticmethod(elementwise.rms_norm)
    add_rms_norm = staticmethod(elementwise.add_rms_norm)
    layer_norm = staticmethod(elementwise.layer_norm)
    is_finite = staticmethod(elementwise.is_finite)
    finite_rows = staticmethod(reference_elementwise.finite_rows)
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
    reasons_against = staticmethod(program.reasons_against)

    def compile(self, whole: Program, weights: Weights) -> ForwardPass:
        """See `Kernels.compile`."""
        if any(isinstance(each, program.ONE_BY_ONE) for each in whole.operations):
            return Interpreter(whole, select_wanted(whole), weights, self)
        return program.NativeProgram(whole, weights)
