"""The interpreter's own arithmetic, with the BLAS kernels of several processors: what holds here
must hold on any machine.

OpenBLAS reads `OPENBLAS_CORETYPE` when numpy is imported, so each case is a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]
_CPU_INFO = Path("/proc/cpuinfo")
_HAS_AVX2 = _CPU_INFO.is_file() and "avx2" in _CPU_INFO.read_text(errors="replace").split()

pytestmark = pytest.mark.skipif(not _HAS_AVX2, reason="OpenBLAS's kernels for AVX2 cannot run here")

_ROWS_ALONE = """
import numpy as np
from quire.kernels.triton.interpretation import dot

draws = np.random.default_rng(0)
for inner, columns in ((16, 16), (32, 128), (64, 64), (100, 24), (128, 64)):
    a, b = (draws.standard_normal(shape).astype(np.float32) for shape in ((64, inner), (inner, columns)))
    for right in (b, b.T.copy().T):
        whole = dot(a, right, np.zeros((64, columns), np.float32))
        assert np.allclose(whole, a @ right, atol=1e-4)
        for num_rows in (1, 2, 3, 7, 16, 63):
            part = dot(a[:num_rows], right, np.zeros((num_rows, columns), np.float32))
            assert np.array_equal(part, whole[:num_rows]), (inner, columns, num_rows)
"""


def _run(core_type: str, *command: str) -> None:
    environment = os.environ | {"OPENBLAS_CORETYPE": core_type}
    done = subprocess.run(
        [sys.executable, *command],
        env=environment,
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.parametrize("core_type", ["Haswell", "Zen"])
def test_a_dots_rows_do_not_depend_on_each_other(core_type: str) -> None:
    _run(core_type, "-c", _ROWS_ALONE)


@pytest.mark.slow
def test_the_kernels_bits_hold_with_the_blas_of_a_processor_with_avx2_only() -> None:
    files = [f"tests/kernels/triton/{name}.py" for name in ("test_attention", "test_linear")]
    _run("Haswell", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "no_bit", *files)
