"""The OpenMP runtime that torch and the native kernels share: that it is one, and how long its idle
threads spin.

libgomp reads its environment once, when it is loaded (with torch), and by default lets a thread
spin for some 300,000 rounds at every barrier. On a machine that has anything else to do, spinning
threads keep the ones they wait for off the cores: with one foreign process on two cores, decoding a
small model was 3 to 12 times faster with this setting than without it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from pathlib import Path

_SPIN_COUNT = "2000"
"""About 0.1 ms: longer than the gaps between the kernels of a step,
far shorter than a scheduler's time slice."""


def limit_spinning() -> None:
    """Request short spinning, unless the user has said otherwise or libgomp is loaded already."""
    if "torch" not in sys.modules and not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = _SPIN_COUNT


def torch_library(name: str) -> Path | None:
    """Return a shared library out of torch's own folder, found without importing torch;
    None where there is none."""
    spec = importlib.util.find_spec("torch")
    path = None if spec is None or spec.origin is None else Path(spec.origin).parent / "lib" / name
    return path if path is not None and path.is_file() else None


def load_runtime_of_torch() -> bool:
    """Load the libgomp that torch ships, so that whatever loads `libgomp.so.1` by name
    afterwards gets that one.

    False where torch has none of that name: then only importing torch itself loads what it needs.
    """
    path = torch_library("libgomp.so.1")
    if path is None:
        return False
    ctypes.CDLL(str(path))
    return True
