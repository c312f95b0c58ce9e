"""Where a row stands in its grammar, as a function of its output tokens alone.

The state only saves work: it is built anew from the tokens wherever it is missing (after a
preemption, on another engine, in a fork) and taken back where a row has fewer tokens than before
(rejected drafts).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.core.drafts import HABIT, LONGEST, ONLY
from quire.errors import RequestError

TokenMask = NDArray[np.bool_]

_MAX_OPTIONS = 24
"""More tokens than these are never the beginnings of one."""


Choice = tuple[int, tuple[int, ...]]
"""The token before, and those that are allowed."""


class Habits:
    """What was chosen where few tokens were allowed: the last choice of each kind, bounded."""

    def __init__(self, most: int = 1 << 13) -> None:
        self._most = most
        self._chosen: OrderedDict[Choice, int] = OrderedDict()

    def learn(self, choice: Choice, token_id: int) -> None:
        """This one was chosen."""
        self._chosen[choice] = token_id
        self._chosen.move_to_end(choice)
        if len(self._chosen) > self._most:
            self._chosen.popitem(last=False)

    def of(self, choice: Choice) -> int | None:
        """The token that was chosen last."""
        return self._chosen.get(choice)


class Matcher:
    """One row's state. `native` is a matcher of the library's, at the start, that belongs to this
    row; `texts` are the vocabulary's, None for tokens that stand for no text."""

    def __init__(self, native: Any, texts: Sequence[bytes | None]) -> None:
        self._native = native
        self._texts = texts
        self._num_tokens = len(texts)
        self._token_ids: NDArray[np.integer[Any]] = np.empty(0, np.int64)
        self._bits: dict[int, NDArray[np.uint8]] = {}
        """By number of output tokens: what may follow so many of `_seen`, in the library's form."""
        self._few: dict[int, Choice] = {}
        """By number of output tokens: those of these where few may follow."""
        self._seen: NDArray[np.integer[Any]] = np.empty(0, np.int64)

    def allowed(self, output_token_ids: NDArray[np.integer[Any]]) -> TokenMask:
        """Return which tokens may follow these, bool [vocabulary].
        Raises RequestError where the state cannot be followed."""
        self._go_to(output_token_ids)
        self._bits = {
            place: bits for place, bits in self._bits.items() if place >= len(output_token_ids)
        }
        return np.unpackbits(self._bits_here(), count=self._num_tokens, bitorder="little").view(
            np.bool_
        )

    def ahead(
        self,
        output_token_ids: NDArray[np.integer[Any]],
        most: int,
        habits: Habits,
    ) -> list[tuple[int, int]]:
        """Return up to `most` tokens that will probably follow the output, as long as few can, and
        what speaks for each (see `quire.core.drafts`): the one that came where the same few could,
        or the longest where all others are its beginnings.

        Raises RequestError where the state cannot be followed so far; the matcher is then not to be
        used again, for a shorter way may be in order.
        """
        self._go_to(output_token_ids)
        for place in [place for place in self._few if place < len(output_token_ids)]:
            habits.learn(self._few.pop(place), int(output_token_ids[place]))
        found: list[tuple[int, int]] = []
        while len(found) < most:
            probable = self._probable(habits)
            if probable is None:
                break
            found.append(probable)
            self._go_to(np.append(self._token_ids, probable[0]))
        return found

    def _probable(self, habits: Habits) -> tuple[int, int] | None:
        bits, place = self._bits_here(), len(self._token_ids)
        if np.count_nonzero(bits) > _MAX_OPTIONS:
            return None
        options = np.flatnonzero(
            np.unpackbits(bits, count=self._num_tokens, bitorder="little")
        ).tolist()
        texts = [text for each in options if (text := self._texts[each]) is not None]
        if not options or len(options) > _MAX_OPTIONS or len(texts) < len(options):
            return None
        if len(options) == 1:
            return options[0], ONLY
        choice = (int(self._token_ids[-1]) if place else -1, tuple(options))
        self._few[place] = choice
        known = habits.of(choice)
        if known is not None:
            return known, HABIT
        longest = max(texts, key=len)
        if not all(map(longest.startswith, texts)):
            return None
        return options[texts.index(longest)], LONGEST

    def _bits_here(self) -> NDArray[np.uint8]:
        place = len(self._token_ids)
        bits = self._bits.get(place)
        if bits is None:
            bits = np.frombuffer(self._native.compute_bitmask(), np.uint8)
            if self._native.is_error():
                raise RequestError(
                    "the form that the answer must have became too complex "
                    f"({self._native.stop_reason()})"
                )
            self._bits[place] = bits
        return bits

    def num_valid(
        self, output_token_ids: NDArray[np.integer[Any]], token_ids: Sequence[int]
    ) -> int:
        """How many of `token_ids`, one after the other, may follow the output."""
        self._go_to(output_token_ids)
        known = list(takewhile(self._num_tokens.__gt__, token_ids))
        return int(self._native.validate_tokens(known))

    def _go_to(self, token_ids: NDArray[np.integer[Any]]) -> None:
        self._keep_masks_of(token_ids)
        known = self._token_ids
        num_common = min(len(known), len(token_ids))
        differing = np.flatnonzero(known[:num_common] != token_ids[:num_common])
        num_common = int(differing[0]) if len(differing) else num_common
        if num_common < len(known) and not self._native.rollback(len(known) - num_common):
            raise RequestError("the form that the answer must have cannot be taken back so far")
        if not self._native.consume_tokens(token_ids[num_common:].tolist()):
            reason = self._native.stop_reason()
            raise RequestError(
                "the answer does not have the form that it must have, or it is too complex "
                f"({reason})"
            )
        self._token_ids = token_ids.copy()  # what is given is a view of a table that changes

    def _keep_masks_of(self, token_ids: NDArray[np.integer[Any]]) -> None:
        """Drop the masks behind other tokens than these."""
        num_common = min(len(self._seen), len(token_ids))
        differing = np.flatnonzero(self._seen[:num_common] != token_ids[:num_common])
        if len(differing):
            last = int(differing[0])
            self._bits = {place: bits for place, bits in self._bits.items() if place <= last}
            self._few = {place: few for place, few in self._few.items() if place <= last}
        if len(differing) or len(token_ids) > len(self._seen):
            self._seen = token_ids.copy()
