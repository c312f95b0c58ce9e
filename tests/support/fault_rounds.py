"""Rounds of 32 streams in which a process is killed or stopped or a connection is cut, at a moment
and in a way that a number draws.

Every stream ends as it does undisturbed, or, where what it was on is gone, with an error that says
so; none hangs, nothing is lost or doubled, what has failed serves again, nothing is left behind, and
no port can be reached from other machines.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import faults
from deployments import CLIENT, Deployment, Link
from served import is_alive, until
from streams import Round, Streamed

IS_LONG = "QUIRE_TEST_KILLS" in os.environ
_FIRST = int(os.environ.get("QUIRE_TEST_FIRST_KILL", "0"))
NUMBERS = range(_FIRST, _FIRST + int(os.environ.get("QUIRE_TEST_KILLS", "2")))
"""Of the faults that are to be had."""
NUM_STREAMS = 32
DEADLINE_S = 120.0
"""Of a stream. The longest that a fault alone takes is some seconds, on a machine with nothing
else."""
OF_BACK_ENDS = frozenset({"backend_failed", "backend_timeout", "no_backend"})
BROKEN = frozenset({"connection broken", "connection connect", "connection closed"})
PROMPT = "Once upon a time there was a little fox who lived in a wood. "


def body(number: int, salt: str) -> dict[str, Any]:
    """Every second one greedy, the others drawn; prompts of several blocks."""
    kind = {"temperature": 0.0} if number % 2 else {"seed": number, "temperature": 1.0}
    return {
        "prompt": f"Story {number}. " + PROMPT * (1 + number % 5), "max_tokens": 24 + number % 17,
        "ignore_eos": True, "cache_salt": salt, "stream_options": {"include_usage": True}, **kind,
    }  # fmt: skip


async def play(deployment: Deployment, salt: str, *others: Any) -> list[Streamed]:
    """Have all streams, while others do what they do with the round."""
    round_ = Round(deployment.front.served.url)
    bodies = [body(number, salt) for number in range(NUM_STREAMS)]
    tasks = [asyncio.create_task(other(round_)) for other in others]
    try:
        streams = await round_.run(bodies, DEADLINE_S)
        await asyncio.gather(*tasks)
    finally:
        for each in tasks:
            each.cancel()
    return streams


@dataclass(slots=True)
class Fault:
    """One fault, drawn by its number, and what it may do to streams."""

    deployment: Deployment
    number: int
    num_events: int
    """Of an undisturbed round."""
    told: list[str] = field(default_factory=list)
    permitted: set[str] = field(default_factory=lambda: {"whole"})
    killed: list[int] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)
    """Processes that nothing lets go on: what has started them is to replace them."""
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.number}")

    async def strike(self, round_: Round) -> None:
        """Wait for the moment, and do it; every fourth time a second one strikes what replaces what
        was lost."""
        # what there is, is found before the moment: that takes a while, in which streams end
        moment = self.rng.randrange(1, self.num_events * 3 // 4)
        processes = self.deployment.processes()
        while round_.num_events == 0 and not round_.is_over:
            await asyncio.sleep(0.001)
        choices = [(how, name) for name in processes for how in ("kill", "stop")]
        choices += [("cut", name) for name in self.deployment.links()]
        # in turn, so that few faults meet as many kinds of them
        how, name = sorted(choices)[self._turn(len(choices))]
        while round_.num_events < moment and not round_.is_over:
            await asyncio.sleep(0.001)
        self.told.append(f"{how} {name}{' too late' if round_.is_over else ''}")
        if how == "cut":
            self._cut(name, self.deployment.links().get(name, []))
        else:
            await self._signal(how, name, processes[name])
        if self.rng.random() < 0.25:
            await asyncio.sleep(self.rng.uniform(0.0, 3.0))
            again = sorted(
                (name, pid) for name, pid in self.deployment.processes().items() if " " in name
            )
            if again:
                name, pid = self.rng.choice(again)
                self.told.append(f"then kill {name}")
                self._kill(pid)

    def _turn(self, count: int) -> int:
        return (self.number * 7 + self.number // count) % count

    def _cut(self, name: str, links: Sequence[Link]) -> None:
        ends = name.split(" - ")
        if CLIENT in ends:
            self.permitted |= BROKEN
        elif self.deployment.is_routed and "router" in ends:
            self.permitted |= OF_BACK_ENDS
        try:
            faults.cut(*self.rng.choice(links))
        except (OSError, IndexError):
            self.told.append("which was gone")

    def _kill(self, pid: int) -> None:
        self.killed.append(pid)
        self._send(pid, signal.SIGKILL)

    def _send(self, pid: int, number: signal.Signals) -> None:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            self.told.append("which was gone")

    async def _signal(self, how: str, name: str, pid: int) -> None:
        is_front, is_node = name == self.deployment.front.name, name in self.deployment.nodes
        is_lasting = is_node or self.deployment.is_lasting(name)
        if is_node and not is_front:
            self.permitted |= OF_BACK_ENDS
        if is_front and how == "kill":
            self.permitted |= BROKEN
        if how == "kill":
            self._kill(pid)
            return
        self.stopped += [] if is_lasting else [pid]
        self._send(pid, signal.SIGSTOP)
        if is_lasting:  # what nothing replaces goes on by itself, soon or late
            await asyncio.sleep(self.rng.choice((0.5, 3.0, 8.0)))
            faults.go_on([pid])

    def judge(self, streams: Sequence[Streamed], expected: Sequence[Streamed]) -> Counter[str]:
        """Compare with the undisturbed ones; what became of how many."""
        outcomes = Counter[str]()
        for number, (found, whole) in enumerate(zip(streams, expected, strict=True)):
            outcomes[found.outcome] += 1
            assert found.outcome in self.permitted, (number, found)
            if found.is_done:
                assert found.answer == whole.answer, number
            else:
                assert whole.text.startswith(found.text), (number, found.text, whole.text)
            if found.error is not None:
                assert found.error["message"] and found.error["type"], (number, found)
        if self.permitted & BROKEN and self.told[0].startswith("cut"):
            assert outcomes["whole"] >= NUM_STREAMS - 1, "one connection was cut"
        return outcomes


def strike_once(
    deployment: Deployment, number: int, calm: Sequence[Streamed]
) -> tuple[list[str], Counter[str]]:
    """One round with one fault, and what follows it."""
    fault = Fault(deployment, number, sum(each.num_events for each in calm))
    before = set(deployment.processes().values())
    streams = asyncio.run(play(deployment, f"{number}", fault.strike))
    outcomes = fault.judge(streams, calm)
    assert not deployment.exposed()
    until(lambda: faults.have_ended(fault.killed))  # else it may pass for running
    deployment.await_whole()
    left = before - set(deployment.processes().values())
    until(lambda: faults.have_ended(left))
    struck = (*fault.killed, *fault.stopped)
    lasting = [each for each in struck if is_alive(each) and each not in before]
    assert not lasting, "what was killed lives"
    assert not deployment.exposed()
    return fault.told, outcomes


def endure(deployment: Deployment, numbers: Iterable[int], tell: Callable[[str], None]) -> None:
    """Have these faults one after the other, and tell what each came to."""
    seen = Counter[str]()
    calm = asyncio.run(play(deployment, "calm"))
    assert [each.outcome for each in calm] == ["whole"] * NUM_STREAMS
    assert not deployment.exposed()
    for number in numbers:
        try:
            told, outcomes = strike_once(deployment, number, calm)
        except BaseException as error:
            error.add_note(f"fault {number}\n{deployment.text()}")
            raise
        seen.update(outcomes)
        tell(f"fault {number}: {', '.join(told)}: {dict(outcomes)}")
    # and what comes afterwards is answered as before
    again = asyncio.run(play(deployment, "calm again"))
    assert [each.answer for each in again] == [each.answer for each in calm]
    assert seen["whole"] > 0.5 * sum(seen.values())
