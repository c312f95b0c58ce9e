"""What one of a model's processes holds of it: which operations, and which rows of which weights.
Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from quire.common.frozen_record import replace
from quire.models.cutting import cut, cut_outputs, divisible_tokens
from quire.models.declaration import DecoderSpec
from quire.models.lowering import Parameters, lower, projection_sizes
from quire.models.tensors import LinearSpec
from quire.program.operations import Program
from quire.program.sharding import Ranges, shard
from quire.program.stages import Stage, cut_into_stages

if TYPE_CHECKING:
    from quire.kernels.exchange import Exchange


class ModelPart(NamedTuple):
    """Which of a model's processes this is, and how mixtures are divided. By default, the only
    one."""

    exchange: Exchange | None = None
    """With the other ranks of the stage; None where there are none."""
    is_by_expert: bool = False
    stage: int = 0
    num_stages: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the process that has both ends and leads the others."""
        return self.stage == 0 and (self.exchange is None or self.exchange.rank == 0)


@dataclass(frozen=True, slots=True)
class HeldPart:
    """What a process has."""

    spec: DecoderSpec
    """Whose embedding and head are cut to it."""
    program: Program
    parameters: Parameters
    """Likewise, but for the head."""
    stage: Stage | None = None
    """None: the whole."""
    tokens: range | None = None
    """Those of the embedding and the head; None: all."""
    outputs: Mapping[int, Ranges] = field(default_factory=dict)
    """Of stacked weights that are cut, by their numbers, those that are here."""
    num_tokens: int = 0
    """There are, where some are elsewhere."""

    @property
    def has_ends(self) -> bool:
        """Whether embedding and head are here."""
        return self.stage is None or self.stage.is_first

    @property
    def projections(self) -> list[tuple[LinearSpec, ...]]:
        """All stacked weights that are here, in the order of their numbers."""
        head = self.spec.head
        num_inner = len(self.parameters.linears) - (head is not None)
        found = [
            parts
            for number, parts in enumerate(self.parameters.linears[:num_inner])
            if self.stage is None or number in self.stage.linears
        ]
        return found if head is None or not self.has_ends else [*found, (head,)]


def hold(
    spec: DecoderSpec, part: ModelPart, lowered: tuple[Program, Parameters] | None = None
) -> HeldPart:
    """Return what a process holds of a model; `lowered` is its program, by default the plainest."""
    program, parameters = lower(spec) if lowered is None else lowered
    stage = None
    if part.num_stages > 1:
        sizes = projection_sizes(parameters)
        stage = cut_into_stages(program, sizes, part.num_stages)[part.stage]
        program = stage.program
    held = HeldPart(spec, program, parameters, stage)
    return held if part.exchange is None else _shared(held, part.exchange, part.is_by_expert)


def _shared(held: HeldPart, exchange: Exchange, is_by_expert: bool) -> HeldPart:
    """Return a rank's program, and the declaration cut to what it holds."""
    spec, parameters = held.spec, held.parameters
    num_tokens = divisible_tokens(spec)
    program, shares = shard(
        held.program, exchange.rank, exchange.num_ranks, num_tokens, is_by_expert=is_by_expert
    )
    linears = tuple(
        cut_outputs(parts, shares.linears[number]) if number in shares.linears else parts
        for number, parts in enumerate(parameters.linears)
    )
    vectors = tuple(
        cut(each, shares.vectors[number]) if number in shares.vectors else each
        for number, each in enumerate(parameters.vectors)
    )
    parameters = replace(parameters, linears=linears, vectors=vectors)
    held = replace(held, program=program, parameters=parameters, outputs=shares.linears)
    if shares.tokens is None or num_tokens is None:
        return held
    head = None if spec.head is None else cut_outputs([spec.head], (shares.tokens,))[0]
    cut_spec = replace(spec, embedding=cut(spec.embedding, shares.tokens), head=head)
    return replace(held, spec=cut_spec, tokens=shares.tokens, num_tokens=num_tokens)
