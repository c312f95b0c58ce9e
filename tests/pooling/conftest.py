"""Model folders, each made once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from folders import TEXTS, make_folder
from servers import serve_model


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


@pytest.fixture
def serve() -> Callable[..., Any]:
    """`with serve(model=...) as post` starts a server; `post(path, body)` gives its answer."""

    @contextmanager
    def serve(**options: Any) -> Iterator[Callable[[str, dict[str, Any]], Any]]:
        with serve_model(**options) as running:
            yield (
                lambda path, body: (
                    httpx.post(f"{running.url}{path}", json=body, timeout=60)
                    .raise_for_status()
                    .json()
                )
            )

    return serve
