"""The tiny model, and the command line as people start it: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Quire = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def tiny(shared: Path) -> str:
    """A real model of 260 thousand parameters."""
    return str(shared / "data" / "models" / "stories260K" / "hf")


@pytest.fixture(scope="session")
def quire() -> Quire:
    """Runs `python -m quire` with arguments; keywords go to `subprocess.run`."""

    def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        settings: dict[str, Any] = {
            "capture_output": True,
            "text": True,
            "timeout": 60,
            "env": environment,
            **options,
        }
        done: subprocess.CompletedProcess[str] = subprocess.run(
            [sys.executable, "-m", "quire", *arguments], **settings
        )
        return done

    return run


@pytest.fixture
def chat_template(tmp_path: Path) -> str:
    """A chat template file, since the tiny model has none."""
    path = tmp_path / "chat.jinja"
    path.write_text("{% for message in messages %}{{ message['content'] }} {% endfor %}")
    return str(path)
