"""Turns at something that there is only so much of, shared fairly among tenants: who holds least
for its weight is next.

Owns the order of those who wait, and who holds how many turns; what room there is, is asked. For
one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from quire.server.http.call import Call
from quire.server.quota.ledger import Ledger
from quire.server.quota.tenants import Tenant

_POLL_S = 0.05
"""How often a waiting line looks for room that was not announced."""


class Lease:
    """One tenant's hold, to be given back. A context manager."""

    __slots__ = ("_turns", "call", "tenant")

    def __init__(self, turns: Turns, tenant: Tenant) -> None:
        self._turns = turns
        self.tenant = tenant
        self.call: Call | None = None
        """The request that it is used for, once that is known."""

    def weigh(self, num_bytes: int) -> None:
        """Say what the turn takes, in place of what was assumed."""
        self._turns.weigh(self, num_bytes)

    def release(self) -> None:
        """Give it back. Idempotent."""
        self._turns.release(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


_Waiting = asyncio.Future["Lease | None"]


class Turns:
    """At most `max_turns` of them, of at most `max_bytes` together;
    `has_room` may say no to a tenant, or to all."""

    def __init__(
        self,
        max_turns: int,
        *,
        max_bytes: int = 1 << 62,
        assumed_bytes: int = 0,
        has_room: Callable[[Tenant], bool] = lambda tenant: True,
    ) -> None:
        self._max_turns = max_turns
        self._max_bytes = max_bytes
        self._assumed_bytes = assumed_bytes
        self._has_room = has_room
        self.held: Ledger[str, Lease] = Ledger()
        """By tenant."""
        self._waiting: dict[Tenant, deque[_Waiting]] = {}
        """Those tenants come first whose last turn is longest ago."""
        self._rests: dict[str, float] = {}
        self._next_look: asyncio.TimerHandle | None = None

    async def enter(self, tenant: Tenant, timeout_s: float) -> Lease | None:
        """Wait for a turn; None where there was none in time."""
        loop = asyncio.get_running_loop()
        waiting: _Waiting = loop.create_future()
        self._waiting.setdefault(tenant, deque()).append(waiting)
        self._look()
        alarm = loop.call_later(timeout_s, _give_up, waiting)
        try:
            return await waiting
        except asyncio.CancelledError:
            if (
                waiting.done()
                and not waiting.cancelled()
                and (turn := waiting.result()) is not None
            ):
                turn.release()
            raise
        finally:
            alarm.cancel()

    def num_unadmitted(self, tenant: str | None = None) -> int:
        """Turns, of a tenant or of all, whose request is not yet among those in flight."""
        owners = list(self.held.owners()) if tenant is None else [tenant]
        turns = (turn for owner in owners for turn in self.held.names(owner))
        return sum(turn.call is None or not turn.call.is_admitted for turn in turns)

    def rest(self, tenant: Tenant, seconds: float) -> None:
        """Give a tenant no turn for a while."""
        until_s = asyncio.get_running_loop().time() + seconds
        self._rests[tenant.name] = max(until_s, self._rests.get(tenant.name, 0.0))

    def weigh(self, turn: Lease, num_bytes: int) -> None:
        """See `Lease`."""
        if self.held.size(turn.tenant.name, turn) is not None:
            self.held.put(turn.tenant.name, turn, num_bytes)

    def release(self, turn: Lease) -> None:
        """See `Lease`."""
        self.held.drop(turn.tenant.name, turn)
        self._look()

    def _look(self) -> None:
        """Give out what there is room for, and look again soon where a line has to wait on."""
        while self._is_open() and (tenant := self._next()) is not None:
            turn = Lease(self, tenant)
            self.held.put(tenant.name, turn, self._assumed_bytes)
            line = self._waiting.pop(tenant)
            line.popleft().set_result(turn)
            self._waiting[tenant] = line  # behind the others
        if self._waiting and self._next_look is None:
            self._next_look = asyncio.get_running_loop().call_later(_POLL_S, self._look_again)

    def _look_again(self) -> None:
        self._next_look = None
        self._look()

    def _is_open(self) -> bool:
        has_bytes = (
            not self.held.num_entries
            or self.held.num_bytes + self._assumed_bytes <= self._max_bytes
        )
        return has_bytes and self.held.num_entries < self._max_turns

    def _next(self) -> Tenant | None:
        """Return whose turn it is, of those who wait and may have one."""
        now_s = asyncio.get_running_loop().time()
        self._rests = {name: until_s for name, until_s in self._rests.items() if until_s > now_s}
        for tenant, line in list(self._waiting.items()):
            while line and line[0].done():  # gave up
                line.popleft()
            if not line:
                del self._waiting[tenant]
        able = (
            tenant
            for tenant in self._waiting
            if tenant.name not in self._rests and self._has_room(tenant)
        )
        return min(
            able, key=lambda tenant: self.held.entries_of(tenant.name) / tenant.weight, default=None
        )


def _give_up(waiting: _Waiting) -> None:
    if not waiting.done():
        waiting.set_result(None)
