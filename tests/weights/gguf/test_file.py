"""The GGUF container: what it holds, and hundreds of ways of damaging it."""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from pathlib import Path

import pytest
from gguf_files import write_gguf

from quire.errors import CheckpointError
from quire.weights.gguf.file import read_gguf

METADATA = {
    "general.architecture": "llama",
    "general.alignment": 32,
    "a.number": 7,
    "a.flag": True,
    "a.float": 0.5,
    "tokenizer.ggml.tokens": ["a", "bc", "über"],
    "tokenizer.ggml.scores": [0.0, -1.5, 2.0],
    "tokenizer.ggml.token_type": [1, 3, 6],
}
TENSORS = {
    "token_embd.weight": ((4, 32), 8, bytes(4 * 34)),
    "output_norm.weight": ((8,), 0, bytes(32)),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", METADATA, TENSORS)


def test_the_header_is_read_as_it_was_written(path: Path) -> None:
    file = read_gguf(path)
    read = {
        key: value if isinstance(value, str | int | float) else list(value)
        for key, value in file.metadata.items()
    }
    assert read == METADATA
    embedding, norm = file.tensors.values()
    assert (embedding.shape, embedding.encoding.name, embedding.num_bytes) == ((4, 32), "Q8_0", 136)
    assert norm.offset == embedding.offset + 160 and embedding.offset % 32 == 0
    assert path.stat().st_size == norm.offset + 32


def test_files_of_the_shared_data_are_read(shared: Path, tmp_path: Path) -> None:
    import lzma

    folder = shared / "data/tokenizers/llama_cpp_vocab_gguf"
    for packed in sorted(folder.glob("*.gguf.xz")):
        (tmp_path / "vocab.gguf").write_bytes(lzma.decompress(packed.read_bytes()))
        file = read_gguf(tmp_path / "vocab.gguf")
        tokens = file.metadata["tokenizer.ggml.tokens"]
        assert isinstance(tokens, list) and len(tokens) > 10_000


def _info(name: bytes, dims: tuple[int, ...], number: int, offset: int) -> bytes:
    head = struct.pack("<Q", len(name)) + name + struct.pack("<I", len(dims))
    return head + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", number, offset)


def _file(num_tensors: int, num_values: int, rest: bytes, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_values) + rest


HUGE = 2**63


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "truncated"),
        (b"GGUF", "truncated"),
        (b"PK\3\4" + bytes(40), "is no GGUF file"),
        (_file(0, 0, b"", version=1), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648"),
        (_file(HUGE, 0, b""), "announces 9223372036854775808 tensors"),
        (_file(0, HUGE, b""), "announces 9223372036854775808 metadata values"),
        (_file(0, 1, struct.pack("<Q", HUGE)), "string of 9223372036854775808 bytes"),
        (_file(0, 1, struct.pack("<Q1sIQ", 1, b"k", 8, 1 << 27)), "truncated"),
        (
            _file(0, 1, struct.pack("<Q1sIIQ", 1, b"k", 9, 8, HUGE)),
            "array of 9223372036854775808 values",
        ),
        (_file(0, 1, struct.pack("<Q1sIIQ", 1, b"k", 9, 12, 1 << 22)), "truncated"),
        (_file(0, 1, struct.pack("<Q1sIIQ", 1, b"k", 9, 9, 1)), "array of values of the type 9"),
        (_file(0, 1, struct.pack("<Q1sI", 1, b"k", 77)), "unknown type 77"),
        (_file(0, 2, struct.pack("<Q1sIB", 1, b"k", 0, 1) * 2), "metadata key 'k' twice"),
        (_file(1, 0, _info(b"t", (0,), 0, 0)), r"'t' \[0\], which F32 cannot hold"),
        (_file(1, 0, _info(b"t", (33,), 8, 0)), r"'t' \[33\], which Q8_0 cannot hold"),
        (_file(1, 0, _info(b"t", (8,) * 5, 0, 0)), "of 5 dimensions"),
        (_file(1, 0, _info(b"t", (), 0, 0)), "of 0 dimensions"),
        (_file(1, 0, _info(b"t", (2**40, 2**40), 0, 0)), "takes 4835703278458516698824704 bytes"),
        (_file(1, 0, _info(b"t", (8,), 16, 0)), "in the encoding 16; supported: F32, F16, Q4_0"),
        (_file(1, 0, _info(b"t", (8,), 0, HUGE)), "is truncated"),
        (_file(2, 0, _info(b"t", (8,), 0, 0) * 2) + bytes(99), "tensor 't' twice"),
        (
            _file(2, 0, _info(b"t", (8,), 0, 0) + _info(b"u", (8,), 0, 16)) + bytes(99),
            "'t' and 'u' in the same place",
        ),
        (
            _file(0, 1, struct.pack("<Q17sII", 17, b"general.alignment", 4, 0)),
            "general.alignment=0",
        ),
    ],
)
def test_malformed_files_are_refused(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        read_gguf(path)


NUM_DAMAGED = int(os.environ.get("QUIRE_TEST_DAMAGED", "600"))
_NUMBERS = (0, 1, 2, 8, 9, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1)


def _damaged(data: bytes, rng: random.Random) -> bytes:
    """Cut, flip bits, or write telling numbers where counts, lengths, types and offsets lie."""
    header_len = len(data) - 192
    found = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(header_len - 8)
        kind = rng.randrange(5)
        if kind == 0:
            return bytes(found[: rng.randrange(len(found))])
        if kind == 1:
            found[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            found[at : at + 8] = struct.pack("<Q", rng.choice(_NUMBERS))
        elif kind == 3:
            found[at : at + 4] = struct.pack("<I", rng.choice(_NUMBERS) & 0xFFFFFFFF)
        else:
            stop = at + rng.randrange(1, 40)
            found[at:stop] = found[stop : stop + rng.randrange(40)]
    return bytes(found)


def _random(rng: random.Random) -> bytes:
    """Anything, behind a header that may be a sound one: its counts, or all of it."""
    noise = rng.randbytes(rng.choice([0, 7, 40, 3000]))
    kind = rng.randrange(4)
    if kind == 0:
        return noise
    if kind == 1:
        return b"GGUF" + noise
    few = (rng.randrange(4), rng.randrange(4))
    if kind == 2:
        return _file(*few, noise, version=rng.choice([2, 3]))
    key = struct.pack("<Q3sI", 3, b"a.b", rng.randrange(14))
    return _file(few[0], 1 + few[1], key + noise)


def test_random_bytes_are_refused_or_read(tmp_path: Path) -> None:
    target, rng = tmp_path / "random.gguf", random.Random(11)
    num_refused = 0
    for _ in range(NUM_DAMAGED):
        target.write_bytes(_random(rng))
        try:
            read_gguf(target)
        except CheckpointError:
            num_refused += 1
    assert num_refused > NUM_DAMAGED // 2


def test_a_file_that_is_cut_short_while_it_is_read_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a mapped file would end in SIGBUS."""
    whole = os.fstat

    def longer(descriptor: int) -> os.stat_result:
        status = whole(descriptor)
        return os.stat_result((*status[:6], status.st_size + (1 << 20), *status[7:10]))

    data = path.read_bytes()
    path.write_bytes(data[:60])
    monkeypatch.setattr(os, "fstat", longer)
    with pytest.raises(CheckpointError, match="truncated while it is being read"):
        read_gguf(path)


def test_no_damage_does_harm(path: Path, tmp_path: Path) -> None:
    """Either a file whose tensors lie inside it, or CheckpointError;
    and no allocation beyond twice the file and a little."""
    data, rng = path.read_bytes(), random.Random(5)
    num_refused = 0
    target = tmp_path / "damaged.gguf"
    tracemalloc.start()
    try:
        for _ in range(NUM_DAMAGED):
            target.write_bytes(_damaged(data, rng))
            size = target.stat().st_size
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                file = read_gguf(target)
                assert all(
                    tensor.offset + tensor.num_bytes <= size for tensor in file.tensors.values()
                )
            except CheckpointError:
                num_refused += 1
            assert tracemalloc.get_traced_memory()[1] - before < 2 * size + (256 << 10)
    finally:
        tracemalloc.stop()
    assert NUM_DAMAGED / 6 < num_refused < NUM_DAMAGED
