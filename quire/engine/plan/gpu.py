"""The first NVIDIA GPU that this process may use, and what speaks against computing on it. No
torch: the driver is asked.

Owns the questions to `libcuda` (which GPUs there are, by the driver's own rules of visibility) and
to `libnvidia-ml` (free memory, which the first can only tell after it has made a context of some
hundred megabytes). Answers take milliseconds. What is missing is said in `Gpu.missing`, for a plan,
a refusal or `quire doctor`.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from importlib import util
from pathlib import Path

from quire.common.capabilities import MIN_CAPABILITY
from quire.errors import ConfigError

_MAJOR, _MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR."""

LoadLibrary = Callable[[str], ctypes.CDLL]


@dataclass(frozen=True, slots=True)
class Gpu:
    """A snapshot."""

    name: str
    capability: tuple[int, int]
    total_memory: int
    """Bytes."""
    free_memory: int
    """Bytes; all of them where the management library does not tell."""
    driver: str
    """The CUDA version that the driver supports, such as 13.0."""


class _MemoryInfo(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def inspect_gpu(load: LoadLibrary = ctypes.CDLL) -> Gpu:
    """Look at the first visible GPU; ConfigError says what is missing."""
    cuda = _library(load, "libcuda.so.1")
    if cuda is None:
        raise ConfigError(
            "there is no NVIDIA driver (libcuda.so.1 cannot be loaded); install one, or use "
            "device=cpu"
        )
    status = cuda.cuInit(0)
    if status:
        raise ConfigError(
            f"the NVIDIA driver does not start (cuInit gives {status}): is there a GPU that "
            "this user may use?"
        )
    count, version, device = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    _ask(cuda.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
    if count.value < 1:
        raise ConfigError(
            "the NVIDIA driver shows no GPU to this process; look at CUDA_VISIBLE_DEVICES"
        )
    _ask(cuda.cuDriverGetVersion(ctypes.byref(version)), "cuDriverGetVersion")
    _ask(cuda.cuDeviceGet(ctypes.byref(device), 0), "cuDeviceGet")
    total, name, uuid = ctypes.c_size_t(), ctypes.create_string_buffer(256), (ctypes.c_ubyte * 16)()
    _ask(cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device), "cuDeviceTotalMem")
    _ask(cuda.cuDeviceGetName(name, len(name), device), "cuDeviceGetName")
    _ask(cuda.cuDeviceGetUuid(ctypes.byref(uuid), device), "cuDeviceGetUuid")
    capability = (_attribute(cuda, device, _MAJOR), _attribute(cuda, device, _MINOR))
    free = _free_memory(_library(load, "libnvidia-ml.so.1"), bytes(uuid).hex())
    return Gpu(
        name=name.value.decode(errors="replace"),
        capability=capability,
        total_memory=total.value,
        free_memory=total.value if free is None else min(free, total.value),
        driver=f"{version.value // 1000}.{version.value % 1000 // 10}",
    )


def reasons_against(gpu: Gpu) -> list[str]:
    """Return why kernels cannot run on it with what is installed; empty where they can."""
    reasons = []
    if gpu.capability < MIN_CAPABILITY:
        have, need = (".".join(map(str, each)) for each in (gpu.capability, MIN_CAPABILITY))
        reasons.append(f"{gpu.name} has compute capability {have}; the kernels need {need}")
    return reasons + software_reasons()


def software_reasons() -> list[str]:
    """Return what is missing of torch and Triton, without importing them."""
    reasons = []
    if util.find_spec("triton") is None:
        reasons.append("the package triton is not installed; pip install triton")
    if torch_cuda_version() is None:
        from importlib import metadata

        reasons.append(
            f"torch {metadata.version('torch')} is built without CUDA; install a CUDA build"
        )
    return reasons + compiler_reasons()


def compiler_reasons() -> list[str]:
    """Return what Triton lacks to launch a kernel for the first time: it compiles a small C module
    for each kind of launch.

    Nothing where its cache holds anything: on a machine like this one it has compiled before, and
    may need no compiler again.
    """
    cache = Path(
        os.environ.get("TRITON_CACHE_DIR")
        or Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"
    )
    if cache.is_dir() and any(cache.iterdir()):
        return []
    reasons = []
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        reasons.append(
            "Triton needs a C compiler, and there is neither gcc nor clang; install one, or "
            "name it in CC"
        )
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        reasons.append(
            "Triton needs Python's header Python.h; install the package that has it (python3-dev)"
        )
    return reasons


def torch_cuda_version() -> str | None:
    """Return the CUDA version that torch was built for, by its own file; None for a CPU build."""
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^cuda\b[^=]*=\s*'([^']+)'", text, re.MULTILINE)
    return None if found is None else found[1]


def require_gpu(load: LoadLibrary = ctypes.CDLL) -> Gpu:
    """Return the GPU to compute on; ConfigError lists everything that does not fit."""
    missing = software_reasons()
    try:
        gpu = inspect_gpu(load)
    except ConfigError as error:
        raise ConfigError(
            "device='cuda' cannot be used: " + "; ".join([str(error), *missing])
        ) from None
    reasons = reasons_against(gpu)
    if reasons:
        raise ConfigError("device='cuda' cannot be used: " + "; ".join(reasons))
    return gpu


def _library(load: LoadLibrary, name: str) -> ctypes.CDLL | None:
    try:
        return load(name)
    except OSError:
        return None


def _ask(status: int, question: str) -> None:
    if status:
        raise ConfigError(f"the NVIDIA driver answers {question} with error {status}")


def _attribute(cuda: ctypes.CDLL, device: ctypes.c_int, number: int) -> int:
    value = ctypes.c_int()
    _ask(cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device), "cuDeviceGetAttribute")
    return value.value


def _free_memory(nvml: ctypes.CDLL | None, uuid: str) -> int | None:
    """Return free bytes of the GPU with this identity (32 hexadecimal digits); None where no driver
    tells."""
    if nvml is None or nvml.nvmlInit_v2():
        return None
    parts = (uuid[:8], uuid[8:12], uuid[12:16], uuid[16:20], uuid[20:])
    handle, memory = ctypes.c_void_p(), _MemoryInfo()
    try:
        if nvml.nvmlDeviceGetHandleByUUID(f"GPU-{'-'.join(parts)}".encode(), ctypes.byref(handle)):
            return None
        return None if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) else memory.free
    finally:
        nvml.nvmlShutdown()
