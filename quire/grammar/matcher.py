"""Where a row stands in its grammar, as a function of its output tokens alone.

The state only saves work: it is built anew from the tokens wherever it is missing (after a
preemption, on another engine, in a fork) and taken back where a row has fewer tokens than before
(rejected drafts).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.errors import RequestError

TokenMask = NDArray[np.bool_]


class Matcher:
    """One row's state. `native` is a matcher of the library's, at the start,
    that belongs to this row."""

    def __init__(self, native: Any, num_tokens: int) -> None:
        self._native = native
        self._num_tokens = num_tokens
        self._token_ids: NDArray[np.integer[Any]] = np.empty(0, np.int64)

    def allowed(self, output_token_ids: NDArray[np.integer[Any]]) -> TokenMask:
        """Return which tokens may follow these, bool [vocabulary].
        Raises RequestError where the state cannot be followed."""
        self._go_to(output_token_ids)
        bits = np.frombuffer(self._native.compute_bitmask(), np.uint8)
        if self._native.is_error():
            raise RequestError(
                "the form that the answer must have became too complex "
                f"({self._native.stop_reason()})"
            )
        return np.unpackbits(bits, count=self._num_tokens, bitorder="little").view(np.bool_)

    def num_valid(
        self, output_token_ids: NDArray[np.integer[Any]], token_ids: Sequence[int]
    ) -> int:
        """How many of `token_ids`, one after the other, may follow the output."""
        self._go_to(output_token_ids)
        known = list(takewhile(self._num_tokens.__gt__, token_ids))
        return int(self._native.validate_tokens(known))

    def _go_to(self, token_ids: NDArray[np.integer[Any]]) -> None:
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
