"""Compiles the Triton kernels for a GPU that is not there: every launch of a call compiles, down to
machine code, and ends.

Triton brings NVIDIA's assembler, which needs no GPU and no driver. `compiling` stands in for the
driver, so that arguments are specialised as in a real launch. Results of the calls are whatever was
in memory. Not to be mixed with the interpreter.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any


@dataclass(frozen=True)
class Compiled:
    """What the assembler made of one kernel."""

    name: str
    num_registers: int
    stack_bytes: int
    shared_bytes: int
    instructions: frozenset[str] = field(repr=False)
    """Matrix instructions that occur: HMMA, IMMA, HGMMA, IGMMA."""
    shapes: frozenset[str] = field(repr=False)
    """The same with their shapes and types, as HGMMA.64x128x16.F32.BF16."""


class FakeDriver:
    """As much of Triton's driver as compilation asks for."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling(capability: int) -> Iterator[dict[str, Any]]:
    """Within it, launches compile for `capability` (80, 90) and nothing runs;
    gives what was compiled, by a unique name."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    compiled: dict[str, Any] = {}
    plain_run, before = JITFunction.run, driver._active

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = plain_run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled[f"{self.__name__}-{kernel.hash}"] = kernel
        return kernel

    JITFunction.run = run
    driver.set_active(FakeDriver(capability))
    try:
        yield compiled
    finally:
        JITFunction.run = plain_run
        driver._active = before


def describe(name: str, kernel: Any) -> Compiled:
    """Registers, spills and matrix instructions, as NVIDIA's disassembler reports them."""
    from triton.backends.nvidia import driver

    tools = Path(driver.__file__).parent / "bin"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _output(tools / "cuobjdump", "--dump-resource-usage", file.name)
        code = _output(tools / "cuobjdump", "--dump-sass", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    shapes = frozenset(re.findall(r"\b([HIQ]G?MMA\.[\w.]+)", code))
    matrix = frozenset(each.partition(".")[0] for each in shapes)
    return Compiled(
        name.partition("-")[0], int(found[1]), int(found[2]), kernel.metadata.shared, matrix, shapes
    )


def _output(*command: object) -> str:
    return subprocess.run(
        [str(each) for each in command], capture_output=True, text=True, check=True, timeout=60
    ).stdout
