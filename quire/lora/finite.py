"""Whether an adapter's numbers are any: one that is not finite makes every answer fail. Imports no
torch."""

from __future__ import annotations

from pathlib import Path

from quire.errors import CheckpointError
from quire.weights.tensor_file import StoredTensor, TensorFile

_EXPONENTS = {
    "F16": (2, 0x7C00), "BF16": (2, 0x7F80), "F32": (4, 0xFF << 23), "F64": (8, 0x7FF << 52),
}  # fmt: skip
"""Bytes of a number, and the bits of its exponent, all of which are set in NaN and infinity."""
_CHUNK_BYTES = 1 << 20


def check_finite(folder: Path, file: TensorFile) -> None:
    """Raise CheckpointError for a tensor with a number that is NaN or infinite, by its name."""
    for name, tensor in file.tensors.items():
        if tensor.dtype in _EXPONENTS and not _is_finite(file, tensor):
            raise CheckpointError(
                f"{folder}: {name[:150]} has numbers that are not finite (NaN or infinity), as a "
                "training that diverged leaves behind; no request could be answered with it"
            )


def _is_finite(file: TensorFile, tensor: StoredTensor) -> bool:
    import numpy as np

    num_bytes, exponent = _EXPONENTS[tensor.dtype]
    buffer = np.empty(_CHUNK_BYTES // num_bytes, f"<u{num_bytes}")
    for start in range(0, tensor.num_bytes, _CHUNK_BYTES):
        count = min(_CHUNK_BYTES, tensor.num_bytes - start) // num_bytes
        found = buffer[:count]
        file.read_into(memoryview(found.data).cast("B"), tensor.start + start)
        if np.any((found & exponent) == exponent):
            return False
    return True
