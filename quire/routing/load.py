"""What a router has on its way to a replica: the only load that is never stale.

Counted by the router itself, from the moment it chooses to the moment the answer has ended, so that
two requests in the same millisecond see one another. What other routers send is not in it.
"""

from __future__ import annotations

from dataclasses import dataclass

DECODE_WEIGHT = 0.25
"""Of a token that is yet to be generated, against a prompt token that is yet to be computed: it
takes a whole step, but shares that with all others of the batch."""


@dataclass(slots=True, eq=False)
class ReplicaLoad:
    """The requests in flight at one replica."""

    name: str
    """The same in every router, for they agree by its hash."""
    num_requests: int = 0
    num_prefill_tokens: int = 0
    """Of prompts whose answers have not begun; without what the replica's cache should have."""
    num_decode_tokens: int = 0
    """Expected of the answers."""
    num_chosen: int = 0
    """Requests that ever went there."""

    @property
    def tokens(self) -> float:
        """Return what is in flight, in prompt tokens."""
        return self.num_prefill_tokens + DECODE_WEIGHT * self.num_decode_tokens


class LoadShare:
    """One request's share of a replica's load. Ends once, however often it is told."""

    __slots__ = ("_has_ended", "_num_decode", "_num_prefill", "load")

    def __init__(self, load: ReplicaLoad, num_prefill: int, num_decode: int) -> None:
        self.load = load
        self._num_prefill, self._num_decode = num_prefill, num_decode
        self._has_ended = False
        load.num_requests += 1
        load.num_chosen += 1
        load.num_prefill_tokens += num_prefill
        load.num_decode_tokens += num_decode

    def begin_answer(self) -> None:
        """Note that the prompt has been computed. Idempotent."""
        self.load.num_prefill_tokens -= self._num_prefill
        self._num_prefill = 0

    def end(self) -> None:
        """Take the request out of the load. Idempotent."""
        if self._has_ended:
            return
        self._has_ended = True
        self.begin_answer()
        self.load.num_requests -= 1
        self.load.num_decode_tokens -= self._num_decode
