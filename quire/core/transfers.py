"""Transfers of keys and values between engines as both planes know them: what a request says of
them, and what is ordered and reported."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal, NamedTuple

from quire.core.content import content_bytes

TRANSFERS = "transfers"
"""Of `StepPlan.orders`: each a `TransferOrder`. Of `StepResult.news`: `TransferNews`."""


class RemotePrefix(NamedTuple):
    """Where another engine keeps a prompt's keys and values."""

    engine: str
    host: str
    port: int
    lease: str
    """Under which they are kept."""


class KVTransfer(NamedTuple):
    """One request's part in transfers."""

    gives: str = ""
    """The lease under which its prompt is to be kept for another engine; empty where it is not."""
    takes: RemotePrefix | None = None
    """Where its prompt was computed."""


class TransferOrder(NamedTuple):
    """What the control plane wants done, before the plan's work.

    "stage": copy `blocks` (for each place one of each group) of a prompt, and keep them under
    `lease`. "pull": fetch tokens of `remote` from place `first` up to the place `end`. "place":
    write what was pulled, from the place `first` on, into `blocks`. "cancel": what was pulled is
    not needed. "forget": nor is anything that was pulled under an earlier order.
    """

    verb: Literal["stage", "pull", "place", "cancel", "forget"]
    number: int = 0
    """Of a pull, with all that follows it."""
    content: bytes = b""
    """Digest of the prompt: of all that stands in it, and of who may share it."""
    lease: str = ""
    remote: RemotePrefix | None = None
    blocks: tuple[tuple[int, ...], ...] = ()
    first: int = 0
    end: int = 0


class TransferNews(NamedTuple):
    """What has happened.

    "staged": `num_bytes` are kept for others now. "pulled": places up to
    `end` can be placed; of each group there are blocks from the place in `starts` on. "failed":
    nothing was pulled, for `reason`. "placed": that is done.
    """

    verb: Literal["staged", "pulled", "failed", "placed"]
    number: int = 0
    end: int = 0
    starts: tuple[int, ...] = ()
    num_bytes: int = 0
    seconds: float = 0.0
    reason: str = ""


def content_digest(namespace: tuple[str, ...], content_ids: Sequence[int]) -> bytes:
    """Return 32 bytes that are another engine's for the same content under the same salt, adapter
    and images alone."""
    digest = hashlib.blake2b(digest_size=32)
    for each in namespace:
        encoded = each.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    digest.update(b"\xff" * 8 + content_bytes(content_ids))
    return digest.digest()
