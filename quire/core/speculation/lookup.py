"""Draft tokens by looking back: what followed the last tokens where they stood before.

Owns an index of each sequence's own tokens and, where outputs are remembered, one of the latest
outputs of each tenant (Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI
Applications", 2025). The longer match wins. Memory is bounded in tokens, and so is what is read at
one call: a long prompt is taken in over several steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from quire.core.kvcache.prefix import Namespace
from quire.core.request import Sequence
from quire.core.speculation.drafters import NO_DRAFT, Draft
from quire.core.speculation.ngrams import MAX_LENGTH, NO_MATCH, Match, NgramIndex

SUFFIX_SIZES = (2, 5)
"""Of the n-grams by which suffixes of any length are found: long ones come first."""
MAX_READ = 1024
"""Tokens that one call takes in: half a millisecond."""
MAX_SEQUENCE_TOKENS = 1 << 14
"""An index that has twice as many begins anew with the last so many."""
MAX_FOLLOWED_TOKENS = 1 << 18
"""Of all sequences together; beyond, further ones are not followed."""
MAX_REMEMBERED_TOKENS = 1 << 17
"""Of all tenants together. A token takes about 230 bytes, with two sizes of n-grams."""
_OUTPUT_SHARE = 4
"""No single output takes more than a fourth of a tenant's memory."""

Owner = tuple[str, Namespace]
"""A tenant and a namespace of cached prefixes: who must not see what others were answered."""


class _Follower:
    """What is known of one sequence."""

    __slots__ = ("index", "memory", "num_read", "own", "remembered")

    def __init__(self, index: NgramIndex, num_read: int, memory: NgramIndex | None) -> None:
        self.index = index
        self.num_read = num_read
        self.memory = memory
        self.own: Match = NO_MATCH
        """Where its last tokens stood before in its own text, and in the memory."""
        self.remembered: Match = NO_MATCH


class OutputMemory:
    """The latest outputs, by owner: bounded in tokens, the owner that was used longest ago goes
    first. An owner's text is dropped when it is full, so that it begins anew with what is new."""

    def __init__(
        self,
        max_tokens: int = MAX_REMEMBERED_TOKENS,
        max_outputs: int = 10_000,
        sizes: Collection[int] = SUFFIX_SIZES,
    ) -> None:
        self._max_tokens, self._max_outputs, self._sizes = max_tokens, max_outputs, sizes
        self._texts: OrderedDict[Owner, NgramIndex] = OrderedDict()
        self._num_outputs: dict[Owner, int] = {}
        self._num_tokens = 0

    def of(self, owner: Owner) -> NgramIndex | None:
        """What is remembered for an owner."""
        return self._texts.get(owner)

    def add(self, owner: Owner, token_ids: list[int]) -> None:
        """Remember an output, or its last tokens."""
        kept = token_ids[-self._max_tokens // _OUTPUT_SHARE :]
        text, count = self._texts.get(owner), self._num_outputs.get(owner, 0)
        if text is not None and (
            len(text) + len(kept) >= self._max_tokens or count >= self._max_outputs
        ):
            self._drop(owner)
            text, count = None, 0
        if text is None:
            text = self._texts[owner] = NgramIndex(self._sizes)
        self._texts.move_to_end(owner)
        self._num_outputs[owner] = count + 1
        text.extend([*kept, -2 - count])  # that stands once in the text: no match goes across
        text.index(len(text))
        self._num_tokens += len(kept) + 1
        while self._num_tokens > self._max_tokens and len(self._texts) > 1:
            self._drop(next(iter(self._texts)))

    def _drop(self, owner: Owner) -> None:
        self._num_tokens -= len(self._texts.pop(owner))
        del self._num_outputs[owner]


class LookupDrafter:
    """Implements `Drafter`. `sizes` are those of the n-grams by which a match of up to `most`
    tokens is found; `max_factor` bounds a draft in multiples of the match that speaks for it."""

    def __init__(
        self,
        sizes: Collection[int] = SUFFIX_SIZES,
        memory: OutputMemory | None = None,
        *,
        most: int = MAX_LENGTH,
        max_factor: float | None = None,
    ) -> None:
        self._sizes, self._most = sizes, most
        self._memory = memory
        self._max_factor = max_factor
        self._followers: dict[Sequence, _Follower] = {}
        self._num_tokens = 0

    def draft(self, sequence: Sequence, most: int) -> Draft:
        """See `Drafter.draft`."""
        follower = self._followers.get(sequence)
        if follower is None:
            if self._num_tokens >= MAX_FOLLOWED_TOKENS:
                return NO_DRAFT
            follower = self._followers[sequence] = self._begin(sequence)
        self._read(follower, sequence)
        if follower.num_read < len(sequence.token_ids):
            return NO_DRAFT
        text, memory = follower.index, follower.memory
        length, end = follower.own
        if memory is not None and follower.remembered[0] > length:
            text, (length, end) = memory, follower.remembered
        if not length:
            return NO_DRAFT
        if self._max_factor is not None:
            most = min(most, int(self._max_factor * length))
        return Draft(_continued(text.token_ids, end + 1, most), length)

    def end(self, sequence: Sequence) -> None:
        """See `Drafter.end`; its output is remembered."""
        follower = self._followers.pop(sequence, None)
        if follower is None:
            return
        self._num_tokens -= len(follower.index)
        output = sequence.output_token_ids
        if self._memory is not None and output and sequence.request.error is None:
            self._memory.add(_owner(sequence), output)

    def _begin(self, sequence: Sequence) -> _Follower:
        first = max(0, len(sequence.token_ids) - MAX_SEQUENCE_TOKENS)
        memory = None if self._memory is None else self._memory.of(_owner(sequence))
        return _Follower(self._new_index(), first, memory)

    def _new_index(self) -> NgramIndex:
        return NgramIndex(self._sizes, self._most)

    def _read(self, follower: _Follower, sequence: Sequence) -> None:
        """Take in what the sequence has gained, and find its end before."""
        index, memory = follower.index, follower.memory
        if len(index) >= 2 * MAX_SEQUENCE_TOKENS:
            self._num_tokens -= len(index)
            index = follower.index = self._new_index()
            follower.num_read = len(sequence.token_ids) - MAX_SEQUENCE_TOKENS
            follower.own = NO_MATCH
        gained = sequence.token_ids[follower.num_read : follower.num_read + MAX_READ]
        if not gained:
            return
        index.extend(gained)
        index.index(len(index) - 1)  # the last n-gram is what is looked for
        follower.num_read += len(gained)
        self._num_tokens += len(gained)
        if follower.num_read == len(sequence.token_ids):
            follower.own = _moved(index, index.token_ids, follower.own, len(gained))
            if memory is not None:
                follower.remembered = _moved(
                    memory, index.token_ids, follower.remembered, len(gained)
                )


class RecallDrafter:
    """Implements `Drafter`: by what a tenant's remembered outputs have, whatever the sequence's own
    text says."""

    def __init__(self, memory: OutputMemory, *, max_factor: float | None = None) -> None:
        self._memory, self._max_factor = memory, max_factor
        self._matches: dict[Sequence, tuple[NgramIndex, Match, int]] = {}
        """By sequence: where its last tokens stood, and how many it had."""

    def draft(self, sequence: Sequence, most: int) -> Draft:
        """See `Drafter.draft`."""
        memory, num_known = self._memory.of(_owner(sequence)), len(sequence.token_ids)
        if memory is None:
            self._matches.setdefault(sequence, (_NOTHING, NO_MATCH, num_known))
            return NO_DRAFT
        text, match, num_before = self._matches.get(sequence, (memory, NO_MATCH, num_known))
        if text is not memory:
            match = NO_MATCH
        match = _moved(memory, sequence.token_ids, match, num_known - num_before)
        self._matches[sequence] = memory, match, num_known
        length, end = match
        if not length:
            return NO_DRAFT
        if self._max_factor is not None:
            most = min(most, int(self._max_factor * length))
        return Draft(_continued(memory.token_ids, end + 1, most), length)

    def end(self, sequence: Sequence) -> None:
        """See `Drafter.end`; its output is remembered."""
        if self._matches.pop(sequence, None) is None:
            return
        output = sequence.output_token_ids
        if output and sequence.request.error is None:
            self._memory.add(_owner(sequence), output)


_NOTHING = NgramIndex(SUFFIX_SIZES)


def _moved(index: NgramIndex, tail: list[int], match: Match, count: int) -> Match:
    """The match of a text that has gained `count` tokens."""
    return index.find(tail, match[1] + count if match[0] else -1)


def _owner(sequence: Sequence) -> Owner:
    return sequence.request.tenant, sequence.request.namespace


def _continued(text: list[int], first: int, most: int) -> list[int]:
    """Up to `most` tokens from a place on; where the text ends, it goes on with what was taken, as
    a text that repeats itself does."""
    found = text[first : first + most]
    if len(found) < most and found and first + len(found) == len(text):
        found = (found * (most // len(found) + 1))[:most]
    for place, token_id in enumerate(found):
        if token_id < 0:  # the end of an output
            return found[:place]
    return found
