"""What stands at each position of a sequence, by which cached prefixes are told apart.

A token's id, as a rule. Where tokens only hold the place of other content, an image, say, the id of
the first place is the content's whole digest, an integer below -2**31: whatever part of the content
a prefix ends with, all of the digest has been compared. A block may end behind the first place, so
that fewer bits there, and the others behind, would let contents that agree in these bits share it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

_SIGN = -(1 << 31)
"""In the place of a digest, where ids have 32 bits: no other id is this one."""
_WIDE_BYTES = 33


class Content(NamedTuple):
    """What stands at the positions [first, end) of a prompt, in place of tokens."""

    first: int
    end: int
    digest: bytes
    """32 bytes."""


def content_ids(token_ids: Sequence[int], contents: Sequence[Content]) -> tuple[int, ...] | None:
    """Return what stands at each position: at the first of a content its digest, at those behind
    31 bits of it each, negative. None where there are tokens alone."""
    if not contents:
        return None
    found = list(token_ids)
    for first, end, digest in contents:
        words = [_SIGN | max(word & ~_SIGN, 1) for word in array("I", digest)]
        repeated = words * ((end - first) // len(words) + 1)
        found[first:end] = [_SIGN - 1 - int.from_bytes(digest), *repeated[1 : end - first]]
    return tuple(found)


def content_bytes(ids: Sequence[int]) -> bytes:
    """Return bytes that are equal for equal ids alone, among sequences of one length."""
    try:
        return array("i", ids).tobytes()
    except OverflowError:
        wide = [(-each).to_bytes(_WIDE_BYTES, "little") for each in ids if each < _SIGN]
        return array("i", [max(each, _SIGN) for each in ids]).tobytes() + b"".join(wide)


def short_ids(ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return ids of 32 bits, to be shown or guessed by: a digest's last 31 bits in its place."""
    if min(ids, default=0) >= _SIGN:
        return ids
    return tuple(each if each >= _SIGN else _SIGN | (each & ~_SIGN) for each in ids)
