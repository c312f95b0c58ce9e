"""Shared by all tests: where the shared data lies, and one thread for torch so that timings and loads stay modest."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("QUIRE_SHARED", Path(__file__).parent.parent.parent / "shared"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared models, traces and goldens; tests that need it are skipped where it is missing."""
    if not SHARED.is_dir():
        pytest.skip(f"no shared data at {SHARED} (set QUIRE_SHARED)")
    return SHARED
