"""Transferred prefixes as a prerequisite: a sequence whose prompt another engine has computed runs
once the keys and values are here; and what is computed for others is handed over when it is done.

Owns what the control plane knows of transfers: who waits for which, until when, and what has been
put into the pool by plans that may still be lost. What arrives is placed as if a sequence had
computed it (`place_blocks`). What is late, lost, damaged or another's is computed, or ends the
request where `kv_load_failure_policy` says so.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from quire.core.kvcache.prefix import ChainKeys, PrefixNode
from quire.core.plan import Record
from quire.core.request import Sequence
from quire.core.scheduler.placing import forget, place_blocks
from quire.core.scheduler.prerequisites import Settled
from quire.core.scheduler.resources import KVBlocks
from quire.core.transfers import (
    TRANSFERS,
    RemotePrefix,
    TransferNews,
    TransferOrder,
    content_digest,
)

logger = logging.getLogger(__name__)

NOT_PULLED = "waits for its prompt's KV from another engine"
GRACE_S = 2.0
"""Beyond the time for a transfer, in which the companion itself says that it has come to nothing.
Without a word from it the wait ends."""
_MAX_TRIED = 4096
Key = TypeVar("Key")


@dataclass(slots=True)
class TransferStats:
    """Counts since the engine was started; they outlive a control plane."""

    num_staged: int = 0
    """Prompts kept for other engines."""
    num_staged_bytes: int = 0
    """Kept now."""
    num_pulled: int = 0
    """Prompts whose keys and values came from another engine."""
    num_pulled_bytes: int = 0
    num_failed: int = 0
    """Transfers that came to nothing; these prompts were computed."""
    num_late: int = 0
    """Of these, given up because they took too long."""
    num_orders: int = 0
    """Pulls that were ordered: no number is used twice, as the companion knows earlier ones."""


@dataclass(slots=True)
class _Pull:
    """Places that a sequence waits for."""

    sequence: Sequence
    remote: RemotePrefix
    keys: ChainKeys
    first: int
    end: int
    ordered_s: float | None = None
    """None until a plan carries the order."""


class TransferredPrefixes:
    """Implements `Prerequisite`, `Retained` and `BlockUser`."""

    name = TRANSFERS

    def __init__(self, stats: TransferStats, timeout_s: float, *, fails: bool = False) -> None:
        """`fails`: a transfer that comes to nothing ends its request."""
        self.stats = stats
        self._timeout_s, self._fails = timeout_s, fails
        self._blocks: KVBlocks
        self._orders = [TransferOrder("forget")] if stats.num_orders else []
        self._pulls: dict[int, _Pull] = {}
        self._tried: OrderedDict[tuple[int, int], None] = OrderedDict()
        """Sequences whose transfer is over, however it ended: there is no second one."""
        self._staged: OrderedDict[str, None] = OrderedDict()
        """Leases that were handed over."""
        self._unconfirmed: dict[int, list[PrefixNode]] = {}
        """By the pull: nodes whose blocks are written by a plan that may still be lost."""

    @property
    def has_orders(self) -> bool:
        return bool(self._orders)

    def attach(self, blocks: KVBlocks) -> None:
        self._blocks = blocks

    # -- what others take
    # ----------------------------------------------------------------------------------------------

    def retain(self, sequence: Sequence) -> None:
        """Do nothing: blocks are found by their digests."""

    def release(self, sequence: Sequence) -> None:
        """Hand a prompt over once all of its full blocks are in the index."""
        request, keys = sequence.request, sequence.keys
        transfer = request.transfer
        if transfer is None or not transfer.gives or transfer.gives in self._staged or keys is None:
            return
        num_tokens = len(request.prompt_token_ids)
        ids = sequence.content_ids[:num_tokens]
        nodes = self._blocks.manager.match(keys, ids, num_tokens).nodes
        if len(nodes) < num_tokens // keys.block_size:
            return  # it was preempted, aborted or in doubt
        _remember(self._staged, transfer.gives)
        self.stats.num_staged += 1
        order = TransferOrder(
            "stage",
            lease=transfer.gives,
            content=content_digest(keys.root.namespace, ids),
            blocks=tuple(tuple(node.blocks) for node in nodes),
        )
        self._orders.append(order)

    # -- who waits
    # ----------------------------------------------------------------------------------------------

    def refusal(self, sequence: Sequence) -> str | None:
        transfer = sequence.request.transfer
        if transfer is None or transfer.takes is None or _place_of(sequence) in self._tried:
            return None
        first, end = self._wish(sequence)
        return NOT_PULLED if first < end else None

    def park(self, sequence: Sequence) -> None:
        transfer, keys = sequence.request.transfer, sequence.keys
        assert transfer is not None and transfer.takes is not None and keys is not None
        self._order(_Pull(sequence, transfer.takes, keys, *self._wish(sequence)))

    def unpark(self, sequence: Sequence) -> None:
        for number, pull in list(self._pulls.items()):
            if pull.sequence is sequence:
                self._cancel(number)

    def parked(self) -> list[Sequence]:
        return [pull.sequence for pull in self._pulls.values()]

    def _wish(self, sequence: Sequence) -> tuple[int, int]:
        """The places behind those in the pool, up to the token that must be computed."""
        keys, request = sequence.keys, sequence.request
        is_usable = request.reads_cache and request.scoring is None and not request.resumed
        if keys is None or not is_usable:
            return 0, 0
        end = (len(request.prompt_token_ids) - 1) // keys.block_size
        keys.extend_to(sequence.content_ids)
        return self._blocks.num_matched_blocks(sequence), min(end, len(keys.digests))

    def _order(self, pull: _Pull) -> None:
        self.stats.num_orders += 1
        number = self.stats.num_orders
        self._pulls[number] = pull
        sequence = pull.sequence
        ids = sequence.content_ids[: len(sequence.request.prompt_token_ids)]
        order = TransferOrder(
            "pull",
            number,
            content=content_digest(pull.keys.root.namespace, ids),
            remote=pull.remote,
            first=pull.first,
            end=pull.end,
        )
        self._orders.append(order)

    def _cancel(self, number: int) -> _Pull | None:
        pull = self._pulls.pop(number, None)
        self._orders.append(TransferOrder("cancel", number))
        return pull

    # -- orders and news
    # ----------------------------------------------------------------------------------------------

    def take_orders(self, now: float) -> tuple[Record, ...]:
        for order in self._orders:
            if order.verb == "pull" and order.number in self._pulls:
                self._pulls[order.number].ordered_s = now
        orders, self._orders = tuple(self._orders), []
        return orders

    def take_news(self, news: tuple[Record, ...], now: float) -> list[Settled]:
        settled: list[Settled] = []
        for each in map(TransferNews._make, news):
            if each.verb == "staged":
                self.stats.num_staged_bytes = each.num_bytes
            elif each.verb == "placed":
                self._unconfirmed.pop(each.number, None)
            elif each.verb == "failed":
                settled += self._failed(self._pulls.pop(each.number, None), each.reason)
            else:
                settled += self._pulled(each)
        for number, pull in list(self._pulls.items()):
            since_s = pull.ordered_s
            if since_s is not None and now - since_s > self._timeout_s + GRACE_S:
                self.stats.num_late += 1
                settled += self._failed(self._cancel(number), "it took too long")
        return settled

    def lose_flights(self) -> None:
        forget(self._blocks.manager.index, list(chain(*self._unconfirmed.values())))
        self._unconfirmed.clear()
        # what an order that was not carried out was to place or cancel is let go of, too
        self._orders = [TransferOrder("forget")]
        lost, self._pulls = list(self._pulls.values()), {}
        for pull in lost:
            self._order(_Pull(pull.sequence, pull.remote, pull.keys, pull.first, pull.end))

    def _pulled(self, news: TransferNews) -> list[Settled]:
        pull = self._pulls.pop(news.number, None)
        if pull is None:  # given up
            self._orders.append(TransferOrder("cancel", news.number))
            return []
        self.stats.num_pulled += 1
        self.stats.num_pulled_bytes += news.num_bytes
        end = min(news.end, pull.end)
        placed = place_blocks(self._blocks, pull.keys, pull.first, end, news.starts)
        if placed.blocks:
            self._unconfirmed[news.number] = placed.nodes
            first, blocks = placed.first, tuple(placed.blocks)
            self._orders.append(TransferOrder("place", news.number, blocks=blocks, first=first))
        else:
            self._orders.append(TransferOrder("cancel", news.number))
        _remember(self._tried, _place_of(pull.sequence))
        return [Settled([pull.sequence])]

    def _failed(self, pull: _Pull | None, reason: str) -> list[Settled]:
        if pull is None:
            return []
        self.stats.num_failed += 1
        _remember(self._tried, _place_of(pull.sequence))
        error = None
        if self._fails:
            error = f"its prompt's KV did not come from {pull.remote.engine}: {reason}"
        return [Settled([pull.sequence], error)]


def _place_of(sequence: Sequence) -> tuple[int, int]:
    """Return what tells a sequence from all others of a scheduler; ids may be used again."""
    return sequence.request.arrival, sequence.index


def _remember(known: OrderedDict[Key, None], key: Key) -> None:
    known[key] = None
    if len(known) > _MAX_TRIED:
        known.popitem(last=False)


def transfer_stats(prerequisites: Iterable[object]) -> TransferStats:
    """Return what is counted, all zero where nothing is transferred."""
    found = (each.stats for each in prerequisites if isinstance(each, TransferredPrefixes))
    return next(found, TransferStats())
