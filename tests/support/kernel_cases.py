"""Cases of the GPU kernels' tests that only `make test-kernels` and a GPU run: interpreted,
they take seconds each."""

from __future__ import annotations

import os
from typing import Any

import pytest

IS_THOROUGH = (
    os.environ.get("QUIRE_TEST_KERNELS") == "all"
    or os.environ.get("QUIRE_TEST_DEVICE", "cpu") != "cpu"
)


def thorough(*values: Any) -> Any:
    """Parameters of such a case."""
    return pytest.param(
        *values, marks=pytest.mark.skipif(not IS_THOROUGH, reason="run by `make test-kernels`")
    )
