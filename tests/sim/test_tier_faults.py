"""What goes wrong with stored prefixes, each at many random moments: two runs over one folder, and
every answer is the oracle's. What was stored by others, or for others, is never found.

`QUIRE_TIER_FAULTS` is how often each fault is tried.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from quire.core.plan import StepPlan
from quire.core.scheduler.scheduler import Scheduler
from quire.core.scheduler.tiers import TierStats
from quire.core.tiers import TIERS, StoredKey, TierOrder
from quire.engine.assembly.tiers import identity_digest
from quire.sim.scenario import Faults, Scenario, make_scenario
from quire.sim.simulation import Simulation
from quire.sim.tiers import SimulatedTiers
from quire.tiers.disk import DiskStore

COUNT = int(os.environ.get("QUIRE_TIER_FAULTS", "5"))
_MOMENTS = 40
"""Faults strike at one of so many first calls or steps."""


class _Watched(SimulatedTiers):
    """Which blocks a run restores that it has not stored itself."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.foreign: set[bytes] = set()
        self._own: set[bytes] = set()
        self._fetched: dict[int, tuple[StoredKey, ...]] = {}

    def begin(self, plan: StepPlan) -> None:
        for order in map(TierOrder._make, plan.orders.get(TIERS, ())):
            if order.verb == "keep":
                self._own |= {key.digest for key in order.keys}
            elif order.verb == "fetch":
                self._fetched[order.number] = order.keys
            elif order.verb == "place":
                keys = self._fetched[order.number][order.first :]
                placed = keys[: len(order.blocks)]
                self.foreign |= {key.digest for key in placed} - self._own
        super().begin(plan)


@dataclass
class Story:
    """One folder, and what becomes of those who use it."""

    seed: int
    folder: Path
    random: Random
    found: list[TierStats] = field(default_factory=list)
    num_struck: int = 0

    def scenario(self, number: int) -> Scenario:
        """The same documents are asked for in every run of a story."""
        chosen = make_scenario(self.seed, is_liveness=True, has_windows=self.seed % 3 == 0)
        limits = replace(chosen.limits, enable_prefix_caching=True)
        return replace(chosen, hash="keyed", faults=Faults(0), limits=limits)

    def tiers(self, folder: Path, identity: bytes = bytes(32)) -> _Watched:
        """Both halves over a folder, without faults of their own."""
        return _Watched(self.seed, folder, has_faults=False, identity=identity)

    def begin(
        self, number: int, *, tiers: SimulatedTiers | None = None, salt: str = ""
    ) -> Simulation:
        """A run of its own over the folder."""
        if tiers is None:
            tiers = self.tiers(self.folder)
        scenario = self.scenario(number)
        arrivals = tuple(
            each._replace(spec=replace(each.spec, namespace=(*each.spec.namespace, salt)))
            for each in scenario.arrivals
        )
        run = Simulation(replace(scenario, arrivals=arrivals), tiers=tiers)
        self.found.append(tiers.stats)
        return run

    def end(self, run: Simulation) -> None:
        """Go on to the end: every answer is the oracle's."""
        run.run()
        assert run.tiers is not None
        run.tiers.close()

    def steps(self, run: Simulation, count: int) -> None:
        """Go on for so many steps, or to the end."""
        while count and (run._arriving or run.scheduler.has_work):
            run._step()
            count -= 1

    def files(self) -> list[Path]:
        return sorted(self.folder.rglob("*.kv"))


def _damage(change: Callable[[Random, bytearray], None]) -> Callable[[Story], None]:
    """A file changes while a second run may read it."""

    def play(story: Story) -> None:
        story.end(story.begin(0))
        run = story.begin(1)
        story.steps(run, story.random.randrange(_MOMENTS))
        for path in story.files():
            data = bytearray(path.read_bytes())
            if data:
                change(story.random, data)
                path.write_bytes(data)
                story.num_struck += 1
        story.end(run)
        story.end(story.begin(2))

    return play


def _flip(random: Random, data: bytearray) -> None:
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def _cut(random: Random, data: bytearray) -> None:
    del data[random.randrange(len(data)) :]


def _killed(story: Story) -> None:
    """The first process is gone at some byte of a write: so much of its last file is there."""
    run = story.begin(0)
    story.steps(run, story.random.randrange(1, _MOMENTS))
    assert run.tiers is not None
    for path in story.files()[-1:]:
        size = path.stat().st_size
        os.truncate(path, story.random.randrange(size + 1))
        story.num_struck += 1
    for descriptor in _stores(run):
        descriptor.close()  # the kernel takes a dead process's lock back
    story.end(story.begin(1))


def _stores(run: Simulation) -> list[DiskStore]:
    assert run.tiers is not None
    store = run.tiers._half._store
    return [] if store is None else [store]


def _failing(number: int, name: str) -> Callable[[Story], None]:
    """The disk fails from some call on."""

    def play(story: Story) -> None:
        story.end(story.begin(0))
        left, real = story.random.randrange(8), getattr(DiskStore, name)

        def fail(store: DiskStore, *given: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                story.num_struck += 1
                raise OSError(number, os.strerror(number))
            return real(store, *given)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DiskStore, name, fail)
            # another folder where writing fails: one that has everything is not written to
            other = replace(story, folder=story.folder / "other")
            other.folder.mkdir()
            where = story if name == "read" else other
            where.end(where.begin(1))
            story.num_struck = max(story.num_struck, where.num_struck)
        story.end(story.begin(2))

    return play


def _second_process(story: Story) -> None:
    """Two at once, of which one writes; the other goes on when it ends."""
    first, second = story.begin(0), story.begin(1)
    for _ in range(story.random.randrange(1, _MOMENTS)):
        story.steps(story.random.choice((first, second)), 1)
    story.num_struck += 1
    for run in story.random.sample((first, second), 2):
        story.end(run)
    story.end(story.begin(2))


def _others(**facts: str) -> Callable[[Story], None]:
    """An engine of which some facts are others comes to the folder at some moment of the first
    one's run."""

    def play(story: Story) -> None:
        first, second = _identity(), _identity(**facts)
        run = story.begin(0, tiers=story.tiers(story.folder, first))
        story.steps(run, story.random.randrange(_MOMENTS))
        tiers = story.tiers(story.folder, second)
        story.end(story.begin(1, tiers=tiers))
        story.end(run)
        assert not tiers.foreign, "it found what others stored"
        story.end(story.begin(2, tiers=story.tiers(story.folder, second)))
        story.num_struck += 1

    return play


def _identity(*, weights: str = "a", kernels: str = "avx2") -> bytes:
    """Of an engine, by the function that names its folder."""
    return identity_digest([{"model": "m", "kernels": kernels}, [weights]])


def _salted(story: Story) -> None:
    """Another tenant asks for the same prompts."""
    run = story.begin(0, salt="one")
    story.steps(run, story.random.randrange(_MOMENTS))
    is_first_over = story.random.random() < 0.5
    if is_first_over:
        story.end(run)
    tiers = story.tiers(story.folder)
    story.end(story.begin(1, tiers=tiers, salt="two"))
    if not is_first_over:
        story.end(run)
    assert not tiers.foreign, "it found what others stored"
    story.end(story.begin(2, salt="two"))
    story.num_struck += 1


def _clock_jumps(story: Story) -> None:
    """The clock goes forward by an hour, or back, at some step."""
    story.end(story.begin(0))
    run = story.begin(1)
    moment, jump = story.random.randrange(_MOMENTS), story.random.choice((3600.0, -3600.0, 11.0))
    real = Scheduler.update

    def late(scheduler: Scheduler, plan: Any, result: Any, now: float) -> Any:
        return real(scheduler, plan, result, now + jump)

    story.steps(run, moment)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "update", late)
        story.num_struck += 1
        story.end(run)
    story.end(story.begin(2))


FAULTS: dict[str, Callable[[Story], None]] = {
    "killed while it writes": _killed,
    "a flipped bit": _damage(_flip),
    "a truncated file": _damage(_cut),
    "a full disk": _failing(errno.ENOSPC, "append"),
    "an I/O error": _failing(errno.EIO, "read"),
    "a second process": _second_process,
    "other weights under the same name": _others(weights="b"),
    "other kernels": _others(kernels="avx512"),
    "another tenant's salt": _salted,
    "a clock that jumps": _clock_jumps,
}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_happens_to_the_tiers_every_answer_is_the_oracles(
    fault: str, tmp_path: Path
) -> None:
    num_struck, seed, num_restored = 0, 0, 0
    while num_struck < COUNT:
        seed += 1
        assert seed < 40 * COUNT + 40, f"{fault}: struck {num_struck} times in {seed} runs"
        folder = tmp_path / str(seed)
        folder.mkdir()
        story = Story(seed, folder, Random(f"{fault}{seed}"))
        FAULTS[fault](story)
        num_struck += story.num_struck > 0
        num_restored += sum(each.num_restored_blocks for each in story.found)
    assert num_restored > 0, "the runs had nothing to find"
