"""Which blocks are stored in tiers below the pool, by their digests in the prefix index.

Owns the sets, one for each tier, and tells watchers what changes. Knows no file and no memory: who
stores the blocks says what has become of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Literal, Protocol

from quire.core.tiers import StoreMedium

Medium = Literal["pool"] | StoreMedium


class ElsewhereWatcher(Protocol):
    """Hears of what is stored."""

    def stored_elsewhere(self, medium: StoreMedium, digests: tuple[bytes, ...]) -> None:
        """Blocks are in a tier that were not."""
        ...

    def removed_elsewhere(self, medium: StoreMedium, digests: tuple[bytes, ...]) -> None:
        """Blocks are in a tier no more."""
        ...


class StoredElsewhere:
    """Digests of what the tiers of one engine hold; empty where there is none."""

    def __init__(self) -> None:
        self._tiers: dict[StoreMedium, dict[bytes, None]] = {"host": {}, "disk": {}}
        self._num_stored = 0
        """Digests that any tier has: a disk has a million, and they are counted in every step."""
        self.watchers: list[ElsewhereWatcher] = []

    def __contains__(self, digest: bytes) -> bool:
        return any(digest in tier for tier in self._tiers.values())

    def __iter__(self) -> Iterator[bytes]:
        """Each digest once, whichever tiers have it."""
        yield from dict.fromkeys(digest for tier in self._tiers.values() for digest in tier)

    def __len__(self) -> int:
        return self._num_stored

    def by_tier(self) -> list[tuple[StoreMedium, Collection[bytes]]]:
        """Return the digests of each tier."""
        return list(self._tiers.items())

    def add(self, medium: StoreMedium, digests: Iterable[bytes]) -> None:
        """Note what a tier stores now."""
        tier = self._tiers[medium]
        new = tuple(dict.fromkeys(digest for digest in digests if digest not in tier))
        self._num_stored += sum(digest not in self for digest in new)
        tier.update(dict.fromkeys(new))
        if new:
            for watcher in self.watchers:
                watcher.stored_elsewhere(medium, new)

    def discard(self, digests: Iterable[bytes], medium: StoreMedium | None = None) -> None:
        """Note what a tier, or none, stores any more."""
        known = tuple(digests)
        for name, tier in self._tiers.items():
            if medium in (None, name):
                gone = tuple(dict.fromkeys(digest for digest in known if digest in tier))
                for digest in gone:
                    del tier[digest]
                self._num_stored -= sum(digest not in self for digest in gone)
                if gone:
                    for watcher in self.watchers:
                        watcher.removed_elsewhere(name, gone)

    def clear(self) -> None:
        """Note that nothing is known of the tiers."""
        for name, tier in self._tiers.items():
            self.discard(tuple(tier), name)
