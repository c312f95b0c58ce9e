"""Headers of safetensors files: what the format allows, and that nothing else is believed."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire.errors import CheckpointError
from quire.weights.tensor_file import TensorFile


def _write(path: Path, header: object, data: bytes = b"") -> Path:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    return path


def _entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(6, dtype=torch.float32).view(2, 3),
        "b": torch.ones(5, dtype=torch.int8),
        "c": torch.zeros(0, 4, dtype=torch.bfloat16),
        "d": torch.tensor(3, dtype=torch.int64),
        "e": torch.zeros(4, dtype=torch.float8_e4m3fn),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    file = TensorFile(tmp_path / "x.safetensors")
    assert {name: (stored.shape, stored.num_bytes) for name, stored in file.tensors.items()} == {
        name: (tuple(tensor.shape), tensor.nbytes) for name, tensor in tensors.items()
    }
    buffer = bytearray(24)
    file.read_into(memoryview(buffer), file.tensors["a"].start)
    assert struct.unpack("6f", buffer) == (0, 1, 2, 3, 4, 5)
    assert not file.has_changed()
    file.close()


def test_a_file_ends_where_it_ends(tmp_path: Path) -> None:
    file = TensorFile(_write(tmp_path / "x", {"a": _entry(0, 8, [2])}, bytes(8)))
    with pytest.raises(OSError, match="shorter"):
        file.read_into(memoryview(bytearray(100)), 0)


@pytest.mark.parametrize(
    ("header", "num_bytes", "reason"),
    [
        ({"a": _entry(0, 8, [3])}, 8, "does not take 8 bytes"),
        ({"a": _entry(0, 8, [2]), "b": _entry(4, 12, [2])}, 12, "begins at byte"),
        ({"a": _entry(0, 8, [2]), "b": _entry(12, 20, [2])}, 20, "begins at byte"),
        ({"a": _entry(4, 12, [2])}, 12, "begins at byte"),
        ({"a": _entry(0, 8, [2])}, 9, "end at byte"),
        ({"a": _entry(0, 8, [2])}, 7, "end at byte"),
        ({"a": _entry(8, 0, [2])}, 8, "not described"),
        ({"a": _entry(0, 0, [-1, 0])}, 0, "not described"),
        ({"a": _entry(0, 4, [True])}, 4, "not described"),
        ({"a": _entry(0, 8, [2], "F31")}, 8, "not described"),
        ({"a": {"dtype": "F32", "shape": [2]}}, 8, "not described"),
        ({"a": 7}, 0, "not described"),
        ([1], 0, "no object"),
        (b'{"a": 1, "a": 1}', 0, "given twice"),
        (b"\xff\xfe{}", 0, "decode"),
        (b"{", 0, "a header of 1 bytes"),
        (b"[" * 100_000, 0, "recursion"),
    ],
)
def test_what_breaks_a_rule_is_refused(
    tmp_path: Path, header: object, num_bytes: int, reason: str
) -> None:
    path = _write(tmp_path / "bad", header, bytes(num_bytes))
    with pytest.raises(CheckpointError, match=reason):
        TensorFile(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        TensorFile(tmp_path)
