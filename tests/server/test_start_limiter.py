"""One newcomer a round, in order of arrival, with everybody else's turn in between."""

from __future__ import annotations

import asyncio

from quire.server.http.start_limiter import StartLimiter


def test_a_burst_passes_in_order_one_a_round() -> None:
    async def burst() -> None:
        start_limiter = StartLimiter()
        passed: list[int] = []
        most_in_a_round, before, is_over = 0, 0, False

        async def newcomer(number: int) -> None:
            await start_limiter.enter()
            passed.append(number)

        def look() -> None:
            nonlocal most_in_a_round, before
            most_in_a_round, before = max(most_in_a_round, len(passed) - before), len(passed)
            if not is_over:
                asyncio.get_running_loop().call_soon(look)

        look()
        tasks = [asyncio.create_task(newcomer(number)) for number in range(50)]
        tasks[7].cancel()
        await asyncio.sleep(0)
        tasks[20].cancel()  # while it waits
        await asyncio.gather(*tasks, return_exceptions=True)
        is_over = True
        assert passed == [number for number in range(50) if number not in (7, 20)]
        assert most_in_a_round == 1
        await asyncio.sleep(0)
        await asyncio.wait_for(start_limiter.enter(), 1)

    asyncio.run(burst())


def test_alone_nobody_waits() -> None:
    async def alone() -> None:
        start_limiter = StartLimiter()
        for _ in range(3):
            entering = start_limiter.enter()
            try:
                entering.send(None)
            except StopIteration:
                pass
            else:
                raise AssertionError("it had to wait")
            await asyncio.sleep(0)

    asyncio.run(alone())
