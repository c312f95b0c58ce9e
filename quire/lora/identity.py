"""What an adapter is, whatever it is called and wherever it lies: a digest of its files' content.
Imports no torch."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from quire.errors import CheckpointError
from quire.lora.layout import FILES

_CHUNK_BYTES = 1 << 20


def content_digest(folder: Path) -> str:
    """Compute BLAKE2b-256 (RFC 7693) of the adapter in a folder. Raises CheckpointError."""
    state = hashlib.blake2b(digest_size=32)
    for name in FILES:
        path = folder / name
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb", buffering=0) as file:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise CheckpointError(f"{path} is not a regular file")
                state.update(f"{name} {status.st_size}\n".encode())
                while data := file.read(_CHUNK_BYTES):
                    state.update(data)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None
    return state.hexdigest()
