"""One architecture's values in a GGUF file's metadata, read with their types checked."""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import UnsupportedModelError
from quire.weights.gguf.file import GgufFile


@dataclass(frozen=True, slots=True)
class Metadata:
    """Keys are given without the architecture that they begin with."""

    file: GgufFile
    architecture: str
    """As llama.cpp calls it."""

    def value(self, key: str, default: object = None) -> object:
        """Return a value of any type."""
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a whole number. Raises UnsupportedModelError for anything else, or where it is
        missing and there is no default."""
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(key, "one whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number, as `integer` does."""
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(key, "one number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return a truth value, as `integer` does."""
        value = self.value(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def refuse(self, key: str, supported: str) -> UnsupportedModelError:
        """Return the error that a value is not supported."""
        full = f"{self.architecture}.{key}"
        shown = repr(self.file.metadata.get(full))[:60]
        return UnsupportedModelError(f"{self.file.path} has {full}={shown}; supported: {supported}")
