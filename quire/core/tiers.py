"""Stored blocks as both planes know them: what identifies one, and what is said of keeping and
restoring them.

A stored block is known by the digest of its place in the prefix index, which covers everything
before it. What was written under a digest is believed only where the digest of its parent and its
own tokens are those of the sequence that wants it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

TIERS = "tiers"
"""Of `StepPlan.orders`: each a `TierOrder`. Of `StepResult.news`: `TierNews`."""


StoreMedium = Literal["host", "disk"]
"""A tier below the pool."""


class StoredKey(NamedTuple):
    """What one place of a sequence is stored under."""

    digest: bytes
    """16 bytes."""
    parent: bytes
    """Digest of the place before it, or of the namespace."""
    content_ids: tuple[int, ...]
    """What stands at its positions (`quire.core.content`)."""
    place: int = 0
    """Blocks before it in its sequence."""


class TierOrder(NamedTuple):
    """What the control plane wants done; orders are carried out one after the other, before the
    plan's work.

    "begin": forget all orders before, and report every stored block. "keep": copy `blocks` (for
    each key one of each group) and store them. "drop": forget what is stored under the keys.
    "fetch": read what is stored under the keys, to be placed. "place": write what was fetched, from
    the place `first` on, into `blocks`. "cancel": what was fetched is not needed.
    """

    verb: Literal["begin", "keep", "drop", "fetch", "place", "cancel"]
    number: int = 0
    """Of "begin", and of a fetch with all that follows it."""
    keys: tuple[StoredKey, ...] = ()
    blocks: tuple[tuple[int, ...], ...] = ()
    first: int = 0


class TierNews(NamedTuple):
    """What has happened.

    "known": a tier stores these now. "complete": everything that is stored has been told of; the
    answer to "begin". "gone": a tier does not store these any more, or none does. "fetched": the
    first `num_places` places can be placed, reading took `seconds`. "placed": that is done. "off":
    nothing is stored from now on.
    """

    verb: Literal["known", "complete", "gone", "fetched", "placed", "off"]
    number: int = 0
    digests: tuple[bytes, ...] = ()
    num_places: int = 0
    seconds: float = 0.0
    num_bytes: int = 0
    """Written, of "known", or read, of "fetched"."""
    num_faulty: int = 0
    """Of "fetched": places whose bytes were not what was once written, or could not be read."""
    medium: StoreMedium | None = None
    """Of "known" and "gone": which tier; None where no tier has them."""
