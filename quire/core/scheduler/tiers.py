"""Stored prefixes as a prerequisite: a sequence whose next blocks lie in host memory or on disk
runs once these are back, where that takes less time than to compute them.

Owns what the control plane knows of the tiers below the pool: which places are stored, which are
being read, and what reading has cost. Each block that is published is offered once, so that a
preempted sequence finds its own blocks there as a later request does. What was read is placed into
free blocks as if a sequence had computed it, between two steps: `KVCacheManager` sees a table that
grows, is published and released, and no block is ever set aside while something is read.

Nothing here can fail a request. What is lost, late, damaged or not worth its time is computed.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from quire.core.kvcache.elsewhere import StoredElsewhere
from quire.core.kvcache.manager import KVCacheManager
from quire.core.kvcache.prefix import ChainKeys, PrefixNode
from quire.core.plan import Record
from quire.core.request import Sequence
from quire.core.scheduler.placing import forget, place_blocks
from quire.core.scheduler.prerequisites import Settled
from quire.core.scheduler.resources import KVBlocks
from quire.core.step_cost import StepCostModel
from quire.core.tiers import TIERS, StoredKey, TierNews, TierOrder

logger = logging.getLogger(__name__)

NOT_LISTED = "waits for the list of stored prefixes"
NOT_READ = "waits for its stored prefix to be read"
MAX_LIST_S = 2.0
"""From the start to the list of what is stored; without it nothing is restored. A first start reads
all weights to identify them, which takes longer; there is nothing to restore then."""
MAX_READ_S = 10.0
"""From an order to its news: a disk that hangs costs that, once, and is not asked again."""
FETCH_S = 0.002
"""Of any fetch, beside its blocks: a step without work waits up to 5 ms for news."""
MAX_FETCHED_BLOCKS = 1024
"""Of an order."""
_NEWEST_SHARE = 0.25
"""Of the newest measurement in the average cost of a block."""
_MAX_TRIED = 4096
_MAX_DOUBTFUL = 4096
_MAX_ORDERS = 64
"""Of a sequence between two admissions, where one order is not enough for a long prompt."""


@dataclass(slots=True)
class TierStats:
    """Counts since the engine was started; they outlive a control plane."""

    num_kept_blocks: int = 0
    """Places that were stored, counted where several groups of layers have a block each as one."""
    num_restored_blocks: int = 0
    num_faulty_blocks: int = 0
    """Damaged or unreadable, and so computed."""
    num_late_fetches: int = 0
    num_bytes_written: int = 0
    num_bytes_read: int = 0
    num_stored_blocks: int = 0
    """Stored now."""
    is_off: bool = False
    """Whether storing was given up, because a disk is full or fails."""


class RestoreCosts:
    """What it costs to restore a place, as measured, against computing it."""

    def __init__(
        self, model: StepCostModel, block_s: float, max_blocks: int = MAX_FETCHED_BLOCKS
    ) -> None:
        """`block_s` is an estimate, until the first blocks are read; at most `max_blocks` are in
        memory between disk and pool."""
        self._model = model
        self._block_s = block_s
        self.max_blocks = max_blocks

    def compute_s(self, start: int, num_tokens: int) -> float:
        """Seconds to compute so many tokens from position `start` on."""
        return self._model.chunk_s(start, num_tokens)

    def restore_s(self, num_blocks: int) -> float:
        """Seconds to restore so many places."""
        return FETCH_S + num_blocks * self._block_s

    def observe(self, num_blocks: int, seconds: float) -> None:
        """Learn from what reading took."""
        if num_blocks and seconds >= 0.0:
            self._block_s += _NEWEST_SHARE * (seconds / num_blocks - self._block_s)


@dataclass(slots=True)
class _Fetch:
    """Places of a sequence that are being read, and who waits for them."""

    owner: Sequence
    """Whose order it is."""
    keys: ChainKeys
    first: int
    end: int
    sequences: list[Sequence] = field(default_factory=list)
    ordered_s: float | None = None
    """None until a plan carries the order."""


class _Wish(NamedTuple):
    """Places that a sequence could use."""

    first: int
    end: int


class StoredPrefixes:
    """Implements `Prerequisite`, `Retained`, `BlockUser` and `IndexWatcher`."""

    name = TIERS

    def __init__(self, costs: RestoreCosts, stats: TierStats) -> None:
        self.stats = stats
        self.costs = costs
        self._blocks: KVBlocks
        self._known = StoredElsewhere()
        self._offered: set[bytes] = set()
        """Offered, and not yet heard of."""
        self._orders: list[TierOrder] = []
        self._fetches: dict[int, _Fetch] = {}
        self._reading: dict[bytes, int] = {}
        """By the digest of a place: which fetch reads it."""
        self._unlisted: list[Sequence] = []
        """Those that wait for the list."""
        self._tried: OrderedDict[Sequence, int] = OrderedDict()
        """Orders of sequences that were carried out since they last ran, `_MAX_ORDERS` where there
        is nothing more to order: what they got may be evicted before they are admitted, and no
        sequence is to wait for ever."""
        self._unconfirmed: dict[int, list[PrefixNode]] = {}
        """By the fetch: nodes whose blocks are written by a plan that may still be lost."""
        self._doubtful: OrderedDict[bytes, StoredKey] = OrderedDict()
        """What was to be dropped, of late: the order may have been lost with its plan."""
        self._restored: set[bytes] = set()
        """Places in the pool whose blocks were read from a tier."""
        self._left: set[bytes] = set()
        """Stored when storing was given up: nothing is read of it, but it may come to be in
        doubt, and the next start must not find it then."""
        self._num_orders = 0
        self._is_off, self._is_listed = stats.is_off, False
        self._begun_s: float | None = None
        self._begin()

    @property
    def has_orders(self) -> bool:
        return bool(self._orders) and self._begun_s is not None

    def attach(self, blocks: KVBlocks) -> None:
        self._blocks, index = blocks, blocks.manager.index
        index.watchers.append(self)
        self._known = index.elsewhere

    # -- what is stored
    # ----------------------------------------------------------------------------------------------

    def published(self, node: PrefixNode) -> None:
        """Offer it, unless it is there."""
        digest = node.digest
        is_unwritten = self._blocks.manager.index.is_placing
        if self._is_off or is_unwritten or digest in self._known or digest in self._offered:
            return
        assert node.parent is not None
        key = StoredKey(digest, node.parent.digest, node.tokens, node.place)
        self._offered.add(digest)
        if digest in self._doubtful:  # what is stored under it must not be taken for this
            self._orders.append(TierOrder("drop", 0, (key,)))
        last = self._orders[-1] if self._orders else None
        if last is not None and last.verb == "keep":
            self._orders[-1] = last._replace(
                keys=(*last.keys, key), blocks=(*last.blocks, tuple(node.blocks))
            )
        else:
            self._orders.append(TierOrder("keep", 0, (key,), (tuple(node.blocks),)))

    def distrusted(self, node: PrefixNode) -> None:
        """Have it forgotten there, too."""
        digest = node.digest
        if digest in self._known or digest in self._offered or digest in self._left:
            self._known.discard((digest,))
            for stored in (self._offered, self._left):
                stored.discard(digest)
            assert node.parent is not None
            key = StoredKey(digest, node.parent.digest, node.tokens, node.place)
            self._orders.append(TierOrder("drop", 0, (key,)))
            self._doubtful[digest] = key
            if len(self._doubtful) > _MAX_DOUBTFUL:
                self._doubtful.popitem(last=False)

    def forgotten(self, node: PrefixNode) -> None:
        """What leaves the pool stays stored."""
        self._restored.discard(node.digest)

    def is_restored(self, digest: bytes) -> bool:
        """Whether a place in the pool was read from a tier, and not computed."""
        return digest in self._restored

    def is_stored(self, digest: bytes) -> bool:
        """Whether a place is in a tier."""
        return digest in self._known

    def num_stored(self, keys: ChainKeys, first: int, end: int) -> int:
        """Return how many places from `first` on are stored, one behind the other."""
        place = first
        while place < end and keys.digests[place] in self._known:
            place += 1
        return place - first

    # -- who waits
    # ----------------------------------------------------------------------------------------------

    def refusal(self, sequence: Sequence) -> str | None:
        is_done = self._tried.get(sequence, 0) >= _MAX_ORDERS
        if self._is_off or is_done or not self._can_use(sequence):
            return None
        if not self._is_listed:
            return NOT_LISTED
        return None if self._wish(sequence) is None else NOT_READ

    def park(self, sequence: Sequence) -> None:
        if not self._is_listed:
            self._unlisted.append(sequence)
            return
        wish = self._wish(sequence)
        assert wish is not None and sequence.keys is not None
        number = self._reading.get(sequence.keys.digests[wish.first])
        if number is None:
            number = self._order_fetch(sequence, sequence.keys, wish)
        self._fetches[number].sequences.append(sequence)

    def unpark(self, sequence: Sequence) -> None:
        for waiting in (self._unlisted, *(each.sequences for each in self._fetches.values())):
            if sequence in waiting:
                waiting.remove(sequence)

    def parked(self) -> list[Sequence]:
        return [*self._unlisted, *chain(*(each.sequences for each in self._fetches.values()))]

    def retain(self, sequence: Sequence) -> None:
        self._tried.pop(sequence, None)
        if sequence.request.metrics.num_preemptions and self._known and self._can_use(sequence):
            self._log_computed(sequence)

    def release(self, sequence: Sequence) -> None:
        """Do nothing: blocks are found by their digests."""

    def _can_use(self, sequence: Sequence) -> bool:
        """Whether a whole block that it must not compute could be stored."""
        request, keys = sequence.request, sequence.keys
        return (
            keys is not None
            and request.reads_cache
            and request.scoring is None
            and len(sequence.token_ids) > keys.block_size
        )

    def _wish(self, sequence: Sequence) -> _Wish | None:
        """What is worth waiting for: stored places behind those in the pool."""
        keys = sequence.keys
        assert keys is not None
        keys.extend_to(sequence.content_ids)
        first = self._blocks.num_matched_blocks(sequence)
        most = min((len(sequence.token_ids) - 1) // keys.block_size, len(keys.digests))
        if first >= most:
            return None
        if keys.digests[first] in self._reading:
            return _Wish(first, first + 1)
        count = self.num_stored(keys, first, min(most, first + self.costs.max_blocks))
        return _Wish(first, first + count) if count and self._pays(keys, first, count) else None

    def _pays(self, keys: ChainKeys, first: int, count: int) -> bool:
        """Whether places take less time to restore, behind those that others wait for, than to
        compute. The later a place, the more it costs to compute, so that it is all or none."""
        size = keys.block_size
        num_before = sum(each.end - each.first for each in self._fetches.values())
        restore_s = self.costs.restore_s(num_before + count)
        return restore_s < self.costs.compute_s(first * size, count * size)

    def _order_fetch(self, sequence: Sequence, keys: ChainKeys, wish: _Wish) -> int:
        first, end = wish
        self._num_orders += 1
        self._fetches[self._num_orders] = _Fetch(sequence, keys, first, end)
        stored = tuple(
            StoredKey(keys.digests[place], _parent(keys, place), keys.tokens[place], place)
            for place in range(first, end)
        )
        for key in stored:
            self._reading[key.digest] = self._num_orders
        self._orders.append(TierOrder("fetch", self._num_orders, stored))
        self._log("restored", sequence, first, end - first)
        return self._num_orders

    def _log_computed(self, sequence: Sequence) -> None:
        """Say so where a preempted sequence does not wait for what is stored of it."""
        keys, first = sequence.keys, sequence.table.num_chained
        assert keys is not None
        count = self.num_stored(keys, first, (len(sequence.token_ids) - 1) // keys.block_size)
        if count:
            self._log("computed again", sequence, first, count)

    def _log(self, done: str, sequence: Sequence, first: int, count: int) -> None:
        """Log a decision with both of its costs."""
        size = self._blocks.manager.block_size
        logger.info(
            "%s: %d stored tokens are %s: about %.1f ms to restore them, %.1f ms to compute them",
            sequence.name,
            count * size,
            done,
            1e3 * self.costs.restore_s(count),
            1e3 * self.costs.compute_s(first * size, count * size),
        )

    # -- orders and news
    # ----------------------------------------------------------------------------------------------

    def take_orders(self, now: float) -> tuple[Record, ...]:
        if not self._orders:
            return ()
        if self._begun_s is None:
            self._begun_s = now
        for order in self._orders:
            if order.verb == "fetch":
                self._fetches[order.number].ordered_s = now
        orders, self._orders = tuple(self._orders), []
        return orders

    def take_news(self, news: tuple[Record, ...], now: float) -> list[Settled]:
        if not news and not self._fetches and not self._unlisted:
            return []
        ready: list[Sequence] = []
        for each in map(TierNews._make, news):
            ready += self._hear(each)
        if news:
            self.stats.num_stored_blocks = len(self._known)
        ready += self._give_up(now)
        return [Settled(ready)] if ready else []

    def lose_flights(self) -> None:
        forget(self._blocks.manager.index, list(chain(*self._unconfirmed.values())))
        waiting = self.parked()
        self._begin()
        self._unlisted = waiting

    def _begin(self) -> None:
        """Have the worker's half forget what it was told but for what is in doubt, and start from
        its list."""
        self._forget()
        self._is_listed, self._begun_s = False, None
        self._num_orders += 1
        self._orders = [TierOrder("begin", self._num_orders)]
        if self._doubtful:
            self._orders.insert(0, TierOrder("drop", 0, tuple(self._doubtful.values())))

    def _forget(self) -> None:
        self._known.clear()
        self._offered.clear()
        self._orders.clear()
        self._fetches.clear()
        self._reading.clear()
        self._unconfirmed.clear()
        self._unlisted = []

    def _hear(self, news: TierNews) -> list[Sequence]:
        """Take in one piece of news; return those who wait no more."""
        ready: list[Sequence] = []
        if news.verb == "known":
            assert news.medium is not None
            self._known.add(news.medium, news.digests)
            self._offered.difference_update(news.digests)
            self.stats.num_bytes_written += news.num_bytes
            self.stats.num_kept_blocks += news.num_places
        elif news.verb == "complete":
            self._is_listed = True
            ready, self._unlisted = self._unlisted, []
        elif news.verb == "gone":
            self._known.discard(news.digests, news.medium)
            self._offered.difference_update(news.digests)
        elif news.verb == "fetched":
            ready = self._fetched(news)
        elif news.verb == "placed":
            self._unconfirmed.pop(news.number, None)
        elif news.verb == "off":
            ready = self.parked()
            still_due = [order for order in self._orders if order.verb in ("place", "drop")]
            unconfirmed, self._left = self._unconfirmed.copy(), {*self._known, *self._offered}
            self._forget()
            self._orders, self._unconfirmed = still_due, unconfirmed
            self._is_off = self.stats.is_off = True
        return ready

    def _fetched(self, news: TierNews) -> list[Sequence]:
        self.stats.num_bytes_read += news.num_bytes
        self.stats.num_faulty_blocks += news.num_faulty
        fetch = self._end(news.number)
        if fetch is None:  # given up
            self._orders.append(TierOrder("cancel", news.number))
            return []
        self.costs.observe(news.num_places, news.seconds)
        self._place(news.number, fetch, news.num_places)
        return self._freed(fetch)

    def _end(self, number: int) -> _Fetch | None:
        fetch = self._fetches.pop(number, None)
        if fetch is not None:
            for place in range(fetch.first, fetch.end):
                self._reading.pop(fetch.keys.digests[place], None)
        return fetch

    def _freed(self, fetch: _Fetch) -> list[Sequence]:
        """Let those who waited go on, with what there is by now. Others than the owner may have an
        order of their own yet, for what they do not share."""
        is_cut = fetch.end - fetch.first == self.costs.max_blocks
        self._tried[fetch.owner] = self._tried.get(fetch.owner, 0) + 1 if is_cut else _MAX_ORDERS
        if len(self._tried) > _MAX_TRIED:
            self._tried.popitem(last=False)
        return fetch.sequences

    def _give_up(self, now: float) -> list[Sequence]:
        """End waits that take too long."""
        ready: list[Sequence] = []
        begun_s = self._begun_s
        if not self._is_listed and begun_s is not None and now - begun_s > MAX_LIST_S:
            self._is_listed = True
            ready, self._unlisted = self._unlisted, []
        for number, fetch in list(self._fetches.items()):
            if fetch.ordered_s is not None and now - fetch.ordered_s > MAX_READ_S:
                self.stats.num_late_fetches += 1
                self._end(number)
                self._known.discard(fetch.keys.digests[fetch.first : fetch.end])
                self._orders.append(TierOrder("cancel", number))
                ready += self._freed(fetch)
        return ready

    def _place(self, number: int, fetch: _Fetch, count: int) -> None:
        """Put what was read into the pool."""
        placed = place_blocks(self._blocks, fetch.keys, fetch.first, fetch.first + count)
        if not placed.blocks:
            self._orders.append(TierOrder("cancel", number))
            return
        self.stats.num_restored_blocks += len(placed.nodes)
        self._restored.update(node.digest for node in placed.nodes)
        self._unconfirmed[number] = placed.nodes
        first = placed.first - fetch.first
        self._orders.append(TierOrder("place", number, blocks=tuple(placed.blocks), first=first))


def _parent(keys: ChainKeys, place: int) -> bytes:
    return keys.digests[place - 1] if place else keys.root.digest


def stored_prefixes(prerequisites: Iterable[object]) -> StoredPrefixes | None:
    """Return those of a scheduler; None where nothing is stored."""
    return next((each for each in prerequisites if isinstance(each, StoredPrefixes)), None)


def origin_of(
    prerequisites: Iterable[object], manager: KVCacheManager, block: int
) -> tuple[str, bool, bool]:
    """Return where what a block has cached came from ("computed", "restored"; empty where it has
    nothing), whether a tier has it too, and whether it is evicted last."""
    node = manager.index.node_of(block)
    if node is None:
        return "", False, False
    tiers = stored_prefixes(prerequisites)
    is_restored = tiers is not None and tiers.is_restored(node.digest)
    is_stored = tiers is not None and tiers.is_stored(node.digest)
    return "restored" if is_restored else "computed", is_stored, manager.pool.is_kept(block)


def stored_stats(prerequisites: Iterable[object]) -> TierStats:
    """Return what is counted, all zero where nothing is stored."""
    found = stored_prefixes(prerequisites)
    return TierStats() if found is None else found.stats
