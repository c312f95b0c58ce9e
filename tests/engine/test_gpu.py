"""What is asked of NVIDIA's libraries, and what is said where they answer otherwise:
with libraries made up for the test."""

from __future__ import annotations

import ctypes
import importlib.util
import time
from pathlib import Path
from typing import Any

import pytest
from timing import timed

from quire.engine.plan import gpu
from quire.engine.plan.gpu import inspect_gpu, reasons_against, require_gpu
from quire.errors import ConfigError

UUID = bytes(range(16))


class FakeCuda:
    """A driver with one GPU."""

    def __init__(
        self, *, init: int = 0, count: int = 1, capability: tuple[int, int] = (9, 0)
    ) -> None:
        self.init, self.count, self.capability = init, count, capability

    def cuInit(self, flags: int) -> int:
        return self.init

    def cuDeviceGetCount(self, out: Any) -> int:
        out._obj.value = self.count
        return 0

    def cuDriverGetVersion(self, out: Any) -> int:
        out._obj.value = 13010
        return 0

    def cuDeviceGet(self, out: Any, index: int) -> int:
        out._obj.value = 0
        return 0

    def cuDeviceTotalMem_v2(self, out: Any, device: Any) -> int:
        out._obj.value = 80 << 30
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: Any) -> int:
        name.value = b"NVIDIA H200"
        return 0

    def cuDeviceGetUuid(self, out: Any, device: Any) -> int:
        ctypes.memmove(out._obj, UUID, 16)
        return 0

    def cuDeviceGetAttribute(self, out: Any, number: int, device: Any) -> int:
        out._obj.value = self.capability[number - 75]
        return 0


class FakeManagement:
    """The management library; knows one GPU by its identity."""

    is_shut_down = False

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlShutdown(self) -> int:
        self.is_shut_down = True
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, out: Any) -> int:
        return 0 if uuid == b"GPU-00010203-0405-0607-0809-0a0b0c0d0e0f" else 6

    def nvmlDeviceGetMemoryInfo(self, handle: Any, out: Any) -> int:
        out._obj.free = 70 << 30
        return 0


def loader(**libraries: Any) -> Any:
    def load(name: str) -> Any:
        key = {"libcuda.so.1": "cuda", "libnvidia-ml.so.1": "management"}[name]
        if libraries.get(key) is None:
            raise OSError(name)
        return libraries[key]

    return load


def test_a_gpu_is_described() -> None:
    management = FakeManagement()
    found = inspect_gpu(loader(cuda=FakeCuda(), management=management))
    assert (found.name, found.capability, found.driver) == ("NVIDIA H200", (9, 0), "13.1")
    assert (found.total_memory, found.free_memory) == (80 << 30, 70 << 30)
    assert management.is_shut_down


def test_without_the_management_library_all_memory_counts_as_free() -> None:
    found = inspect_gpu(loader(cuda=FakeCuda()))
    assert found.free_memory == found.total_memory == 80 << 30


@pytest.mark.parametrize(
    ("cuda", "message"),
    [
        (None, "no NVIDIA driver"),
        (FakeCuda(init=100), "cuInit gives 100"),
        (FakeCuda(count=0), "shows no GPU"),
    ],
)
def test_what_is_missing_is_said(cuda: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        inspect_gpu(loader(cuda=cuda))


def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "software_reasons", lambda: [])
    found = inspect_gpu(loader(cuda=FakeCuda(capability=(7, 5))))
    assert reasons_against(found) == [
        "NVIDIA H200 has compute capability 7.5; the kernels need 8.0"
    ]
    assert require_gpu(loader(cuda=FakeCuda())).capability == (9, 0)


@timed
def test_everything_that_does_not_fit_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "torch_cuda_version", lambda: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    started = time.perf_counter()
    with pytest.raises(
        ConfigError, match=r"no NVIDIA driver.*triton is not installed.*built without CUDA"
    ):
        require_gpu(loader())
    assert time.perf_counter() - started < 2.0


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("cuda: Optional[str] = None\n", None),
        ("x = 1\ncuda: Optional[str] = '13.0'\n", "13.0"),
        ("cuda = '12.8'", "12.8"),
    ],
)
def test_torchs_own_file_tells_what_it_was_built_for(
    text: str, version: str | None, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(text)
    spec = type("Spec", (), {"origin": str(tmp_path / "__init__.py")})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert gpu.torch_cuda_version() == version


def test_a_machine_without_a_compiler_is_told_what_triton_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert [reason.partition(",")[0] for reason in gpu.compiler_reasons()] == [
        "Triton needs a C compiler",
        "Triton needs Python's header Python.h; install the package that has it (python3-dev)",
    ]
    monkeypatch.setenv("CC", "/opt/cc")
    (tmp_path / "Python.h").touch()
    assert gpu.compiler_reasons() == []
    monkeypatch.delenv("CC")
    (tmp_path / "cache" / "kernel").mkdir(parents=True)
    assert gpu.compiler_reasons() == [], "it has compiled before"
