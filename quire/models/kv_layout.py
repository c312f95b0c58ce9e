"""How the layers' caches share memory: groups of layers with one block table each, whose blocks all
take the same bytes.

A group's layers keep the same of a sequence: everything, or what a sliding window still sees. All
groups have room for as many layers, and the layers at the same place of each group share one pair
of tensors, in which their block tables name different blocks. So any block can belong to any group,
and one pool of them serves all, to the last block.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.common.frozen_record import FrozenRecord
from quire.common.numbers import ceil_div
from quire.models.blocks import KVLayerSpec

MAX_PADDING = 0.04
"""Of the memory that layers need: what may lie idle where a group has fewer layers than fit."""


class KVLayout(FrozenRecord):
    """Groups of layers; layers are numbered in the order of their caches."""

    windows: tuple[int | None, ...]
    """Of each group; those that keep everything come first."""
    group_of: tuple[int, ...]
    """Each layer's group."""
    place_of: tuple[int, ...]
    """Each layer's place in it: layers at the same place share their tensors."""

    @property
    def num_places(self) -> int:
        """Layers that a group has room for."""
        return max(self.place_of, default=-1) + 1

    def block_bytes(self, layers: Sequence[KVLayerSpec], kv_format: str, block_size: int) -> int:
        """Bytes of one block, of whatever group."""
        sizes = {}
        for layer, place in zip(layers, self.place_of, strict=True):
            sizes[place] = layer.bytes_per_token(kv_format) * block_size
        return sum(sizes.values())


def lay_out(layers: Sequence[KVLayerSpec], max_model_len: int) -> KVLayout:
    """Find as few groups as leave little memory idle. A window that no sequence outgrows is none.

    Layers whose rows differ in shape stay in one group that keeps everything: their blocks would
    not take the same bytes.
    """
    kinds: dict[int | None, list[int]] = {None: []}
    for number, layer in enumerate(layers):
        window = layer.window
        if window is not None and window >= max_model_len:
            window = None
        kinds.setdefault(window, []).append(number)
    if len({layer._replace(window=None) for layer in layers}) > 1:
        kinds = {None: list(range(len(layers)))}
    kinds = {window: members for window, members in kinds.items() if members} or {None: []}
    depth = _depth([len(members) for members in kinds.values()])
    windows: list[int | None] = []
    group_of, place_of = [0] * len(layers), [0] * len(layers)
    for window, members in kinds.items():
        for index, number in enumerate(members):
            group_of[number] = len(windows) + index // depth
            place_of[number] = index % depth
        windows += [window] * max(1, ceil_div(len(members), depth))
    return KVLayout(tuple(windows), tuple(group_of), tuple(place_of))


def _depth(counts: Sequence[int]) -> int:
    """Layers of a group: as many as can be, for kinds of so many layers."""
    for depth in range(max(counts), 1, -1):
        num_rooms = depth * sum(ceil_div(count, depth) for count in counts)
        if num_rooms <= (1 + MAX_PADDING) * sum(counts):
            return depth
    return 1
