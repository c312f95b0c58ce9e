"""Reference mixtures of experts: one token and one of its experts at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.experts import ExpertChoice, PackedExperts
from quire.kernels.reference import linear
from quire.kernels.reference.sampling import best_first
from quire.program.operations import Activation


@dataclass(slots=True)
class ReferenceExpertWeights:
    """Weights as they came. Implements `PackedExperts`."""

    up: Tensor
    down: Tensor
    num_experts: int

    @property
    def num_bytes(self) -> int:
        """Bytes of memory held."""
        return self.up.nbytes + self.down.nbytes


class ReferenceExperts:
    """`ExpertKernels` in plain torch."""

    name = "reference"

    def pack_experts(self, up: Tensor, down: Tensor) -> ReferenceExpertWeights:
        check_experts(up, down)
        return ReferenceExpertWeights(up, down, up.shape[0])

    def choose(self, logits: Tensor, count: int, *, is_normalised: bool) -> ExpertChoice:
        check_choice(logits, count)
        ids = torch.zeros((logits.shape[0], count), dtype=torch.int64)
        weights = torch.full((logits.shape[0], count), torch.nan)
        for i, row in enumerate(logits):
            if row.isfinite().all():
                ids[i] = best_first(row, count)
                shares = torch.exp(row - row.max())
                chosen = shares[ids[i]]
                weights[i] = chosen / (chosen.sum() if is_normalised else shares.sum())
        return ExpertChoice(ids, weights)

    def apply(
        self, x: Tensor, experts: PackedExperts, choice: ExpertChoice, activation: Activation
    ) -> Tensor:
        if not isinstance(experts, ReferenceExpertWeights):
            raise TypeError(
                f"experts: the weights were packed by another back end ({type(experts).__name__})"
            )
        out = torch.empty_like(x)
        for t in range(x.shape[0]):
            row = x[t : t + 1]
            total = torch.zeros(1, experts.down.shape[1])
            for expert, weight in zip(choice.ids[t].tolist(), choice.weights[t], strict=True):
                if 0 <= expert < experts.num_experts:
                    inner = linear.gated_linear(
                        row, linear.pack_linear(experts.up[expert]), activation
                    )
                    total += weight * linear.linear(
                        inner, linear.pack_linear(experts.down[expert]), out_dtype="float32"
                    )
            out[t] = total[0].to(x.dtype)
        return out


def check_experts(up: Tensor, down: Tensor) -> None:
    """Raise ValueError unless the weights are [E, 2 * F, H] and [E, H, F] of one dtype."""
    fits = up.dim() == down.dim() == 3 and up.shape == (
        down.shape[0],
        2 * down.shape[2],
        down.shape[1],
    )
    if not fits or up.dtype != down.dtype:
        raise ValueError(
            f"expected experts up [E, 2 * F, H] and down [E, H, F], got {up.dtype} "
            f"{list(up.shape)} and {down.dtype} "
            f"{list(down.shape)}"
        )


def check_choice(logits: Tensor, count: int) -> None:
    """Raise ValueError unless `count` experts can be chosen of float32 logits [T, E]."""
    if logits.dtype != torch.float32 or logits.dim() != 2 or not 1 <= count <= logits.shape[1]:
        raise ValueError(
            f"cannot choose {count} experts by logits {logits.dtype} {list(logits.shape)}"
        )
