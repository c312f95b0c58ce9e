"""The output projection: from states behind the final norm to logits of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from quire.kernels.exchange import Exchange
from quire.kernels.interface import Kernels, PackedLinear
from quire.kernels.sampling import Draws


class OutputHead(Protocol):
    """Logits of all tokens of the vocabulary, or what is chosen by them."""

    @property
    def num_outputs(self) -> int:
        """Tokens of the vocabulary."""
        ...

    def logits(self, states: Tensor) -> Tensor:
        """Rows [R, H] to float32 [R, V]."""
        ...

    def argmax(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """`Kernels.linear_argmax` of the whole projection."""
        ...

    def draws(self, states: Tensor, draws: Draws) -> tuple[Tensor, Tensor, Tensor] | None:
        """`Kernels.linear_draws` of the whole projection."""
        ...


@dataclass(frozen=True, slots=True)
class PackedHead:
    """One that this process holds all of. Implements `OutputHead`."""

    kernels: Kernels
    weight: PackedLinear

    @property
    def num_outputs(self) -> int:
        return self.weight.num_outputs

    def logits(self, states: Tensor) -> Tensor:
        return self.kernels.linear(states, self.weight, out_dtype="float32")

    def argmax(self, states: Tensor) -> tuple[Tensor, Tensor]:
        return self.kernels.linear_argmax(states, self.weight)

    def draws(self, states: Tensor, draws: Draws) -> tuple[Tensor, Tensor, Tensor] | None:
        return self.kernels.linear_draws(states, self.weight, draws)


@dataclass(frozen=True, slots=True)
class DividedHead:
    """The output projection, of whose rows each rank has some. Implements `OutputHead`, for a rank
    that the others follow anyway."""

    kernels: Kernels
    weight: PackedLinear
    """This rank's rows."""
    exchange: Exchange
    tokens: range
    """That they are of."""
    num_outputs: int

    def logits(self, states: Tensor) -> Tensor:
        own = self.kernels.linear(states, self.weight, out_dtype="float32")
        return self.exchange.columns(own, [self.tokens], self.num_outputs)

    def argmax(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """The lowest of equals: ranks are in the order of their tokens, and the first counts."""
        ids, values = self.kernels.linear_argmax(states, self.weight)
        rank, num_ranks = self.exchange.rank, self.exchange.num_ranks
        place = [range(rank, rank + 1)]
        all_ids = self.exchange.columns((ids + self.tokens.start).unsqueeze(1), place, num_ranks)
        all_values = self.exchange.columns(values.unsqueeze(1), place, num_ranks)
        best = all_values.amax(1)
        first = (all_values == best.unsqueeze(1)).int().argmax(1, keepdim=True)
        return all_ids.gather(1, first).squeeze(1), best

    def draws(self, states: Tensor, draws: Draws) -> tuple[Tensor, Tensor, Tensor] | None:
        return None  # the sampler draws from all logits
