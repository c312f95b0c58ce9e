"""What an adapter is, whatever it is called and wherever it lies: a digest of its files' content.
Imports no torch."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from quire.common.small_files import open_regular
from quire.errors import CheckpointError
from quire.lora.layout import FILES

_CHUNK_BYTES = 1 << 20


def content_digest(folder: Path) -> str:
    """Compute BLAKE2b-256 (RFC 7693) of the adapter in a folder. Raises CheckpointError."""
    state = hashlib.blake2b(digest_size=32)
    for name in FILES:
        path = folder / name
        try:
            with open_regular(path, 0) as file:
                state.update(f"{name} {os.fstat(file.fileno()).st_size}\n".encode())
                while data := file.read(_CHUNK_BYTES):
                    state.update(data)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None
    return state.hexdigest()
