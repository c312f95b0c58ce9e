"""What tiers below the pool hold: counted as sets are, and told of as it changes."""

from __future__ import annotations

import random

from quire.core.kvcache.elsewhere import StoredElsewhere
from quire.core.tiers import StoreMedium


class Told:
    """Implements `ElsewhereWatcher`."""

    def __init__(self) -> None:
        self.tiers: dict[str, set[bytes]] = {"host": set(), "disk": set()}

    def stored_elsewhere(self, medium: StoreMedium, digests: tuple[bytes, ...]) -> None:
        assert self.tiers[medium].isdisjoint(digests) and len(set(digests)) == len(digests)
        self.tiers[medium] |= set(digests)

    def removed_elsewhere(self, medium: StoreMedium, digests: tuple[bytes, ...]) -> None:
        assert self.tiers[medium].issuperset(digests) and len(set(digests)) == len(digests)
        self.tiers[medium] -= set(digests)


def test_what_is_stored_is_counted_once_whichever_tiers_have_it() -> None:
    drawn, stored, told = random.Random(0), StoredElsewhere(), Told()
    stored.watchers.append(told)
    media: list[StoreMedium] = ["host", "disk"]
    expected: dict[StoreMedium, set[bytes]] = {"host": set(), "disk": set()}
    for _ in range(2000):
        digests = [bytes([drawn.randrange(12)]) for _ in range(drawn.randrange(5))]
        medium = drawn.choice(media)
        match drawn.randrange(4):
            case 0 | 1:
                stored.add(medium, digests)
                expected[medium] |= set(digests)
            case 2:
                stored.discard(digests, medium)
                expected[medium] -= set(digests)
            case _:
                stored.discard(iter(digests))
                expected = {name: each - set(digests) for name, each in expected.items()}
        assert len(stored) == len(expected["host"] | expected["disk"])
        assert sorted(stored) == sorted(expected["host"] | expected["disk"])
        assert told.tiers == expected
    stored.clear()
    assert len(stored) == 0 and not list(stored)
