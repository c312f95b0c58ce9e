"""The worker's half of transfers: copies blocks out of the pool for consumers and into it from
producers between two steps, and does all else beside the steps.

The pool's memory is touched only in `begin`, by the thread that computes the steps, as that of the
tiers is. Copies are laid out, kept and served on other threads; so is what is fetched. A transfer
that comes to nothing is reported with its reason, once in the log for each producer until one
succeeds again, and a producer that was silent is not waited for again for a while.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import numpy as np

from quire.common.failures import log_failure
from quire.config.transfer import KVTransferConfig
from quire.core.plan import Record, StepPlan
from quire.core.transfers import TRANSFERS, RemotePrefix, TransferNews, TransferOrder
from quire.errors import QuireError
from quire.transfer.connectors import (
    MAX_WAIT_S,
    Connector,
    Producer,
    Pulled,
    PullWish,
    make_connector,
    pull,
)
from quire.transfer.layout import MIN_CHUNK_BYTES, BlockLayout, Payload, decode, encode
from quire.transfer.leases import LeaseBook, StagedPrompt, checksum
from quire.transfer.wire import EndFacts, PullRequest, WireError

logger = logging.getLogger(__name__)

_NUM_PULLERS = 4
_SILENT_S = 5.0
"""A producer that has let a deadline pass is not asked again for so long."""
_MAX_PRODUCERS = 256
"""Of which is known how they last fared."""


class TransferMemory(Protocol):
    """The pool's blocks as bytes."""

    def read_blocks(self, blocks: Sequence[int]) -> Payload:
        """Return a copy of some blocks, one behind the other."""
        ...

    def write_blocks(self, blocks: Sequence[int], payload: Payload) -> None:
        """Write bytes that `read_blocks` returned into as many blocks."""
        ...


class _Arrived(NamedTuple):
    """What was pulled, as blocks of this engine."""

    groups: list[Payload]
    starts: list[int]
    """Of each group: the place of the first of its blocks."""
    end: int
    """The place behind the last one."""

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in self.groups)


class TransferredBlocks:
    """Implements `Companion`."""

    name = TRANSFERS

    def __init__(
        self,
        config: KVTransferConfig,
        memory: TransferMemory,
        layout: BlockLayout,
        identity: Callable[[], bytes],
    ) -> None:
        """`identity` is called beside the steps, and may take its time; it covers all that decides
        the bits of keys and values besides the prompt, and raises a QuireError or OSError. Raises
        ConfigError where a producer cannot listen."""
        self._config, self._memory, self._layout = config, memory, layout
        self._secret = config.read_secret()
        self._connector: Connector = make_connector(config)
        extra = config.kv_connector_extra_config
        self._timeout_s = extra.pull_timeout_s
        self._leases = LeaseBook(int(config.kv_buffer_size), extra.lease_s)
        self._change = threading.Condition()
        """Guards all that follows."""
        self._pulling: set[int] = set()
        """Pulls that have not been cancelled, and whose outcome has not been told."""
        self._arrived: dict[int, _Arrived] = {}
        self._max_bytes, self._bytes_under_way = int(extra.pull_buffer_size), 0
        self._news: list[TransferNews] = []
        self._silent_until: dict[str, float] = {}
        self._failing: set[str] = set()
        self._told_bytes = 0
        self._stager = ThreadPoolExecutor(1, "kv-stage")
        self._pullers = ThreadPoolExecutor(_NUM_PULLERS, "kv-pull")
        self._settings: Future[EndFacts] = self._pullers.submit(self._identify, identity)
        self._producer = (
            None
            if not config.gives
            else Producer(self._connector, self._ready_settings, config.name, self._leases)
        )

    def _identify(self, identity: Callable[[], bytes]) -> EndFacts:
        try:
            return EndFacts(identity(), self._secret)
        except Exception as error:
            logger.error("keys and values are not transferred: %s", error)
            raise

    # -- in the thread of the steps
    # ----------------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        for order in map(TransferOrder._make, plan.orders.get(TRANSFERS, ())):
            match order.verb:
                case "stage":
                    self._stage(order)
                case "pull":
                    with self._change:
                        self._pulling.add(order.number)
                    self._pullers.submit(self._pull, order, time.monotonic())
                case "place":
                    self._place(order)
                case "cancel":
                    with self._change:
                        self._pulling.discard(order.number)
                        self._arrived.pop(order.number, None)
                case "forget":
                    with self._change:
                        self._pulling.clear()
                        self._arrived.clear()
                        self._news.clear()

    def take_news(self, wait_s: float) -> tuple[Record, ...]:
        with self._change:
            if not self._news and self._pulling:
                self._change.wait(wait_s)
            news, self._news = self._news, []
        kept = self._leases.num_bytes
        if kept != self._told_bytes:
            self._told_bytes = kept
            news.append(TransferNews("staged", num_bytes=kept))
        return tuple(news)

    def close(self) -> None:
        if self._producer is not None:
            self._producer.close()
        for pool in (self._stager, self._pullers):
            pool.shutdown(wait=False, cancel_futures=True)
        self._leases.clear()

    def _stage(self, order: TransferOrder) -> None:
        """Copy a prompt's blocks, those that there are behind the last one that is missing."""
        num_groups = self._layout.num_groups
        starts = [_first_whole(order.blocks, group) for group in range(num_groups)]
        num_blocks = sum(len(order.blocks) - start for start in starts)
        num_bytes = num_blocks * self._layout.block_bytes
        if not self._leases.reserve(order.lease, order.content, num_bytes):
            logger.warning("a prompt is not kept for its consumer: kv_buffer_size is used up")
            return
        groups = []
        for group, start in enumerate(starts):
            blocks = [place[group] for place in order.blocks[start:]]
            found = self._memory.read_blocks(blocks)  # none of a prompt that fills no block
            groups.append(found.reshape(len(blocks), self._layout.block_bytes))
        self._stager.submit(self._keep, order, groups, starts)

    def _place(self, order: TransferOrder) -> None:
        with self._change:
            arrived = self._arrived.pop(order.number)
        blocks: list[int] = []
        payloads: list[Payload] = []
        for place, of_groups in enumerate(order.blocks, order.first):
            for group, block in enumerate(of_groups):
                if block >= 0:
                    blocks.append(block)
                    payloads.append(arrived.groups[group][place - arrived.starts[group]])
        if blocks:
            self._memory.write_blocks(blocks, np.concatenate(payloads))
        self._tell(TransferNews("placed", order.number))

    # -- beside the steps
    # ----------------------------------------------------------------------------------------------

    def _tell(self, news: TransferNews) -> None:
        with self._change:
            self._news.append(news)
            self._change.notify_all()

    def _keep(self, order: TransferOrder, groups: list[Payload], starts: list[int]) -> None:
        """Lay a copy out, and let consumers have it."""
        try:
            size = self._layout.block_size
            num_tokens = len(order.blocks) * size
            at = [start * size for start in starts]
            encoded = encode(self._layout, groups, at, num_tokens)
            shelf = self._connector.shelf()
            try:
                chunks = shelf.put(encoded)
            except BaseException:
                shelf.close()
                raise
            lease = StagedPrompt(
                order.content,
                0.0,
                num_tokens,
                tuple(at[group] for group in self._layout.group_of),
                chunks,
                [checksum(chunk.data.data) for chunk in chunks],
                shelf,
            )
            self._leases.fill(order.lease, lease)
        except Exception as error:  # the lease ends unfilled: its consumer computes
            log_failure(logger, "a prompt could not be kept for its consumer", error)

    def _pull(self, order: TransferOrder, started_s: float) -> None:
        remote = order.remote
        assert remote is not None
        with self._change:
            if order.number not in self._pulling:
                return  # given up while it waited for a thread
        try:
            arrived = self._fetch(order, remote, started_s + self._timeout_s)
        except Exception as error:
            self._fail(order, remote, error)
            return
        seconds = time.monotonic() - started_s
        news = TransferNews(
            "pulled", order.number, arrived.end, tuple(arrived.starts), arrived.num_bytes, seconds
        )
        with self._change:
            self._failing.discard(_key(remote))
            if order.number in self._pulling:
                self._pulling.discard(order.number)
                self._arrived[order.number] = arrived
                self._news.append(news)
            self._change.notify_all()

    def _fetch(self, order: TransferOrder, remote: RemotePrefix, deadline_s: float) -> _Arrived:
        """Fetch what is ordered. Raises OSError, WireError or ValueError."""
        layout, size = self._layout, self._layout.block_size
        first, end = order.first * size, order.end * size
        with self._change:
            silent_s = self._silent_until.get(_key(remote), 0.0) - time.monotonic()
        if silent_s > 0:
            raise WireError("it was silent a moment ago")
        most = (end - first) * layout.bytes_per_token
        ask = PullRequest(remote.lease, order.content, first, end, MAX_WAIT_S)
        with self._room_for(most):
            settings = self._ready_settings(deadline_s - time.monotonic())
            most += 4 * max(MIN_CHUNK_BYTES, 32 * layout.bytes_per_token)
            pulled = pull(self._connector, settings, PullWish(remote, ask, most, deadline_s))
            return self._arranged(order, pulled, first, end)

    @contextlib.contextmanager
    def _room_for(self, num_bytes: int) -> Iterator[None]:
        """Count bytes as under way. Raises WireError where they are too many."""
        with self._change:
            held = sum(each.num_bytes for each in self._arrived.values()) + self._bytes_under_way
            if held + num_bytes > self._max_bytes:
                raise WireError(
                    f"{num_bytes} bytes beside the {held} that are under way are more than "
                    f"pull_buffer_size={self._max_bytes}"
                )
            self._bytes_under_way += num_bytes
        try:
            yield
        finally:
            with self._change:
                self._bytes_under_way -= num_bytes

    def _arranged(self, order: TransferOrder, pulled: Pulled, first: int, end: int) -> _Arrived:
        """Return what was pulled, of tokens [first, end), as blocks. Raises WireError."""
        layout, size = self._layout, self._layout.block_size
        if len(pulled.starts) != len(layout.group_of):
            raise WireError(f"{len(pulled.starts)} layers, where there are {len(layout.group_of)}")
        end = max(first, min(end, pulled.num_tokens // size * size))
        if end == first:
            return _Arrived([], [order.first] * layout.num_groups, order.first)
        groups, starts = decode(layout, pulled.chunks, pulled.starts, (first, end))
        return _Arrived(groups, [start // size for start in starts], end // size)

    def _ready_settings(self, wait_s: float) -> EndFacts:
        """Return what the other end must agree with. Raises WireError where it is not known."""
        try:
            return self._settings.result(max(0.0, wait_s))
        except TimeoutError:
            raise WireError("this engine's weights are not identified yet") from None
        except (OSError, QuireError) as error:
            raise WireError(f"this engine's weights could not be identified: {error}") from error

    def _fail(self, order: TransferOrder, remote: RemotePrefix, error: Exception) -> None:
        """Report that nothing came, and say so in the log if the last time was no failure."""
        key, reason = _key(remote), str(error) or type(error).__name__
        if isinstance(error, TimeoutError):
            reason = "it took too long"
        with self._change:
            is_new = key not in self._failing
            if is_new and len(self._failing) >= _MAX_PRODUCERS:
                self._failing.clear()
            self._failing.add(key)
            if isinstance(error, TimeoutError):
                if len(self._silent_until) >= _MAX_PRODUCERS:
                    self._silent_until.clear()
                self._silent_until[key] = time.monotonic() + _SILENT_S
        if is_new:
            self._log_failure(key, reason, error)
        with self._change:
            if order.number in self._pulling:
                self._pulling.discard(order.number)
                self._news.append(TransferNews("failed", order.number, reason=reason))
            self._change.notify_all()

    def _log_failure(self, key: str, reason: str, error: Exception) -> None:
        what = f"a prompt's KV did not come from {key[:200]!r}, and is computed"
        if isinstance(error, OSError | WireError):
            logger.warning("%s: %s (said once until one comes)", what, reason)
        else:
            log_failure(logger, what, error)


def _key(remote: RemotePrefix) -> str:
    return f"{remote.host}:{remote.port}"


def _first_whole(places: Sequence[tuple[int, ...]], group: int) -> int:
    """Return the place from which on a group has all its blocks."""
    for place in range(len(places), 0, -1):
        if places[place - 1][group] < 0:
            return place
    return 0
