"""Who holds how many bytes: the account of everything that the server keeps for its tenants.

Owns numbers only, of what is stored in memory, on disk, or on its way. Totals change in one place,
and entering a size under a name that is taken replaces it, so no sequence of calls can leave a
total that differs from the sum of its entries.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Owner = TypeVar("Owner", bound=Hashable)
Name = TypeVar("Name", bound=Hashable)


class Ledger(Generic[Owner, Name]):
    """Sizes in bytes by owner and name, in the order in which they were last entered or used."""

    def __init__(self) -> None:
        self._sizes: dict[Owner, dict[Name, int]] = {}
        self._bytes: dict[Owner, int] = {}
        self.num_entries = 0
        self.num_bytes = 0

    def put(self, owner: Owner, name: Name, num_bytes: int) -> None:
        """Enter a size as the newest, in place of what was entered under that name."""
        assert num_bytes >= 0
        self.drop(owner, name)
        self._sizes.setdefault(owner, {})[name] = num_bytes
        self._add(owner, 1, num_bytes)

    def drop(self, owner: Owner, name: Name) -> int:
        """Take an entry out; its size, 0 where there is none."""
        sizes = self._sizes.get(owner, {})
        if name not in sizes:
            return 0
        num_bytes = sizes.pop(name)
        self._add(owner, -1, -num_bytes)
        if not sizes:
            del self._sizes[owner], self._bytes[owner]
        return num_bytes

    def drop_owner(self, owner: Owner) -> None:
        """Take all of an owner's entries out."""
        for name in self.names(owner):
            self.drop(owner, name)

    def touch(self, owner: Owner, name: Name) -> None:
        """Make an entry its owner's newest. It must be there."""
        self.put(owner, name, self._sizes[owner][name])

    def size(self, owner: Owner, name: Name) -> int | None:
        """Return the size of an entry, or None."""
        return self._sizes.get(owner, {}).get(name)

    def bytes_of(self, owner: Owner) -> int:
        """Return what an owner holds."""
        return self._bytes.get(owner, 0)

    def entries_of(self, owner: Owner) -> int:
        """Return how many entries an owner has."""
        return len(self._sizes.get(owner, ()))

    def names(self, owner: Owner) -> list[Name]:
        """Return an owner's entries, oldest first."""
        return list(self._sizes.get(owner, ()))

    def oldest(self, owner: Owner) -> Name:
        """Return the entry of an owner that has not been used for longest. There must be one."""
        return next(iter(self._sizes[owner]))

    def owners(self) -> Iterator[Owner]:
        """Return who has entries."""
        return iter(self._sizes)

    def _add(self, owner: Owner, num_entries: int, num_bytes: int) -> None:
        self.num_entries += num_entries
        self.num_bytes += num_bytes
        self._bytes[owner] = self._bytes.get(owner, 0) + num_bytes
