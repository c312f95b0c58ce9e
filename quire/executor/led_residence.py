"""The memory of several processes of one model, which goes and returns together.

The first process gives its own back in place. The others hold nothing that it could not have built
again, so they are ended, and started anew of the files that the weights are from.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.common.residence import WEIGHTS
from quire.errors import NotAvailableError
from quire.parallel.group import RankGroup
from quire.worker.residence import Loaded, Residence, Source


class LedResidence:
    """Implements `Residence` for the first process of a group."""

    def __init__(self, own: Residence, group: RankGroup) -> None:
        self._own, self._group = own, group

    def sleep(self, level: int) -> None:
        """See `Residence.sleep`."""
        self._own.sleep(level)
        self._group.end()

    def wake(self, parts: Iterable[str]) -> None:
        """See `Residence.wake`. The others are started with the weights, and have their part of the
        KV cache from then on."""
        wanted = tuple(parts)
        self._own.wake(wanted)
        if WEIGHTS in wanted and self._group.is_lost:
            self._group.restart()

    def load(self, source: Source) -> Loaded:
        """See `Residence.load`. The others load their part when it is replaced."""
        if not isinstance(source, str):
            raise NotAvailableError(
                "update_weights: tensors are in this process alone, and the model is divided among "
                "several; give a folder that all of them can read"
            )
        return self._own.load(source)

    def replace(self, loaded: Loaded) -> None:
        """See `Residence.replace`. Where it fails, the others are ended, which the next step
        notices: they are started anew of the former files."""
        former = self._group.told
        options = {name: each for name, each in former["options"].items() if name != "load_format"}
        files = {"model": loaded.path, "files": dict(loaded.states), "options": options}
        self._group.restart(files)
        try:
            self._own.replace(loaded)
        except BaseException:
            self._group.end(former)
            raise
