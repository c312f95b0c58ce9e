"""Experts of which only some are in memory (csrc/cpu/expert_pool.cpp): weights without memory of
their own, and the pool that has some of each in slots.

Owns the pool's memory and a descriptor of the file. What is resident changes no bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from quire.common.numbers import align_up
from quire.errors import CapacityError, CheckpointError
from quire.kernels.cpu import _native
from quire.kernels.cpu.checks import address
from quire.kernels.cpu.linear import CpuLinear, PackedLayout
from quire.kernels.host_memory import empty_bytes

_ALIGNMENT = 64
"""Of slots, as the GEMM likes its weights."""


class PoolCounts(NamedTuple):
    """What a pool has done since it was made."""

    num_hits: int = 0
    """Experts that a layer needed and that were in memory."""
    num_misses: int = 0
    bytes_read: int = 0
    """Of the file, also to fill the pool at first."""
    wait_s: float = 0.0
    """For these reads."""
    num_forecast: int = 0
    """Experts that were not in memory and that the next layer would need, by a forecast."""
    num_foreseen: int = 0
    """Those of them that it needed."""
    bytes_ahead: int = 0
    """That the system was asked to read while the layer before was computed."""


class PagedLinear:
    """One of the two weights of a layer's experts, which are in a file. Implements
    `PackedLinear`; only `apply_experts` and programs take it."""

    __slots__ = ("bias", "home", "layout", "native", "num_inputs", "num_outputs")

    def __init__(self, layout: PackedLayout, bias: Tensor | None = None) -> None:
        self.layout, self.bias = layout, bias
        self.num_outputs, self.num_inputs = layout.num_outputs, layout.num_inputs
        self.native = layout.native()
        if bias is not None:
            self.native.attach_bias(address(bias, "bias"))
        self.home: Home | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of memory held, without what is in the pool."""
        return 0 if self.bias is None else self.bias.nbytes

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """See `PackedLinear.tensors`; without what is in the pool."""
        return () if self.bias is None else (self.bias,)


class StoredWeight(NamedTuple):
    """Where a layer's experts begin in the file, and their checksums."""

    weight: PagedLinear
    start: int
    checksums: Sequence[int]

    @property
    def expert_bytes(self) -> int:
        """Of one expert."""
        return self.weight.layout.num_bytes // len(self.checksums)


class PagedExperts:
    """The experts of a model in a pool of at most `num_bytes`."""

    def __init__(
        self,
        path: Path,
        descriptor: int,
        layers: Sequence[tuple[StoredWeight, StoredWeight]],
        num_bytes: int,
        least: int,
    ) -> None:
        """`layers` have up and down, in the order in which a step computes them; the descriptor
        is duplicated. Raises CapacityError where the pool would hold less than `least` experts."""
        sizes = [up.expert_bytes + down.expert_bytes for up, down in layers]
        self.slot_bytes = align_up(max(sizes), _ALIGNMENT)
        self.num_experts = sum(len(up.checksums) for up, _ in layers)
        self.num_slots = min(num_bytes // self.slot_bytes, self.num_experts)
        if self.num_slots < least:
            raise CapacityError(
                f"expert_memory holds {self.num_slots} experts of {self.slot_bytes} bytes, and a "
                f"token alone needs {least} of a layer; give at least {least * self.slot_bytes} "
                "bytes"
            )
        self._folder = path.parent
        self._biases = [each.weight.bias for layer in layers for each in layer]  # kept alive
        self._memory = empty_bytes(self.num_slots * self.slot_bytes)
        self.native = _native.ExpertPool(
            path.name, descriptor, address(self._memory, "memory"), self.slot_bytes, self.num_slots
        )
        for number, (up, down) in enumerate(layers):
            self.native.add_layer(
                up.weight.native, down.weight.native, len(up.checksums), self.slot_bytes,
                up.start, down.start, list(up.checksums), list(down.checksums),
            )  # fmt: skip
            up.weight.home = down.weight.home = Home(self, number)

    def fill(self) -> None:
        """Read as many experts as the pool holds, before any is needed. Raises CheckpointError
        where the file is not what was written."""
        try:
            with naming_files():
                self.native.fill()
        except CheckpointError as error:  # a step's error goes to clients, this one does not
            raise CheckpointError(f"{self._folder}: {error}") from None

    def set_reads_ahead(self, reads_ahead: bool) -> None:
        """Whether experts are read ahead where that pays, as they are unless this is said; no bit
        depends on it."""
        self.native.set_reads_ahead(reads_ahead)

    @property
    def counts(self) -> PoolCounts:
        """What has happened so far; also from another thread."""
        return PoolCounts(*self.native.counts())


class Home(NamedTuple):
    """Where a paged weight's experts are."""

    pool: PagedExperts
    number: int
    """Of the layer."""


def checksums(linear: CpuLinear, num_experts: int) -> list[int]:
    """Return a checksum of each expert's bytes, as the pool compares them."""
    data = address(linear.data, "data")
    return _native.expert_checksums(data, num_experts, linear.data.nbytes // num_experts)


def paged(layout: Sequence[object], bias: Tensor | None) -> PagedLinear:
    """Return a weight as its layout was kept; ValueError or TypeError where it is none."""
    return PagedLinear(PackedLayout(*layout), None if bias is None else bias.view(torch.float32))  # type: ignore[arg-type]


@contextmanager
def naming_files() -> Iterator[None]:
    """Raise CheckpointError where an expert cannot be had from its file."""
    try:
        yield
    except _native.ExpertFileError as error:
        raise CheckpointError(
            f"{error}; delete the file, and the next start writes it anew"
        ) from None
