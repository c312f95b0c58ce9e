"""Spinning is limited before torch loads libgomp, and never against the user's word."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = "import os, {first}; print(os.environ.get('GOMP_SPINCOUNT'))"


@pytest.mark.slow_except("*environment[!3]*")
@pytest.mark.parametrize(
    ("first", "environment", "expected"),
    [
        ("quire", {}, "2000"),
        ("quire", {"GOMP_SPINCOUNT": "7"}, "7"),
        ("quire", {"OMP_WAIT_POLICY": "active"}, "None"),
        ("torch, quire", {}, "None"),
    ],
)
def test_import_limits_spinning(first: str, environment: dict[str, str], expected: str) -> None:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    command = [sys.executable, "-c", SCRIPT.format(first=first)]
    result = subprocess.run(
        command, env=inherited | environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == expected
