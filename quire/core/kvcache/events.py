"""KV events: what enters the prefix index and leaves it, for those who follow it from outside.

Events are numbered without gaps and kept up to a number of blocks. A reader names the last one that
it knows; where what follows is not kept any more, or it has followed another log, it gets a
snapshot in place of events: everything that is cached, as if it had been stored just now. Nothing
is recorded before the first reader comes.

Blocks are named by the digests of the prefix index. What a request's prompt consists of is an event
of its own, so that a reader who knows the request and no tokens learns which blocks it came to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple

from quire.core.content import short_ids
from quire.core.kvcache.elsewhere import Medium
from quire.core.kvcache.prefix import Namespace, PrefixIndex, PrefixNode
from quire.core.tiers import StoreMedium

MAX_EVENT_BLOCKS = 1 << 16
"""Named by the events that are kept: a million tokens in blocks of 16, some 8 MB with the digests
of the prompts. A reader that asks every second is behind by less."""
MAX_SNAPSHOT_BLOCKS = 1 << 18
"""Of a snapshot, parents first; a larger pool's is cut off, and says so."""


class KVEvent(NamedTuple):
    """One event.

    "stored": blocks that continue each other are cached, the first behind `parent`. "removed":
    these are no longer. "cleared": no block of the pool is. "prompt": the whole blocks of a
    request's prompt, when it is let in.
    """

    kind: Literal["stored", "removed", "cleared", "prompt"]
    digests: tuple[bytes, ...] = ()
    medium: Medium = "pool"
    """Of "stored" and "removed": which tier. Of one below the pool no more than digests is told."""
    parent: bytes = b""
    """Of "stored" in the pool, as the next two; empty at the beginning of a prompt."""
    tokens: tuple[tuple[int, ...], ...] = ()
    """What stands in each block (`Sequence.content_ids`), of a digest 31 bits."""
    namespace: Namespace = ()
    request_id: str = ""
    """Of "prompt", as the next."""
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class KVEventBatch:
    """What a reader gets."""

    log: str
    """Changes with every log: numbers of another one say nothing."""
    last: int
    """Number of the last event, with which the reader asks for what follows."""
    events: tuple[KVEvent, ...]
    """The last one has the number `last`, the others those before it; of a snapshot, none has."""
    is_snapshot: bool
    is_cut: bool
    """Whether a snapshot lacks blocks, because there are too many."""
    block_size: int
    time_s: float
    """Of the engine's clock, when it was last told."""


class KVEventLog:
    """Implements `IndexWatcher` and `ElsewhereWatcher`."""

    def __init__(self, name: str, max_blocks: int = MAX_EVENT_BLOCKS) -> None:
        self.name = name
        self.time_s = 0.0
        self._index: PrefixIndex
        self._max_blocks = max_blocks
        self._events: deque[KVEvent] = deque()
        self._num_blocks = 0
        """Named by them."""
        self._last = 0
        self._is_recording = False
        self._open: Literal["", "stored", "removed"] = ""
        self._nodes: list[PrefixNode] = []
        """Of the event that is still open."""
        self._gone: list[bytes] = []

    def follow(self, index: PrefixIndex) -> None:
        """Hear of everything from now on. Called once."""
        self._index = index
        index.watchers.append(self)
        index.elsewhere.watchers.append(self)

    def published(self, node: PrefixNode) -> None:
        if not self._is_recording:
            return
        if self._open != "stored" or node.parent is not self._nodes[-1]:
            self._close()
            self._open = "stored"
        self._nodes.append(node)

    def forgotten(self, node: PrefixNode) -> None:
        if not self._is_recording:
            return
        if self._open != "removed":
            self._close()
            self._open = "removed"
        self._gone.append(node.digest)

    def distrusted(self, node: PrefixNode) -> None:
        """Do nothing: it is forgotten next."""

    def stored_elsewhere(self, medium: StoreMedium, digests: tuple[bytes, ...]) -> None:
        if self._is_recording:
            self._close()
            self._add(KVEvent("stored", digests, medium))

    def removed_elsewhere(self, medium: StoreMedium, digests: tuple[bytes, ...]) -> None:
        if self._is_recording:
            self._close()
            self._add(KVEvent("removed", digests, medium))

    def asked(self, request_id: str, digests: tuple[bytes, ...], num_tokens: int) -> None:
        """Record the whole blocks of a prompt of so many tokens."""
        if self._is_recording:
            self._close()
            self._add(KVEvent("prompt", digests, request_id=request_id, num_tokens=num_tokens))

    def read(self, log: str, since: int) -> KVEventBatch:
        """Return what came after the event `since` of a log of this name."""
        self._close()
        first = self._last - len(self._events)
        is_known = self._is_recording and log == self.name and first <= since <= self._last
        self._is_recording = True
        if not is_known:
            events, is_cut = self._snapshot()
            return self._batch(events, is_snapshot=True, is_cut=is_cut)
        return self._batch(tuple(self._events)[since - first :], is_snapshot=False, is_cut=False)

    def _batch(
        self, events: tuple[KVEvent, ...], *, is_snapshot: bool, is_cut: bool
    ) -> KVEventBatch:
        size = self._index.block_size
        return KVEventBatch(self.name, self._last, events, is_snapshot, is_cut, size, self.time_s)

    def _close(self) -> None:
        """Give the open event its number."""
        kind, self._open = self._open, ""
        if kind == "stored":
            nodes, self._nodes = self._nodes, []
            self._add(stored_event(nodes))
        elif kind == "removed":
            gone, self._gone = self._gone, []
            if len(gone) > 1 and not self._index.num_full:
                self._add(KVEvent("cleared"))
            else:
                self._add(KVEvent("removed", tuple(gone)))

    def _add(self, event: KVEvent) -> None:
        self._last += 1
        self._events.append(event)
        self._num_blocks += 1 + len(event.digests)
        while self._num_blocks > self._max_blocks:
            self._num_blocks -= 1 + len(self._events.popleft().digests)

    def _snapshot(self) -> tuple[tuple[KVEvent, ...], bool]:
        events, num_left = list[KVEvent](), MAX_SNAPSHOT_BLOCKS
        for nodes in _runs(self._index):
            if len(nodes) > num_left:
                return tuple(events), True
            num_left -= len(nodes)
            events.append(stored_event(nodes))
        for medium, digests in self._index.elsewhere.by_tier():
            if digests:
                events.append(KVEvent("stored", tuple(islice(digests, num_left)), medium))
                if len(digests) > num_left:
                    return tuple(events), True
                num_left -= len(digests)
        return tuple(events), False


def stored_event(nodes: list[PrefixNode]) -> KVEvent:
    """Return the event that blocks are stored which continue each other."""
    before = nodes[0].parent
    assert before is not None
    return KVEvent(
        "stored",
        tuple(node.digest for node in nodes),
        parent=before.digest if before.parent is not None else b"",
        tokens=tuple(short_ids(node.tokens) for node in nodes),
        namespace=before.namespace,
    )


def _runs(index: PrefixIndex) -> Iterator[list[PrefixNode]]:
    """Yield all full nodes, in runs that continue each other, parents first."""
    run: list[PrefixNode] = []
    for node in index.nodes():
        if not node.digest:
            continue
        if run and node.parent is not run[-1]:
            yield run
            run = []
        run.append(node)
    if run:
        yield run
