"""The native CPU back end: kernels from csrc/cpu, checked and called through `CpuKernels`.

Owns the loading of the extension, the thread count and the choice of instruction set. The extension
may be missing (it is not built where there is no C++ compiler); `reasons_against` then says so.

The libgomp that torch ships is loaded before the extension on purpose: both then share it
(CMakeLists.txt). torch itself is not imported here, since the extension packs weights while that is
going on.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from quire.common.openmp import load_runtime_of_torch
from quire.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from quire.kernels.interface import Kernels

if not load_runtime_of_torch():
    import torch
try:
    import quire.kernels.cpu._native as native
except ImportError as error:
    IMPORT_ERROR: str | None = str(error)
else:
    IMPORT_ERROR = None

DTYPES = ("float32", "bfloat16")


def reasons_against(device: str, dtype: torch.dtype) -> list[str]:
    """Return why this back end cannot serve tensors of `dtype` on `device`; empty where it can."""
    reasons = []
    if device.partition(":")[0] != "cpu":
        reasons.append(f"runs on the CPU only, not on {device}")
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        reasons.append(f"computes in float32 and bfloat16, not in {name}")
    if (reason := absence()) is not None:
        reasons.append(reason)
    return reasons


def absence() -> str | None:
    """Return why nothing can be computed by the extension; None where it is what is needed."""
    if IMPORT_ERROR is not None:
        return (
            f"the extension was not built or cannot be loaded ({IMPORT_ERROR}); reinstall "
            "with a C++ compiler present"
        )
    if differences := _differences():
        found = "; ".join(differences[:3])
        return (
            f"the native library was built from other sources ({found}); rebuild it with "
            "`pip install -e .`"
        )
    return None


@functools.cache
def _differences() -> list[str]:
    """Return what the extension lacks of `_native.pyi`:
    an editable install keeps it while the files around it change."""
    from quire.kernels.cpu.declarations import differences

    return differences(native, Path(__file__).with_name("_native.pyi").read_text())


def load(device: str = "cpu") -> Kernels:
    """Return the back end; ConfigError where the extension is missing,
    or the device is another than the CPU."""
    import torch

    reasons = reasons_against(device, torch.float32)
    if reasons:
        raise ConfigError("the native CPU kernels cannot run: " + "; ".join(reasons))
    from quire.kernels.cpu.kernels import CpuKernels

    return CpuKernels()


def set_num_threads(count: int) -> None:
    """Threads that the native kernels use from now on,
    in the whole process (torch's own setting is not touched)."""
    native.set_num_threads(count)


def num_threads() -> int:
    """Threads that the native kernels use; OpenMP's default until set."""
    return native.num_threads()


def kernel_times() -> dict[str, float]:
    """Return seconds that native kernels have run for in this process, by class: linear, attention,
    elementwise, sampling, and gathering between ranks.

    Empty where the extension is missing. The thread that calls the kernels is timed, so two
    two readings tell what happened in between if no other thread uses the kernels.
    """
    return native.kernel_times() if IMPORT_ERROR is None else {}


def supported_isas() -> tuple[str, ...]:
    """Return instruction sets that were compiled in and that this machine has,
    from the plainest to the best."""
    return tuple(native.supported_isas())


def emulated_isas() -> tuple[str, ...]:
    """Return instruction sets that this machine lacks and can act out, slowly: for tests,
    through `set_isa`."""
    return tuple(native.emulated_isas())


def isa() -> str:
    """Return the instruction set in use: the best supported one until set."""
    return native.isa()


def set_isa(name: str) -> None:
    """Use another supported instruction set, for tests and measurements.
    Weights packed before stay valid."""
    if name not in supported_isas() + emulated_isas():
        raise ConfigError(f"instruction set {name!r} is not one of {', '.join(supported_isas())}")
    native.set_isa(name)


@contextmanager
def using(*, isa: str | None = None, num_threads: int | None = None) -> Iterator[None]:
    """Use another instruction set or thread count, and afterwards again those in use before: both
    belong to the process, and what runs in it next shall not inherit them."""
    before = native.isa(), native.num_threads()
    try:
        if isa is not None:
            set_isa(isa)
        if num_threads is not None:
            set_num_threads(num_threads)
        yield
    finally:
        native.set_isa(before[0])
        native.set_num_threads(before[1])
