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
from quire.errors import InvalidParameterError, NotAvailableError
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

        Raises InvalidParameterError for a query that is too long, NotAvailableError where it would
        have to be filled up in a way that is not supported.
        """
        tokenizer, expansion = self.texts.tokenizer, self.late.expansion if is_query else None
        if expansion is not None and not expansion.is_attended:
            raise NotAvailableError(
                "this model fills queries up with tokens that no other token sees, which is not "
                "supported; pooler_config={'query_expansion': False} compares queries as they are, "
                "with other scores"
            )
        before, after = tokenizer.affixes
        written = join_traced((trace(prompt, STRICT_LEVEL), text))
        own = self.texts.cut(encode_chat(tokenizer, written), keep, len(before) + len(after))
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
        found = (tokenizer.token_to_id(word) for word in self.late.skip_words)
        unknown = tokenizer.config.named_tokens.get("unk_token")
        unknown_id = None if unknown is None else tokenizer.token_to_id(unknown)
        return frozenset(each for each in found if each is not None and each != unknown_id)

    def _filler(self, token: str | None) -> int:
        tokenizer = self.texts.tokenizer
        name = token or tokenizer.config.named_tokens.get("mask_token")
        found = None if name is None else tokenizer.token_to_id(name)
        if found is None:
            raise InvalidParameterError(
                "this model fills queries up with its mask token, and its tokenizer has none",
                param="prompt",
            )
        return found
