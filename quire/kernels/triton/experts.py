"""`ExpertKernels` for a GPU: calls into the kernels of `expert_gemm`.
They have not run on a GPU yet."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from quire.kernels.experts import ExpertChoice, PackedExperts
from quire.kernels.reference.experts import check_choice, check_experts
from quire.kernels.triton.activation import NO_ACTIVATION
from quire.kernels.triton.checks import FLOATS, check_floats, launch_options, require
from quire.kernels.triton.expert_gemm import (
    choose_kernel,
    combine_kernel,
    count_kernel,
    expert_kernel,
    place_kernel,
)
from quire.kernels.triton.tuning import LinearTuning, Tuning
from quire.program.operations import Activation, activation_code

_SORT_BLOCK = 2048
_COMBINE_BLOCK = 1024


@dataclass(slots=True)
class ExpertWeights:
    """Weights row by row, on the device. Implements `PackedExperts`."""

    up: Tensor
    down: Tensor
    num_experts: int
    tuning: LinearTuning

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory."""
        return self.up.nbytes + self.down.nbytes


class TritonExperts:
    """`ExpertKernels` for one device. Holds its tuning, and nothing else."""

    name = "triton"

    def __init__(self, device: torch.device, tuning: Tuning) -> None:
        self._device = device
        self._tuning = tuning

    def pack_experts(self, up: Tensor, down: Tensor) -> ExpertWeights:
        check_experts(up, down)
        if up.dtype not in FLOATS:
            raise TypeError(
                f"pack_experts: the weights are {up.dtype}; the Triton kernels take float32, "
                "bfloat16 and float16"
            )
        figures = self._tuning.wide_linear if up.dtype == torch.float32 else self._tuning.linear
        return ExpertWeights(
            up.to(self._device).contiguous(),
            down.to(self._device).contiguous(),
            up.shape[0],
            figures,
        )

    def choose(self, logits: Tensor, count: int, *, is_normalised: bool) -> ExpertChoice:
        check_choice(logits, count)
        check_floats(logits, "logits")
        num_tokens, num_experts = logits.shape
        ids = torch.empty((num_tokens, count), dtype=torch.int64, device=logits.device)
        weights = torch.empty((num_tokens, count), dtype=torch.float32, device=logits.device)
        if num_tokens:
            choose_kernel[(num_tokens,)](
                logits, ids, weights, num_experts, COUNT=count,
                COUNT_PADDED=triton.next_power_of_2(count),
                BLOCK=triton.next_power_of_2(num_experts), IS_NORMALISED=is_normalised,
                **launch_options(1),
            )  # fmt: skip
        return ExpertChoice(ids, weights)

    def apply(
        self, x: Tensor, experts: PackedExperts, choice: ExpertChoice, activation: Activation
    ) -> Tensor:
        if not isinstance(experts, ExpertWeights):
            raise TypeError(
                f"experts: the weights were packed by another back end ({type(experts).__name__})"
            )
        _check(x, experts, choice)
        out = torch.empty_like(x)
        if not x.shape[0]:
            return out
        num_pairs, hidden, inner = choice.ids.numel(), x.shape[1], experts.down.shape[2]
        order, starts = sort_pairs(choice.ids, experts.num_experts)
        gated = torch.empty((num_pairs, inner), dtype=x.dtype, device=x.device)
        _launch(x, experts, (order, starts), gated, activation_code(activation))
        partial = torch.empty((num_pairs, hidden), dtype=torch.float32, device=x.device)
        _launch(gated, experts, (order, starts), partial, NO_ACTIVATION)
        combine_kernel[(x.shape[0], triton.cdiv(hidden, _COMBINE_BLOCK))](
            partial, choice.ids, choice.weights, out, experts.num_experts, hidden,
            NUM_CHOICES=choice.ids.shape[1],
            BLOCK=min(_COMBINE_BLOCK, triton.next_power_of_2(hidden)), **launch_options(4),
        )  # fmt: skip
        return out


def sort_pairs(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Pairs in the order of their experts, int32 [P], and where each expert's begin, int32 [E + 1];
    see `expert_gemm`.

    Ids outside 0 ... E - 1 are in neither: as many places at the end are left undefined.
    """
    num_pairs = ids.numel()
    counts = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=ids.device)
    order = torch.empty(num_pairs, dtype=torch.int32, device=ids.device)
    block = min(_SORT_BLOCK, triton.next_power_of_2(num_pairs))
    count_kernel[(num_experts,)](ids, counts, num_pairs, BLOCK=block, **launch_options(4))
    place_kernel[(num_experts,)](
        ids, counts, starts, order, num_pairs, num_experts,
        EXPERTS=triton.next_power_of_2(num_experts), BLOCK=block, **launch_options(4),
    )  # fmt: skip
    return order, starts


def _launch(
    x: Tensor, experts: ExpertWeights, places: tuple[Tensor, Tensor], out: Tensor, activation: int
) -> None:
    tuning, (order, starts) = experts.tuning, places
    weight = experts.up if activation >= 0 else experts.down
    num_tiles = order.numel() // tuning.block_m + experts.num_experts
    expert_kernel[(num_tiles, triton.cdiv(weight.shape[1], tuning.block_n))](
        x, weight, out, order, starts, experts.num_experts, out.shape[1], weight.shape[2],
        NUM_CHOICES=order.numel() // x.shape[0], BLOCK_M=tuning.block_m, BLOCK_N=tuning.block_n,
        BLOCK_K=tuning.block_k, ACTIVATION=activation,
        **launch_options(tuning.num_warps, tuning.num_stages),
    )  # fmt: skip


def _check(x: Tensor, experts: ExpertWeights, choice: ExpertChoice) -> None:
    check_floats(x, "experts: x")
    require(
        x.dim() == 2 and x.shape[1] == experts.down.shape[1],
        f"experts of {experts.down.shape[1]} inputs",
        x,
    )
    if x.dtype != experts.up.dtype:
        raise TypeError(f"experts: x is {x.dtype} but the weights {experts.up.dtype}")
    if choice.ids.dtype != torch.int64 or choice.weights.dtype != torch.float32:
        raise TypeError(
            f"experts: expected int64 ids and float32 weights, got {choice.ids.dtype} and "
            f"{choice.weights.dtype}"
        )
    fits = (
        choice.ids.dim() == 2
        and choice.ids.shape[0] == x.shape[0]
        and choice.weights.shape == choice.ids.shape
    )
    fits = fits and choice.ids.is_contiguous() and choice.weights.is_contiguous()
    require(fits, "experts: expected ids and weights [T, k]", choice.ids, choice.weights)
