"""Adapters in several processes: of each weight that it changes, a rank holds the outputs that it
has of the weight; a stage holds an adapter for all layers, those of other stages too. The first
process says which one goes where, before a step uses it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from quire.kernels.lora import PackedAdapter, StepAdapters
from quire.parallel.group import RankGroup
from quire.parallel.shared_memory import Kind, RankCommand

MAX_PATH = 4096
"""Characters of a folder's name, of more than which Linux has none."""


class AdapterFiles(NamedTuple):
    """Where an adapter is read from."""

    digest: str
    folder: str


class LedAdapters:
    """The first process's side: which adapters the others have, each in a slot by its number."""

    def __init__(self, group: RankGroup) -> None:
        self._group, self._num_starts = group, group.num_starts
        self._files: WeakKeyDictionary[PackedAdapter, AdapterFiles] = WeakKeyDictionary()
        self._slots: WeakKeyDictionary[PackedAdapter, int] = WeakKeyDictionary()

    def note(self, adapter: PackedAdapter, files: AdapterFiles) -> None:
        """Remember where an adapter's files are now."""
        self._files[adapter] = files

    def slots(self, adapters: Sequence[PackedAdapter]) -> tuple[int, ...]:
        """Return where the others have these adapters. They load those that they lack first; a slot
        whose adapter was forgotten here is used again."""
        if self._num_starts != self._group.num_starts:
            self._num_starts = self._group.num_starts
            self._slots.clear()
        for adapter in adapters:
            if adapter not in self._slots:
                taken = set(self._slots.values())
                slot = next(each for each in itertools.count() if each not in taken)
                text = _as_tensor("\n".join(self._files[adapter]))
                self._group.tell(RankCommand(Kind.LOAD_ADAPTER, (slot,), (text,)))
                self._slots[adapter] = slot
        return tuple(self._slots[adapter] for adapter in adapters)


class FollowedAdapters:
    """The other processes' side."""

    def __init__(self, load: Callable[[AdapterFiles], PackedAdapter] | None = None) -> None:
        """Without `load`, none are served."""
        self._load = load
        self._adapters: dict[int, PackedAdapter] = {}

    def load(self, command: RankCommand) -> None:
        """Do what `LedAdapters` says."""
        (slot,), (text,) = command.numbers, command.tensors
        assert text is not None and self._load is not None
        digest, folder = bytes(text.tolist()).decode().split("\n", 1)
        self._adapters.pop(slot, None)
        self._adapters[slot] = self._load(AdapterFiles(digest, folder))

    def of_step(self, slots: Tensor | None, of_token: Tensor | None) -> StepAdapters | None:
        """Return the adapters of a step; None where it uses none."""
        if slots is None or of_token is None:
            return None
        return StepAdapters(tuple(self._adapters[slot] for slot in slots.tolist()), of_token)


def _as_tensor(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.int32)
