"""Turns are shared fairly, bounded, and never lost, whoever gives up when."""

from __future__ import annotations

import asyncio

from quire.server.quota.tenants import Tenant
from quire.server.quota.turns import Lease, Turns

A, B = Tenant("a"), Tenant("b", weight=2.0)


def test_who_holds_least_for_its_weight_is_next() -> None:
    async def main() -> None:
        turns = Turns(3)
        order: list[str] = []

        async def enter(tenant: Tenant) -> Lease:
            turn = await turns.enter(tenant, 60)
            assert turn is not None
            order.append(tenant.name)
            return turn

        first = [await enter(A) for _ in range(3)]
        waiting = [asyncio.create_task(enter(tenant)) for tenant in (A, A, A, B, B, B)]
        await asyncio.sleep(0)
        for number in range(6):
            (first[number] if number < 3 else await waiting[[3, 4, 0][number - 3]]).release()
            await asyncio.sleep(0.01)
        assert order[3] == order[4] == "b", "who had nothing comes first, and twice as often"
        for task in waiting:
            (await task).release()
        assert turns.held.num_entries == 0

    asyncio.run(main())


def test_what_is_on_its_way_is_bounded_in_bytes() -> None:
    async def main() -> None:
        turns = Turns(100, max_bytes=100, assumed_bytes=60)
        first = await turns.enter(A, 60)
        assert first is not None and await turns.enter(A, 0.01) is None
        first.weigh(30)
        second = await turns.enter(A, 60)
        assert second is not None and await turns.enter(A, 0.01) is None
        second.weigh(1000)  # more than there is for all: it goes alone
        first.release()
        assert await turns.enter(A, 0.01) is None
        second.release()
        assert await turns.enter(A, 60) is not None

    asyncio.run(main())


def test_nothing_is_lost_with_who_gives_up() -> None:
    async def main() -> None:
        turns = Turns(1)
        held = await turns.enter(A, 60)
        assert held is not None
        waiting = [asyncio.create_task(turns.enter(A, 60)) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
        held.release()
        held.release()
        waiting[1].cancel()  # after it was given its turn, before it could know
        turn = await asyncio.wait_for(waiting[2], 30)
        assert turn is not None and turns.held.num_entries == 1
        assert await turns.enter(B, 0.0) is None
        turn.release()
        assert turns.held.num_entries == 0 and turns.num_unadmitted() == 0

    asyncio.run(main())


def test_who_rests_and_who_has_no_room_holds_nobody_up() -> None:
    async def main() -> None:
        has_room = False
        turns = Turns(9, has_room=lambda tenant: has_room or tenant is B)
        turns.rest(B, 0.05)
        waiting = asyncio.create_task(turns.enter(A, 60))
        assert await turns.enter(B, 60) is not None, "after its rest"
        assert not waiting.done()
        has_room = True
        assert await asyncio.wait_for(waiting, 30) is not None, "nobody announced the room"

    asyncio.run(main())
