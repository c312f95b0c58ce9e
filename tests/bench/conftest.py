"""The tiny model's folder and its declaration."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny(shared: Path) -> str:
    """A real model of 260 thousand parameters."""
    return str(shared / "data" / "models" / "stories260K" / "hf")


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """Where docs/ and benchmarks/ lie."""
    return Path(__file__).parent.parent.parent
