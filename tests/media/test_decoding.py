"""Files become pixels, or one clear refusal, whatever they hold."""

from __future__ import annotations

import io
import random
import struct
import time
import zlib
from typing import Any

import numpy as np
import pytest
from vision_models import picture

from quire.errors import InvalidParameterError
from quire.media.decoding import MAX_EDGE, MAX_PIXELS, _BoundedReads, decode, from_object

Image = pytest.importorskip("PIL.Image")


def _file(image: Any, form: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _png(width: int, height: int, depth: int = 8, colour: int = 2, data: bytes = b"") -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", header)
        + _chunk(b"IDAT", data)
        + _chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("form", ["PNG", "BMP", "WEBP"])
def test_lossless_files_give_their_pixels(form: str) -> None:
    pixels = picture(1, 9, 14)
    options = {"lossless": True} if form == "WEBP" else {}
    assert np.array_equal(decode(_file(Image.fromarray(pixels), form, **options)), pixels)


def test_what_is_no_rgb_becomes_it_as_transformers_does() -> None:
    rgb = Image.fromarray(picture(2, 12, 10))
    for mode in ("L", "P", "RGBA", "LA", "1", "CMYK"):
        image = rgb.convert(mode)
        form = "JPEG" if mode == "CMYK" else "PNG"
        data = _file(image, form)
        again = Image.open(io.BytesIO(data))
        assert np.array_equal(decode(data), np.array(again.convert("RGB"))), mode


def test_scans_of_a_progressive_file_are_bounded() -> None:
    """Each is a pass over all pixels, and the last ones of this file have a few bytes."""
    data = _file(Image.fromarray(picture(3, 64, 64)), "JPEG", progressive=True)
    assert decode(data).shape == (64, 64, 3)
    last = data[data.rindex(b"\xff\xda") : -2]
    started = time.monotonic()
    with pytest.raises(InvalidParameterError, match="scans; at most 200"):
        decode(data[:-2] + last * 20_000 + data[-2:])
    assert time.monotonic() - started < 2.0


def test_a_transparent_palette_is_read() -> None:
    image = Image.fromarray(picture(2, 12, 10)).quantize(16)
    data = _file(image, transparency=bytes(range(16)))
    assert np.array_equal(decode(data), np.array(image.convert("RGB")))


def test_sixteen_bits_are_divided_not_cut() -> None:
    levels = np.array([[0, 255, 256, 32768, 65535]], np.uint16).repeat(3, 0)
    found = decode(_file(Image.fromarray(levels)))
    assert found[0, :, 0].tolist() == [0, 0, 1, 128, 255]
    assert np.array_equal(found[..., 0], found[..., 2])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_turns_the_image(orientation: int) -> None:
    from PIL import ImageOps

    image = Image.fromarray(picture(3, 16, 24))
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = _file(image, "PNG", exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    found = decode(data)
    assert np.array_equal(found, np.array(expected))
    assert found.shape[:2] == ((24, 16) if orientation > 4 else (16, 24))


def test_animated_files_are_refused() -> None:
    frames = [Image.fromarray(picture(n, 8, 8)) for n in range(3)]
    for form in ("GIF", "WEBP", "PNG"):
        data = _file(frames[0], form, save_all=True, append_images=frames[1:])
        with pytest.raises(InvalidParameterError, match="animated"):
            decode(data)
    assert decode(_file(frames[0], "GIF")).shape == (8, 8, 3)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "no image of a supported format"),
        (b"GIF89a", "."),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no image of a supported format"),
        (b"%!PS-Adobe-3.0\n", "no image of a supported format"),
        (_png(60_000, 60_000), f"at most {MAX_PIXELS:,}"),
        (_png(MAX_EDGE + 1, 300), f"{MAX_EDGE:,} a side"),
        (_png(20_000, 2_001), f"at most {MAX_PIXELS:,}"),
        (_png(1, 201), "200 times the other"),
        (_png(100, 100, data=zlib.compress(b"\0" * 50)), "broken|cannot be used"),
        (_png(100, 100, data=b"no zlib"), "broken"),
    ],
)
def test_hostile_files_are_refused_with_their_reason(data: bytes, says: str) -> None:
    with pytest.raises(InvalidParameterError, match=says) as caught:
        decode(data, "messages[0]")
    assert caught.value.param == "messages[0]"


def _bmp(width: int, height: int, runs: bytes) -> bytes:
    """A file in run-length encoding."""
    palette = b"".join(bytes((each, each, each, 0)) for each in range(256))
    begin = 54 + len(palette)
    head = struct.pack("<2sIHHI", b"BM", begin + len(runs), 0, 0, begin)
    form = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(runs), 0, 0, 256, 0)
    return head + form + palette + runs


_JPEG, _GIF = b"\xff\xd8\xff", b"GIF89a\x01\0\x01\0\x80\0\0" + bytes(6)


@pytest.mark.parametrize(
    "data",
    [
        _png(1, 1)[:33] + _chunk(b"aaAa", b"") * 3000 + _chunk(b"IEND", b""),
        _png(1, 1)[:33] + _chunk(b"IDAT", b"") * 3000 + _chunk(b"IEND", b""),
        _JPEG[:2] + b"\xff\xe5\x00\x02" * 3000,
        _JPEG[:2] + b"\xff\xe1\x00\x0aExif\0\0aa" * 3000,
        _JPEG + b"\xff" * 5000,
        _JPEG + b"\xfe\x00\x02" + bytes(5000),
        _GIF + b"\x21\xfe\x01a\x00" * 3000,
        _GIF + b"\x2c\0\0\0\0\x01\0\x01\0\0\x02\x02\x44\x01\0" * 3000 + b";",
        _bmp(100, 100, b"\x00\x02\x00\x00" * 3000),
    ],
)
def test_files_are_of_so_many_parts(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a decoder does for each of them it does in Python: 6 MB took up to 11 s."""
    monkeypatch.setattr(_BoundedReads, "num_left", 2000)
    with pytest.raises(InvalidParameterError, match="in too many parts"):
        decode(data)


def test_a_large_file_in_small_pieces_is_read() -> None:
    pixels = np.random.default_rng(3).integers(0, 256, (3000, 3500, 3), np.uint8)
    rows = np.concatenate([np.zeros((3000, 1), np.uint8), pixels.reshape(3000, -1)], axis=1)
    packed = zlib.compress(rows.tobytes(), 0)
    pieces = [_chunk(b"IDAT", packed[at : at + 1024]) for at in range(0, len(packed), 1024)]
    assert len(pieces) > 30_000
    head = _png(3500, 3000)[:33]
    assert np.array_equal(decode(b"".join([head, *pieces, _chunk(b"IEND", b"")])), pixels)


def test_run_length_encoding_is_for_small_images() -> None:
    row = b"\x64\x07\x00\x00"  # 100 pixels, and the row's end
    assert np.array_equal(decode(_bmp(100, 50, row * 50)), np.full((50, 100, 3), 7, np.uint8))
    with pytest.raises(InvalidParameterError, match="run-length encoding"):
        decode(_bmp(2000, 2000, row))


def test_truncated_files_are_refused() -> None:
    image = Image.fromarray(picture(4, 40, 40))
    for form in ("PNG", "JPEG", "WEBP", "BMP"):
        data = _file(image, form)
        for length in (len(data) // 2, 40, 10):
            with pytest.raises(InvalidParameterError):
                decode(data[:length])


def test_broken_files_never_raise_anything_else() -> None:
    rng = random.Random(5)
    image = Image.fromarray(picture(4, 20, 20))
    files = [_file(image, form) for form in ("PNG", "JPEG", "WEBP", "BMP", "GIF")]
    num_refused = 0
    for number in range(1000):
        data = bytearray(files[number % len(files)])
        for _ in range(rng.randrange(1, 12)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            assert decode(bytes(data)).shape[2] == 3
        except InvalidParameterError:
            num_refused += 1
    assert num_refused > 200


def test_images_that_pillow_cannot_bring_into_colours_are_refused() -> None:
    closed = Image.new("RGB", (8, 8))
    closed.close()
    for image, says in ((closed, "closed"), (Image.new("La", (8, 8)), "conversion")):
        with pytest.raises(InvalidParameterError, match=says):
            from_object(image)


def test_objects_of_a_script() -> None:
    pixels = picture(6, 11, 13)
    expected = decode(_file(Image.fromarray(pixels)))
    assert np.array_equal(from_object(pixels), expected)
    assert np.array_equal(from_object(Image.fromarray(pixels)), expected)
    assert np.array_equal(from_object(_file(Image.fromarray(pixels))), expected)
    assert from_object(pixels[..., 0]).shape == (11, 13, 3)
    for wrong in (pixels.astype(np.float32), pixels[..., :2], pixels[None], [[1]], "x"):
        with pytest.raises(InvalidParameterError):
            from_object(wrong)
    floats = Image.fromarray(np.ones((4, 4), np.float32))
    with pytest.raises(InvalidParameterError, match="floating-point"):
        from_object(floats)
