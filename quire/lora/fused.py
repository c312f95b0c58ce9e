"""Adapters of all experts of a layer at once, as PEFT keeps them for tensors that stack experts
(`target_parameters`): the factors of all of them in one pair of matrices. Imports no torch.

With E experts, `lora_A` is [E * rank, inputs], one expert's rows after another's, and `lora_B`
[outputs, rank * E], where an expert's columns are E apart. Of a tensor [E, outputs, inputs], older
releases took the outputs for inputs, so that the roles are exchanged: the change of expert e is
then the transpose of the product.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from quire.errors import CheckpointError
from quire.models.tensors import LinearSpec
from quire.weights.tensor_file import StoredTensor


class FusedExpert(NamedTuple):
    """One expert's part of a tensor that stacks all of them."""

    name: str
    """Of the tensor."""
    place: int
    num_experts: int
    num_inputs: int
    num_outputs: int
    """Of an expert, in this tensor."""
    rows: slice
    """Of the outputs, those that are this part's."""
    may_be_exchanged: bool
    """The tensor is [E, outputs, inputs]."""
    is_exchanged: bool = False
    """`lora_A` has the outputs, and `lora_B` the inputs."""

    def fits(self, halves: tuple[StoredTensor, StoredTensor]) -> bool:
        """Whether these can be the factors of this tensor, whatever the rank."""
        return self._are_usual(halves) or self._are_exchanged(halves)

    def shapes(
        self, rank: int, halves: tuple[StoredTensor, StoredTensor]
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the shapes that the factors must have, in the order in which they are stored."""
        inputs, outputs = self.num_inputs, self.num_outputs
        if not self._are_usual(halves):
            inputs, outputs = outputs, inputs
        return (rank * self.num_experts, inputs), (outputs, rank * self.num_experts)

    def placed(self, halves: tuple[StoredTensor, StoredTensor]) -> FusedExpert:
        """Return the same, knowing whether the roles are exchanged."""
        return self._replace(is_exchanged=not self._are_usual(halves))

    def require_plain(self, *, is_recent: bool) -> None:
        """Refuse an adapter whose shapes do not tell whether the roles are exchanged."""
        if self.may_be_exchanged and self.num_inputs == self.num_outputs and not is_recent:
            raise CheckpointError(
                f"the adapter of {self.name} has as many inputs as outputs, and its "
                "adapter_config.json does not say by peft_version (0.21 or later) which are which; "
                "save it anew with a recent release of PEFT"
            )

    def _are_usual(self, halves: tuple[StoredTensor, StoredTensor]) -> bool:
        return self._ends(halves) == (self.num_inputs, self.num_outputs)

    def _are_exchanged(self, halves: tuple[StoredTensor, StoredTensor]) -> bool:
        return self.may_be_exchanged and self._ends(halves) == (self.num_outputs, self.num_inputs)

    def _ends(self, halves: tuple[StoredTensor, StoredTensor]) -> tuple[int, ...]:
        down, up = halves
        return (*down.shape[1:], *up.shape[:1])


def fused_expert(part: LinearSpec) -> FusedExpert | None:
    """Return where an expert's projection lies in a tensor of all of them; None where there is no
    such tensor."""
    weight, place = part.weight, part.weight.other_place
    if place is None or len(place.shape) != 3:
        return None
    count, height, width = place.shape
    expert, first = divmod(place.first_row, height)
    if weight.is_transposed:
        rows = slice(weight.first_row, None, weight.row_step)
        return FusedExpert(place.name, expert, count, height, width, rows, may_be_exchanged=False)
    rows = slice(first, first + part.num_outputs)
    return FusedExpert(place.name, expert, count, width, height, rows, may_be_exchanged=True)


def fused_names(parts: Iterable[LinearSpec]) -> set[str]:
    """Return the names of the tensors that stack these."""
    found = (fused_expert(part) for part in parts)
    return {each.name for each in found if each is not None}
