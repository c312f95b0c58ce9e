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


@pytest.fixture
def vectors(shared: Path) -> Callable[[str], list[tuple[str, list[int]]]]:
    """Gives texts and their ids as llama.cpp publishes them for a vocabulary."""
    folder = shared / "data/tokenizers/llama_cpp_vectors"

    def read(name: str) -> list[tuple[str, list[int]]]:
        data = (folder / f"ggml-vocab-{name}.gguf.inp").read_bytes()
        texts = data.decode().split("\n__ggml_vocab_test__\n")
        lines = (folder / f"ggml-vocab-{name}.gguf.out").read_text().splitlines()
        ids = [[int(each) for each in line.split()] for line in lines]
        return list(zip(texts, ids, strict=False))

    return read
