"""Real tokenizers for the text tests: decompressed once a session, loaded once each."""

from __future__ import annotations

import lzma
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from quire.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(
    shared: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Gives a plain folder with the named tokenizer's files."""

    @cache
    def unpack(name: str) -> Path:
        if name == "stories260K":
            return shared / "data/models/stories260K/hf"
        source, folder = shared / "data/tokenizers" / name, tmp_path_factory.mktemp(name)
        (folder / "tokenizer.json").write_bytes(
            lzma.decompress((source / "tokenizer.json.xz").read_bytes())
        )
        for extra in source.glob("*.json"):
            shutil.copyfile(extra, folder / extra.name)
        return folder

    return unpack


@pytest.fixture(scope="session")
def load(tokenizer_folder: Callable[[str], Path]) -> Callable[[str], Tokenizer]:
    """Gives the named tokenizer."""
    return cache(lambda name: Tokenizer.from_folder(tokenizer_folder(name)))
