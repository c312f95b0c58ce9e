"""Texts on their way into a pooling model: encoded, put into templates, and cut on request.

Text is data: what spells a control token stays text. What a tokenizer or a template puts around a
text survives a cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from quire.errors import CheckpointError, InvalidParameterError
from quire.models.pooling import PoolingSpec
from quire.text.backend import contained
from quire.text.tokenizer import Tokenizer

QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_QWEN3_PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_QWEN3_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class _Frame(NamedTuple):
    """What a tokenizer puts around and between two texts, each with its type of text."""

    before: tuple[tuple[int, int], ...]
    between: tuple[tuple[int, int], ...]
    after: tuple[tuple[int, int], ...]
    second_type: int
    """Of the second text's tokens."""


@dataclass(frozen=True)
class PoolingTexts:
    """The texts of one model."""

    tokenizer: Tokenizer
    pooling: PoolingSpec
    max_len: int
    """Tokens that the model takes."""
    num_types: int
    """Types of text that the model tells apart."""
    vocab_size: int
    """Of one type."""

    def encode(self, text: str, keep: int | None = None, prompt: str = "") -> list[int]:
        """Token ids of a text behind a prompt; `keep` as `PoolingParams.truncate_prompt_tokens`."""
        if not text and not prompt and not any(self.tokenizer.affixes):
            raise InvalidParameterError("the text is empty", param="input")
        before, after = self.tokenizer.affixes
        ids = self.tokenizer.encode(prompt + text, add_special_tokens=False)
        kept = [*before, *self.cut(ids, keep, len(before) + len(after)), *after]
        if prompt and len(kept) <= self.num_prompt_tokens(prompt):
            raise InvalidParameterError(
                f"nothing is left of the text: {len(kept)} tokens are kept, and the prompt before "
                "it, which is not pooled, has as many; raise truncate_prompt_tokens",
                param="input",
            )
        return kept

    def beginning(self, text: str, num_tokens: int) -> str:
        """Return so much of a text as has at most so many tokens of its own. Raises
        InvalidParameterError where that is nothing."""
        kept = self.tokenizer.beginning(text, num_tokens)
        if text and not kept:
            raise InvalidParameterError(
                f"nothing is left of the text: its first character has more than {num_tokens} "
                "tokens; allow more",
                param="input",
            )
        return kept

    def cut(self, ids: list[int], keep: int | None, num_around: int = 0) -> list[int]:
        """The first tokens of a text, so many that they fit beside those around it. Raises
        InvalidParameterError where none do: all texts would have the same result."""
        if keep is None:
            return ids
        return ids[: self._room_beside(keep, num_around, 1 if ids else 0)]

    def _room_beside(self, keep: int, num_around: int, num_needed: int) -> int:
        """The tokens that texts may have beside those that are put around them."""
        left = max(0, self.room(keep) - num_around)
        if left < num_needed:
            raise InvalidParameterError(
                f"truncate_prompt_tokens={keep} leaves nothing of the text: {num_around} tokens "
                f"are put around it; give at least {num_around + num_needed}",
                param="truncate_prompt_tokens",
            )
        return left

    def room(self, keep: int | None) -> int:
        """The tokens that a prompt may have."""
        if keep is not None and keep > self.max_len:
            raise InvalidParameterError(
                f"truncate_prompt_tokens={keep} is beyond the {self.max_len} tokens that the model "
                "takes; give that or less, or -1",
                param="truncate_prompt_tokens",
            )
        return self.max_len if keep is None or keep < 0 else keep

    def encode_pair(self, first: str, second: str, keep: int | None = None) -> list[int]:
        """Token ids of two texts as the tokenizer joins them; the longer one is cut first."""
        frame = self._frame
        texts = [self.tokenizer.encode(each, add_special_tokens=False) for each in (first, second)]
        if keep is not None:
            num_around = len(frame.before) + len(frame.between) + len(frame.after)
            num_needed = sum(1 for each in texts if each)
            texts = _cut_longest(texts, self._room_beside(keep, num_around, num_needed))
        tokens = [
            *frame.before,
            *((each, 0) for each in texts[0]),
            *frame.between,
            *((each, frame.second_type) for each in texts[1]),
            *frame.after,
        ]
        last = self.num_types - 1
        return [token + self.vocab_size * min(kind, last) for token, kind in tokens]

    def encode_judged(
        self, query: str, document: str, keep: int | None = None, instruction: str | None = None
    ) -> list[int]:
        """A query and a document in the template of Qwen3-Reranker; the document is cut."""
        head = f"<Instruct>: {instruction or QWEN3_INSTRUCTION}\n<Query>: {query}\n<Document>: "
        prefix, suffix = self._judgement
        ids = self.tokenizer.encode(head + document, add_special_tokens=False)
        if keep is not None and len(ids) + len(prefix) + len(suffix) > self.room(keep):
            num_head = len(self.tokenizer.encode(head, add_special_tokens=False))
            num_around = len(prefix) + num_head + len(suffix)
            ids = ids[: num_head + self._room_beside(keep, num_around, 1)]
        return [*prefix, *ids, *suffix]

    def join(
        self, first: str, second: str, keep: int | None = None, instruction: str | None = None
    ) -> list[int]:
        """Two texts as a classifier of this model wants to compare them."""
        if self.pooling.is_difference:
            return self.encode_judged(first, second, keep, instruction)
        return self.encode_pair(first, second, keep)

    def num_prompt_tokens(self, prompt: str) -> int:
        """Tokens of a prompt that are not pooled, with what stands before it; 0 if all are."""
        if self.pooling.counts_prompt or not prompt:
            return 0
        before, _ = self.tokenizer.affixes
        return len(before) + len(self.tokenizer.encode(prompt, add_special_tokens=False))

    @cached_property
    def _judgement(self) -> tuple[list[int], list[int]]:
        encode = self.tokenizer.encode
        return (
            encode(_QWEN3_PREFIX, add_special_tokens=False, parse_special=True),
            encode(_QWEN3_SUFFIX, add_special_tokens=False, parse_special=True),
        )

    @cached_property
    def _frame(self) -> _Frame:
        """Found by having the tokenizer join two texts whose tokens are known."""
        backend = self.tokenizer.backend
        with contained(CheckpointError, "tokenizer.json cannot be used"):
            first = backend.encode("a", add_special_tokens=False).ids
            second = backend.encode("b", add_special_tokens=False).ids
            joined = backend.encode("a", "b", add_special_tokens=True)
        tokens = list(zip(joined.ids, joined.type_ids, strict=True))
        start = _find(joined.ids, first, 0)
        middle = _find(joined.ids, second, start + len(first))
        return _Frame(
            tuple(tokens[:start]),
            tuple(tokens[start + len(first) : middle]),
            tuple(tokens[middle + len(second) :]),
            joined.type_ids[middle],
        )


def _find(ids: Sequence[int], part: Sequence[int], start: int) -> int:
    for place in range(start, len(ids) - len(part) + 1):
        if list(ids[place : place + len(part)]) == list(part):
            return place
    raise CheckpointError(
        "tokenizer.json joins two texts in a way that changes them: not supported"
    )


def _cut_longest(texts: list[list[int]], room: int) -> list[list[int]]:
    """Cut the ends off, of the longer text first, until both fit."""
    first, second = texts
    shorter = min(len(first), len(second))
    excess = len(first) + len(second) - room
    if excess <= 0:
        return texts
    if room - shorter >= shorter:
        kept = room - shorter
        return [first[:kept], second] if len(first) > len(second) else [first, second[:kept]]
    return [first[: (room + 1) // 2], second[: room // 2]]
