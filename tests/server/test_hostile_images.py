"""Hundreds of broken images over HTTP: each is answered, none takes the server or much memory along."""

from __future__ import annotations

import base64
import io
import os
import random
import struct
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from optional_packages import require
from served import Served, resident_bytes, serving
from vision_models import picture, write_llava, write_tokenizer

Image = pytest.importorskip("PIL.Image")
require("transformers")
pytestmark = pytest.mark.slow

NUM_FILES = int(os.environ.get("QUIRE_TEST_IMAGES", "400"))
MAX_RISE = 1_000_000_000
"""Two threads decode at once, each at most 40 million pixels: 4 bytes of each in Pillow, 3 twice
while they are taken out of it; and what the allocator keeps."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path: Path = tmp_path_factory.mktemp("models") / "llava"
    path.mkdir()
    write_llava(path)
    write_tokenizer(path)
    options = ("--dtype", "float32", "--kv-cache-memory", "4MiB", "--max-num-seqs", "8")
    with serving(*options, model=str(path)) as found:
        found.await_ready()
        yield found


def _files() -> list[bytes]:
    found = []
    for form in ("PNG", "JPEG", "WEBP", "BMP", "GIF"):
        buffer = io.BytesIO()
        Image.fromarray(picture(4, 24, 20)).save(buffer, form)
        found.append(buffer.getvalue())
    return found


def _bomb(width: int, height: int) -> bytes:
    """A small PNG of so many pixels, all of one colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    packer = zlib.compressobj(9)
    rows = b"".join(packer.compress(bytes(1 + 3 * width)) for _ in range(height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n"
    return start + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def _mutated(number: int, files: list[bytes], bombs: list[bytes]) -> bytes:
    rng = random.Random(number)
    if number % 200 == 199:
        return bombs[number // 200 % len(bombs)]
    data = bytearray(files[number % len(files)])
    if rng.random() < 0.2:
        del data[rng.randrange(len(data)) :]
    for _ in range(rng.randrange(1, 12)):
        if data:
            data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def _ask(served: Served, data: bytes) -> httpx.Response:
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1, "temperature": 0}
    return httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=120)


def test_broken_images_are_answered_and_leave_the_server_as_it_was(served: Served) -> None:
    files, bombs = _files(), [_bomb(6000, 6000), _bomb(30000, 30)]
    whole = _ask(served, files[0])
    assert whole.status_code == 200, whole.text
    _ask(served, bombs[0])  # what the allocator keeps of the largest one
    pids = [served.process.pid, served.engine_pid]
    before = [resident_bytes(pid) for pid in pids]
    with ThreadPoolExecutor(4) as pool:
        answers = list(
            pool.map(lambda n: _ask(served, _mutated(n, files, bombs)), range(NUM_FILES))
        )
    statuses = [each.status_code for each in answers]
    assert set(statuses) == {200, 400}, set(statuses)
    assert statuses.count(400) > NUM_FILES // 4
    for each in answers:
        if each.status_code == 400:
            error = each.json()["error"]
            assert error["param"] == "messages[0].content[0]" and len(error["message"]) < 400
    for pid, then in zip(pids, before, strict=True):
        assert resident_bytes(pid, "VmHWM") - then < MAX_RISE
    again = _ask(served, files[0])
    assert again.json()["choices"] == whole.json()["choices"]
    served.await_idle()
