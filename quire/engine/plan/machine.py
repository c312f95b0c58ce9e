"""What this machine lets this process use: memory and cores, by the narrowest of its limits.
Linux's files, no libraries.

Everything is read below `root`, so that tests can show other machines. A file that is missing or
odd never fails: what it would have limited counts as unlimited, and where even the memory is
unknown a careful guess is made.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from quire.common.numbers import format_bytes
from quire.engine.plan.gpu import Gpu

_UNLIMITED = 1 << 60
_MAX_CPUS = 1 << 16
_DECISIVE_FLAGS = frozenset(
    {
        "avx2",
        "fma",
        "f16c",
        "avx_vnni",
        "avx512f",
        "avx512bw",
        "avx512dq",
        "avx512vl",
        "avx512_vnni",
        "avx512_bf16",
        "amx_tile",
        "amx_bf16",
    }
    | {"amx_int8", "asimd", "bf16", "i8mm"}
)
_GUESSED_MEMORY = 4 << 30
"""Where no file and no system call tells."""


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
    cores_reason: str = "physical cores that this process may use"
    """How `num_cores` came about."""
    num_nodes: int = 1
    """NUMA nodes that those cores belong to."""
    instruction_sets: str = ""
    """See `instruction_sets`; "" where unknown."""
    memory_reason: str = "free memory"
    """What `available_memory` is."""
    gpu: Gpu | None = None
    """Looked for only where the engine is to compute on one."""

    @classmethod
    def inspect(cls, root: Path = Path("/")) -> Machine:
        """Look."""
        total, available = _memory(root)
        memory_reason = "free memory"
        for limit, used in _group_memory(root):
            total = min(total, limit)
            if limit - used < available:
                available = max(0, limit - used)
                memory_reason = (
                    f"memory that is free under the control group's limit of {format_bytes(limit)}"
                )
        cpus = _allowed_cpus(root)
        num_cores, reason = _cores(root, cpus)
        num_nodes, sets = _num_nodes(root, cpus), instruction_sets(root)
        return cls(
            total, available, num_cores, _cpu_name(root), reason, num_nodes, sets, memory_reason
        )


def _memory(root: Path) -> tuple[int, int]:
    """(total, available) bytes of the whole machine."""
    meminfo: dict[str, int] = {}
    for line in _lines(root / "proc/meminfo"):
        name, *rest = line.split()
        if len(rest) == 2 and rest[0].isdigit():
            meminfo[name.rstrip(":")] = int(rest[0]) * 1024
    total = meminfo.get("MemTotal") or _total_by_system_call()
    # Kernels before 3.14 do not estimate what is available.
    estimate = meminfo.get("MemFree", 0) + meminfo.get("Cached", 0) or total // 2
    return total, min(total, meminfo.get("MemAvailable", estimate))


def _total_by_system_call() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not a Unix, or one that does not tell
        return _GUESSED_MEMORY


def _group_memory(root: Path) -> Iterable[tuple[int, int]]:
    """(limit, used) of every control group that this process is in; page cache is not counted as
    used.

    Above `memory.high` the kernel slows a group down until it hardly runs, so that is a limit as
    well.
    """
    for folder, limit_name, used_name, inactive in (
        *((f, "memory.max", "memory.current", "inactive_file") for f in _group_folders(root, "")),
        *((f, "memory.high", "memory.current", "inactive_file") for f in _group_folders(root, "")),
        *(
            (f, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            for f in _group_folders(root, "memory")
        ),
    ):
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        if limit is not None and used is not None and 0 < limit < _UNLIMITED:
            yield limit, max(0, used - _stat(folder / "memory.stat", inactive))


def _group_folders(root: Path, controller: str) -> list[Path]:
    """Return this process's control group and its ancestors: of a version 1 controller, or with ""
    of version 2.

    In a container the path may be the host's, of which only the mount point exists; then that alone
    tells.
    """
    top = root / "sys/fs/cgroup"
    found = []
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if (
            (controller in controllers.split(","))
            if controller
            else (number == "0" and not controllers)
        ):
            # Version 1 mounts controllers together ("cpu,cpuacct") with links from each; version 2
            # may be mounted beside it.
            mounts = [top / controller] if controller else [top, top / "unified"]
            for mount in mounts:
                folder = mount / path.lstrip("/")
                found += [each for each in (folder, *folder.parents) if each.is_relative_to(mount)]
    return found


def _allowed_cpus(root: Path) -> set[int]:
    """Logical CPUs that this process may run on;
    the kernel has taken its control groups' cpusets into account."""
    for line in _lines(root / "proc/self/status"):
        name, _, cpus = line.partition(":")
        if name == "Cpus_allowed_list" and (allowed := _cpu_list(cpus)):
            return allowed
    return (
        os.sched_getaffinity(0)
        if hasattr(os, "sched_getaffinity")
        else set(range(os.cpu_count() or 1))
    )


def _cores(root: Path, cpus: set[int]) -> tuple[int, str]:
    """Distinct physical cores among `cpus`, bounded by the control group's quota;
    and how that came about."""
    cores = {_core_of(root, cpu) for cpu in cpus}
    quotas = [_quota(folder) for folder in _group_folders(root, "")]
    quotas += [_quota_v1(folder) for folder in _group_folders(root, "cpu")]
    quota = min(quotas, default=float(_UNLIMITED))
    reason = f"physical cores among the {len(cpus)} CPUs that this process may use"
    if int(quota) < len(cores):
        return max(
            1, int(quota)
        ), f"the control group's quota is {quota:g} CPUs' time, of {len(cores)} {reason}"
    return max(1, len(cores)), reason


def _num_nodes(root: Path, cpus: set[int]) -> int:
    """NUMA nodes that hold any of `cpus`."""
    nodes = root / "sys/devices/system/node"
    held = [_cpu_list("".join(_lines(path))) & cpus for path in nodes.glob("node[0-9]*/cpulist")]
    return max(1, sum(bool(each) for each in held))


def _cpu_list(text: str) -> set[int]:
    """Return a kernel's list such as "0-3,8"; empty where it is none."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not first.isdigit() or not last.isdigit() or int(last) >= _MAX_CPUS:
            return set()
        cpus.update(range(int(first), int(last) + 1))
    return cpus


def _core_of(root: Path, cpu: int) -> str:
    """All logical CPUs of one physical core name the same siblings."""
    lines = _lines(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return lines[0].strip() if lines else str(cpu)


def _quota(folder: Path) -> float:
    """CPUs' worth of time that a version 2 group may use."""
    match " ".join(_lines(folder / "cpu.max")).split():
        case [limit, period] if limit.isdigit() and period.isdigit() and int(period):
            return int(limit) / int(period)
    return _UNLIMITED


def _quota_v1(folder: Path) -> float:
    limit, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return limit / period if limit is not None and period and limit > 0 else _UNLIMITED


def _cpu_name(root: Path) -> str:
    for line in _lines(root / "proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def instruction_sets(root: Path = Path("/")) -> str:
    """Return what kernels are chosen by, as one word for each class of processors:
    bits are the same within one, not between two."""
    found: set[str] = set()
    for line in _lines(root / "proc/cpuinfo"):
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            found.update(_DECISIVE_FLAGS & set(flags.split()))
            break
    return "+".join([platform.machine(), *sorted(found)])


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    try:
        return int("".join(_lines(path)))
    except ValueError:
        return None


def _stat(path: Path, key: str) -> int:
    for line in _lines(path):
        name, _, value = line.partition(" ")
        if name == key and value.strip().isdigit():
            return int(value)
    return 0
