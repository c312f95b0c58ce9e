"""What this machine lets this process use: memory and cores, by the narrowest of its limits. Linux's files, no libraries."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True)
class Machine:
    """A snapshot."""

    total_memory: int
    """Bytes that this process may use at most: the machine's, or its control group's limit."""
    available_memory: int
    """Bytes that are free now under that limit, page cache counted as free."""
    num_cores: int
    """Physical cores in this process's affinity mask and control group."""
    cpu_name: str

    @classmethod
    def inspect(cls) -> Machine:
        """Look."""
        meminfo = _meminfo()
        total, available = meminfo.get("MemTotal", _UNLIMITED), meminfo.get("MemAvailable", _UNLIMITED)
        for limit, used in _group_memory():
            total = min(total, limit)
            available = min(available, max(0, limit - used))
        return cls(total, available, _num_cores(), _cpu_name())


def _meminfo() -> dict[str, int]:
    """`/proc/meminfo` in bytes; elsewhere the machine's memory as `sysconf` tells it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return {"MemTotal": total, "MemAvailable": total // 2}
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if len(line.split()) == 3}


def _group_memory() -> Iterable[tuple[int, int]]:
    """(limit, used) of every control group that this process is in; page cache is not counted as used."""
    for folder, limit_name, used_name, inactive in (
        *((folder, "memory.max", "memory.current", "inactive_file") for folder in _group_folders("0::", "")),
        *((f, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file") for f in _v1_folders("memory")),
    ):
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        if limit is not None and used is not None and limit < _UNLIMITED:
            yield limit, max(0, used - _stat(folder / "memory.stat", inactive))


def _v1_folders(controller: str) -> list[Path]:
    return _group_folders(f":{controller}:", controller)


def _group_folders(marker: str, subfolder: str) -> list[Path]:
    """This process's control group and its ancestors."""
    root = Path("/sys/fs/cgroup") / subfolder
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    paths = [line.split(":", 2)[2].lstrip("/") for line in lines if marker in line]
    return [folder for path in paths for folder in (root / path, *(root / path).parents) if folder.is_relative_to(root)]


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _stat(path: Path, key: str) -> int:
    try:
        for line in path.read_text().splitlines():
            name, value = line.split()
            if name == key:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0


def _num_cores() -> int:
    """Distinct physical cores among the CPUs that this process may run on, bounded by the control group's quota."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_core_of(cpu) for cpu in cpus}
    quota = min((_quota(folder) for folder in _group_folders("0::", "")), default=float(_UNLIMITED))
    return max(1, min(len(cores), int(quota)))


def _core_of(cpu: int) -> str:
    """All logical CPUs of one physical core name the same siblings."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _quota(folder: Path) -> float:
    try:
        limit, period = (folder / "cpu.max").read_text().split()
        return _UNLIMITED if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return _UNLIMITED


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
