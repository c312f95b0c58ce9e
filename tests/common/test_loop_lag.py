"""The probe sees a loop that is held up, and little else."""

from __future__ import annotations

import asyncio
import time

from quire.common.loop_lag import LoopLagProbe


def test_a_hold_up_is_seen_as_long_as_it_was() -> None:
    async def hold_up() -> list[float]:
        seen: list[float] = []
        probe = LoopLagProbe(seen.append, interval_s=0.01)
        probe.start()
        for count in (5, 10):
            while len(seen) < count:
                await asyncio.sleep(0.01)
            time.sleep(0.2)
        await asyncio.sleep(0.05)
        probe.stop()
        probe.stop()
        count = len(seen)
        await asyncio.sleep(0.05)
        assert len(seen) == count
        return seen

    seen = asyncio.run(hold_up())
    assert max(seen) >= 0.185 and min(seen) < 0.1
