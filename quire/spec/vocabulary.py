"""Two models' token ids: what the draft model is given for the target's tokens, and which of the
target's its own logits stand for.

Tokens are the same where their texts in the vocabulary are. A token that the draft model lacks is
read as its longest end that it has, since what comes next hangs on that; it is never drafted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LEAST_COMMON = 0.5
"""Of the smaller vocabulary: with fewer, the tokenizers are of different families."""


class TokenMap:
    """From the target's ids to the draft model's and back."""

    def __init__(
        self, num_target: int, num_draft: int, pairs: tuple[NDArray[np.int64], ...] | None = None
    ) -> None:
        """`pairs` are the ids of each common token, the target's and the draft model's, and for
        all of the target's what the draft model reads. None: ids are the same, as far as both have
        them."""
        self._num_target, self._num_draft = num_target, num_draft
        self._inputs: NDArray[np.int64] | None = None
        self._pairs: tuple[Tensor, Tensor] | None = None
        if pairs is not None:
            ours, theirs, self._inputs = pairs
            self._pairs = torch.from_numpy(ours), torch.from_numpy(theirs)

    def inputs(self, token_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """What the draft model reads for the target's tokens."""
        if self._inputs is not None:
            return self._inputs[token_ids]
        if self._num_draft >= self._num_target:
            return token_ids
        return np.where(token_ids < self._num_draft, token_ids, 0)

    def logits(self, logits: Tensor) -> Tensor:
        """The draft model's logits, [R, V], for the target's tokens; -inf where it has none."""
        if self._pairs is None and self._num_draft == self._num_target:
            return logits
        if self._pairs is None and self._num_draft > self._num_target:
            return logits[:, : self._num_target].contiguous()
        found = logits.new_full((len(logits), self._num_target), -math.inf)
        if self._pairs is None:
            found[:, : self._num_draft] = logits
        else:
            ours, theirs = (each.to(logits.device) for each in self._pairs)
            found[:, ours] = logits[:, theirs]
        return found


def common_tokens(target: Mapping[str, int], draft: Mapping[str, int]) -> float:
    """Return the share of the smaller vocabulary's tokens that the other one has."""
    fewer, more = sorted((target, draft), key=len)
    return sum(text in more for text in fewer) / max(1, len(fewer))


def map_tokens(
    target: Mapping[str, int], draft: Mapping[str, int], num_target: int, num_draft: int
) -> TokenMap:
    """Map vocabularies, texts to ids, of models with so many logits."""
    target = {text: each for text, each in target.items() if each < num_target}
    draft = {text: each for text, each in draft.items() if each < num_draft}
    pairs = [(each, draft[text]) for text, each in target.items() if text in draft]
    if len(pairs) == min(len(target), len(draft)) and all(a == b for a, b in pairs):
        return TokenMap(num_target, num_draft)
    inputs = np.zeros(num_target, np.int64)
    for text, each in target.items():
        ends = (text[start:] for start in range(len(text)))
        inputs[each] = next((draft[end] for end in ends if end in draft), 0)
    ours, theirs = np.array(pairs, np.int64).reshape(-1, 2).T
    return TokenMap(num_target, num_draft, (ours.copy(), theirs.copy(), inputs))
