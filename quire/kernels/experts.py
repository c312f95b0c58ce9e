"""The seam of mixtures of experts: which experts a token goes to, and what they make of it, as one
protocol on tensors.

A back end (`reference.experts`, `triton.experts`) implements `ExpertKernels`. Apart from `Kernels`,
as few models need it. The contract is the same: a token's result is computed by the same sequence
of floating-point operations whatever other tokens are in the call, and however its experts are
shared with them.

Shapes: T tokens, E experts, k choices of a token, H hidden, F an expert's inner width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from quire.program.operations import Activation


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """Which experts compute each token, and what each counts."""

    ids: Tensor
    """int64 [T, k], different ones in a row. One outside 0 ... E - 1 counts nothing,
    as an expert that is held elsewhere."""
    weights: Tensor
    """float32 [T, k]"""


class PackedExperts(Protocol):
    """The weights of all experts of a layer, in a back end's layout."""

    num_experts: int

    @property
    def num_bytes(self) -> int: ...


class ExpertKernels(Protocol):
    """One back end."""

    name: str

    def pack_experts(self, up: Tensor, down: Tensor) -> PackedExperts:
        """Take weights up [E, 2 * F, H], gate first, and down [E, H, F], in one dtype."""
        ...

    def choose(self, logits: Tensor, count: int, *, is_normalised: bool) -> ExpertChoice:
        """Return the `count` largest of each row of float32 logits [T, E], larger first, the lowest
        id first among equals.

        They weigh their share of the softmax over all E or, with `is_normalised`, over those
        chosen. A row that holds a number that is not finite gives weights that are not.
        """
        ...

    def apply(
        self, x: Tensor, experts: PackedExperts, choice: ExpertChoice, activation: Activation
    ) -> Tensor:
        """`sum over j of weights[t, j] * down(activation(gate(x[t])) *
        up(x[t]))`, [T, H], in x's dtype.

        The gated product is rounded to x's dtype, as `Kernels.gated_linear` does; the products of
        `down` are float32, and are weighed and added in the order of j, each multiplication and
        addition rounded by itself, from zero.
        """
        ...
