"""Which packages are installed that some features need, and a bare machine with a GPU may lack."""

from __future__ import annotations

import importlib

import pytest


def has_package(name: str) -> bool:
    """Whether it can be imported."""
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


HAS_GRAMMARS = has_package("llguidance")
needs_grammars = pytest.mark.skipif(not HAS_GRAMMARS, reason="structured outputs need llguidance")
HAS_IMAGES = has_package("PIL")
needs_images = pytest.mark.skipif(not HAS_IMAGES, reason="images need Pillow")
