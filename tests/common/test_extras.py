"""A missing package is reported with the extra that brings it; a missing module of ours is a bug."""

from __future__ import annotations

from importlib import import_module

import pytest

from quire.common.extras import needs_extra
from quire.errors import ConfigError


def test_a_missing_package_is_named_with_its_extra() -> None:
    with (
        pytest.raises(ConfigError, match=r"needs the package surely_absent.*'quire-llm\[serve\]'"),
        needs_extra("quire serve", "serve"),
    ):
        import_module("surely_absent.part")


def test_a_missing_module_of_ours_passes_as_it_is() -> None:
    with pytest.raises(ModuleNotFoundError), needs_extra("quire serve", "serve"):
        import_module("quire.surely_absent")
