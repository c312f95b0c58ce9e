"""Fixtures for kernel tests: the native back end under each instruction set, and two threads given back afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.kernels import cpu

ISAS = cpu.supported_isas() if cpu.IMPORT_ERROR is None else ()


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this machine has, forced in turn."""
    before = cpu.isa()
    cpu.set_isa(request.param)
    yield request.param
    cpu.set_isa(before)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """The native kernels on one thread, then on two."""
    before = cpu.num_threads()
    cpu.set_num_threads(request.param)
    yield request.param
    cpu.set_num_threads(before)
