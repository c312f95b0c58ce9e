"""What the machine gives, read from the files of machines that are not this one."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.engine.plan.machine import Machine, instruction_sets

GIB = 1 << 30
MEMINFO = (
    "MemTotal: 33554432 kB\nMemFree: 1048576 kB\nMemAvailable: 16777216 kB\nCached: 2097152 "
    "kB\nHugePages_Total: 0\n"
)


def _machine(root: Path, files: dict[str, str]) -> Machine:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Machine.inspect(root)


def test_a_plain_machine(tmp_path: Path) -> None:
    machine = _machine(
        tmp_path,
        {"proc/meminfo": MEMINFO, "proc/cpuinfo": "processor: 0\nmodel name : Some CPU @ 2 GHz\n"},
    )
    assert (machine.total_memory, machine.available_memory) == (32 * GIB, 16 * GIB)
    assert machine.cpu_name == "Some CPU @ 2 GHz" and machine.num_cores >= 1


def test_an_old_kernel_does_not_say_what_is_available(tmp_path: Path) -> None:
    machine = _machine(tmp_path, {"proc/meminfo": MEMINFO.replace("MemAvailable", "Other")})
    assert machine.available_memory == 3 * GIB


def test_no_files_at_all(tmp_path: Path) -> None:
    machine = Machine.inspect(tmp_path)
    assert 0 < machine.available_memory <= machine.total_memory < 1 << 50
    assert machine.num_cores >= 1 and machine.cpu_name


@pytest.mark.parametrize(
    ("files", "total", "available"),
    [
        (
            {
                "memory.max": f"{4 * GIB}\n",
                "memory.current": f"{3 * GIB}\n",
                "memory.stat": f"anon 5\ninactive_file {GIB}\n",
            },
            4,
            2,
        ),
        ({"memory.max": "max\n", "memory.current": "5\n"}, 32, 16),
        (
            {
                "memory.max": f"{8 * GIB}\n",
                "memory.high": f"{4 * GIB}\n",
                "memory.current": f"{GIB}\n",
            },
            4,
            3,
        ),
        (
            {"memory.max": f"{8 * GIB}\n", "memory.high": "max\n", "memory.current": f"{GIB}\n"},
            8,
            7,
        ),
        ({"memory.max": f"{4 * GIB}\n", "memory.current": f"{5 * GIB}\n"}, 4, 0),
        ({"memory.max": "nonsense\n", "memory.current": "5\n"}, 32, 16),
    ],
)
def test_control_groups_version_2(
    files: dict[str, str], total: int, available: int, tmp_path: Path
) -> None:
    groups = {f"sys/fs/cgroup/a/{name}": text for name, text in files.items()}
    machine = _machine(
        tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/a/b\n", **groups}
    )
    assert (machine.total_memory, machine.available_memory) == (total * GIB, available * GIB)


def test_the_narrowest_group_above_decides(tmp_path: Path) -> None:
    groups = {
        f"sys/fs/cgroup/{folder}/{name}": f"{size * GIB}\n"
        for folder, limit, used in (("a", 3, 2), ("a/b", 6, 1), ("a/b/c", 5, 1))
        for name, size in (("memory.max", limit), ("memory.current", used))
    }
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/a/b/c\n",
        "sys/fs/cgroup/a/cpu.max": "200000 100000",
        **groups,
    }
    machine = _machine(tmp_path, files | _cpus("0-7", TWO_THREADS, {}))
    assert (machine.total_memory, machine.available_memory, machine.num_cores) == (3 * GIB, GIB, 2)
    assert machine.memory_reason == "memory that is free under the control group's limit of 3.0 GiB"


def test_control_groups_version_1_in_a_container(tmp_path: Path) -> None:
    """The path is the host's; what is mounted is the container's own group."""
    top = "sys/fs/cgroup/memory"
    machine = _machine(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "12:cpu,cpuacct:/docker/1f\n10:memory:/docker/1f\n0::/\n",
            f"{top}/memory.limit_in_bytes": f"{2 * GIB}\n",
            f"{top}/memory.usage_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert (machine.total_memory, machine.available_memory) == (2 * GIB, GIB)
    assert machine.num_cores == 1


@pytest.mark.parametrize("quota", ["50000 100000", "100000 100000", "199999 100000"])
def test_a_quota_of_cpu_time_bounds_the_cores(quota: str, tmp_path: Path) -> None:
    assert (
        _machine(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": quota}).num_cores
        == 1
    )


@pytest.mark.parametrize("quota", ["max 100000", "100000 0", "", "a b"])
def test_no_quota_leaves_the_cores_alone(quota: str, tmp_path: Path) -> None:
    unbounded = Machine.inspect(tmp_path).num_cores
    assert (
        _machine(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": quota}).num_cores
        == unbounded
    )


def _cpus(allowed: str, siblings: dict[int, str], nodes: dict[int, str]) -> dict[str, str]:
    """The files of a machine with these CPUs."""
    files = {
        "proc/self/status": f"Name:\tquire\nCpus_allowed:\tff\nCpus_allowed_list:\t{allowed}\n"
    }
    for cpu, text in siblings.items():
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = f"{text}\n"
    for node, text in nodes.items():
        files[f"sys/devices/system/node/node{node}/cpulist"] = f"{text}\n"
    return files


TWO_THREADS = {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}
HYBRID = {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3", 4: "4", 5: "5", 6: "6", 7: "7"}


@pytest.mark.parametrize(
    ("allowed", "siblings", "nodes", "expected"),
    [
        ("0-7", TWO_THREADS, {0: "0-7"}, (4, 1)),
        ("0-3", TWO_THREADS, {0: "0-7"}, (4, 1)),
        ("0,4", TWO_THREADS, {0: "0-7"}, (1, 1)),
        ("0-7", HYBRID, {0: "0-7"}, (6, 1)),
        ("0-7", TWO_THREADS, {0: "0-1,4-5", 1: "2-3,6-7"}, (4, 2)),
        ("0-1,4-5", TWO_THREADS, {0: "0-1,4-5", 1: "2-3,6-7"}, (2, 1)),
        ("0-7", TWO_THREADS, {0: "0-7", 1: ""}, (4, 1)),
        ("0-7", {}, {}, (8, 1)),
    ],
)
def test_cores_are_physical_and_allowed(
    allowed: str,
    siblings: dict[int, str],
    nodes: dict[int, str],
    expected: tuple[int, int],
    tmp_path: Path,
) -> None:
    machine = _machine(tmp_path, _cpus(allowed, siblings, nodes))
    assert (machine.num_cores, machine.num_nodes) == expected
    assert machine.cores_reason.startswith("physical cores among the")


def test_a_quota_below_the_cores_is_the_reason(tmp_path: Path) -> None:
    files = _cpus("0-7", TWO_THREADS, {}) | {
        "proc/self/cgroup": "0::/a\n",
        "sys/fs/cgroup/a/cpu.max": "250000 100000",
    }
    machine = _machine(tmp_path, files)
    assert machine.num_cores == 2
    assert machine.cores_reason.startswith(
        "the control group's quota is 2.5 CPUs' time, of 4 physical cores among the 8 CPUs"
    )


@pytest.mark.parametrize("allowed", ["", "x", "3-", "-3", "0-99999999", "1,,2"])
def test_a_list_of_cpus_that_makes_no_sense_limits_nothing(allowed: str, tmp_path: Path) -> None:
    assert (
        _machine(tmp_path, _cpus(allowed, {}, {})).num_cores
        == Machine.inspect(tmp_path / "nothing").num_cores
    )


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (
            "model name : x\nflags\t\t: fpu avx2 sse fma avx512f\nflags : amx_tile\n",
            ["avx2", "avx512f", "fma"],
        ),
        ("Features\t: fp asimd crc32 i8mm\n", ["asimd", "i8mm"]),
        ("", []),
    ],
)
def test_processors_of_one_class_have_one_word(
    tmp_path: Path, lines: str, found: list[str]
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(lines)
    assert instruction_sets(tmp_path).split("+")[1:] == found
