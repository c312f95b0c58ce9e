"""Late interaction: texts whose every token has a vector, and how a query's meet a document's.

Queries and documents have prompts of their own, which may be control tokens: they are the model's
own text, what comes behind them is data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from quire.engine.pooling.texts import PoolingTexts
from quire.errors import InvalidParameterError
from quire.models.pooling import LateInteraction
from quire.text.chat import encode_chat
from quire.text.tokenizer import STRICT_LEVEL
from quire.text.traced import join_traced, trace

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class LateTexts:
    """Queries and documents of one model."""

    texts: PoolingTexts
    late: LateInteraction

    def encode(self, text: str, prompt: str, keep: int | None, *, is_query: bool) -> list[int]:
        """Token ids of a text behind a prompt, of a query those that fill it up as well.

        Raises InvalidParameterError for a query that is too long.
        """
        tokenizer, expansion = self.texts.tokenizer, self.late.expansion if is_query else None
        before, after = tokenizer.affixes
        mark = tokenizer.token_to_id(prompt) if prompt and self.late.is_marked else None
        written = join_traced((trace("" if mark is not None else prompt, STRICT_LEVEL), text))
        num_around = len(before) + (mark is not None) + len(after)
        own = self.texts.cut(encode_chat(tokenizer, written), keep, num_around)
        if mark is not None:
            own.insert(0 if before else min(1, len(own)), mark)
        if expansion is not None and expansion.is_fixed:
            own = own[: max(0, expansion.length - len(before) - len(after))]
        ids = [*before, *own, *after]
        if is_query and self.late.query_len is not None and len(ids) > self.late.query_len:
            if keep is None:
                raise InvalidParameterError(
                    f"the query has {len(ids)} tokens, and the model takes {self.late.query_len}; "
                    "shorten it, or ask for its first ones with truncate_prompt_tokens",
                    param="prompt",
                )
            own = own[: max(0, self.late.query_len - len(before) - len(after))]
            ids = [*before, *own, *after]
        if expansion is None:
            return ids
        return ids + [self._filler(expansion.token)] * (expansion.length - len(ids))

    def num_unseen(self, token_ids: Sequence[int]) -> int:
        """Tokens at the end of a query that fill it up and that no token attends to: those that
        `encode` adds. Of other token ids, so many that each attends to one at least."""
        expansion, num_tokens = self.late.expansion, len(token_ids)
        if expansion is None or expansion.is_attended or num_tokens > expansion.length:
            return 0
        filler, (_, after) = self._filler(expansion.token), self.texts.tokenizer.affixes
        # the token that ends a text may be the one that fills it up
        count = _num_equal(token_ids, filler) - _num_equal(after, filler)
        return max(0, min(count, num_tokens - 1))

    def counts(self, token_ids: Sequence[int], *, is_query: bool) -> NDArray[np.bool_]:
        """Which tokens' vectors count, bool [tokens]."""
        import numpy as np

        skipped = self._skipped if self.late.skips_queries or not is_query else frozenset()
        return np.array([token_id not in skipped for token_id in token_ids], np.bool_)

    def score(self, query: NDArray[np.float32], document: NDArray[np.float32]) -> float:
        """MaxSim of two texts' vectors [tokens, elements], in float64 and in their order."""
        import numpy as np

        if not len(query) or not len(document):
            return 0.0
        products = np.einsum(
            "qe,de->qd", query.astype(np.float64), document.astype(np.float64), optimize=False
        )
        total = float(np.add.accumulate(products.max(axis=1))[-1])
        return total / len(query) if self.late.is_mean else total

    @cached_property
    def _skipped(self) -> frozenset[int]:
        tokenizer = self.texts.tokenizer
        found = [tokenizer.token_to_id(word) for word in self.late.skip_words]
        unknown = tokenizer.config.named_tokens.get("unk_token")
        unknown_id = None if unknown is None else tokenizer.token_to_id(unknown)
        if self.late.is_marked and None in found:
            found.append(unknown_id)
        else:
            found = [each for each in found if each != unknown_id]
        return frozenset(each for each in found if each is not None)

    def _filler(self, token: str | None) -> int:
        tokenizer = self.texts.tokenizer
        named = tokenizer.config.named_tokens
        name = token or named.get("mask_token")
        if name is None and self.late.is_marked:
            name = named.get("eos_token") or named.get("pad_token")
        found = None if name is None else tokenizer.token_to_id(name)
        if found is None:
            raise InvalidParameterError(
                "this model fills queries up with its mask token, and its tokenizer has none",
                param="prompt",
            )
        return found


def _num_equal(token_ids: Sequence[int], token_id: int) -> int:
    """Return how many tokens at the end are this one."""
    count = 0
    while count < len(token_ids) and token_ids[-1 - count] == token_id:
        count += 1
    return count
