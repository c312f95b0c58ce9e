"""Model folders, each made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import TEXTS, make_folder


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Short and long ones."""
    return TEXTS


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any]]:
    """`folder_of(family, ...)` as `make_folder`, each made once."""
    made: dict[str, tuple[Path, Any]] = {}

    def folder_of(family: str, **options: Any) -> tuple[Path, Any]:
        key = f"{family} {sorted(options.items())}"
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            made[key] = folder, make_folder(folder, family, **options)
        return made[key]

    torch.set_num_threads(1)
    return folder_of
