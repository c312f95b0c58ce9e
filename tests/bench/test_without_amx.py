"""What a command sees that runs without AMX: the kernel says no to tiles,
and nothing else is different."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ASK = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
answer = libc.syscall(158, {request}, 18)
sys.exit(100 + ctypes.get_errno() if answer else 100)
"""
REQUEST_PERMISSION = 0x1023
# 100 and the number of the error, EPERM: no program that fails in another way ends so
REFUSED = 101

pytestmark = pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() != "x86_64",
    reason="AMX is refused on Linux and x86-64 alone",
)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.without_amx", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_tiles_are_refused_to_children_as_well() -> None:
    asked = ASK.format(request=REQUEST_PERMISSION)
    assert run(sys.executable, "-c", asked).returncode == REFUSED
    child = (
        "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', "
        f"{asked!r}]).returncode)"
    )
    assert run(sys.executable, "-c", child).returncode == REFUSED


def test_other_requests_reach_the_kernel() -> None:
    unknown = 0x1FFF
    assert run(sys.executable, "-c", ASK.format(request=unknown)).returncode > REFUSED


def test_our_kernels_use_no_tiles() -> None:
    code = (
        "from quire.kernels import cpu; assert cpu.IMPORT_ERROR is not None or 'amx' not in "
        "cpu.supported_isas()"
    )
    result = run(sys.executable, "-c", code)
    assert result.returncode == 0, result.stderr


def test_wrong_commands_are_said_so() -> None:
    assert "usage" in run().stderr
    missing = run("no-such-program")
    assert missing.returncode == 1 and "no-such-program: No such file" in missing.stderr
