"""Which packages are installed that some features need, and a bare machine with a GPU may lack."""

from __future__ import annotations

import importlib
import importlib.util

import pytest


def has_package(name: str) -> bool:
    """Whether it can be imported."""
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def require(name: str) -> None:
    """Skip a module where a package is missing, as `pytest.importorskip` does, without importing it:
    some take seconds, in each worker of the suite, and most workers run none of these tests."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"could not import {name!r}", allow_module_level=True)


HAS_GRAMMARS = has_package("llguidance")
needs_grammars = pytest.mark.skipif(not HAS_GRAMMARS, reason="structured outputs need llguidance")
HAS_IMAGES = has_package("PIL")
needs_images = pytest.mark.skipif(not HAS_IMAGES, reason="images need Pillow")
