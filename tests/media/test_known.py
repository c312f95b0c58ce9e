"""Images by name: found again by those who named them, and forgotten within bounds."""

from __future__ import annotations

import pytest

from quire.core.images import Image
from quire.errors import InvalidParameterError
from quire.media.known import MAX_NAME_LEN, ImageName, KnownImages, check_uuid


def _image(number: int, size: int = 12) -> tuple[Image, ...]:
    return (Image(bytes([number]) * 32, bytes(size), 2, 2, 1),)


def _name(uuid: str, scope: str = "a", **settings: int) -> ImageName:
    return ImageName.of(scope, uuid, settings)


def test_a_name_leads_to_the_last_image_of_its_scope_and_settings() -> None:
    known = KnownImages()
    known.keep(_name("x"), _image(1))
    known.keep(_name("x", "b"), _image(2))
    assert known.find(_name("x")) == _image(1)
    assert known.find(_name("x", "b")) == _image(2)
    assert known.find(_name("x", "c")) is None
    assert known.find(_name("x", max_pixels=9)) is None
    known.keep(_name("x"), _image(3))
    assert known.find(_name("x")) == _image(3)


def test_what_was_used_least_recently_is_forgotten_first() -> None:
    known = KnownImages(max_bytes=30)
    known.keep(_name("x"), _image(1))
    known.keep(_name("y"), _image(2))
    assert known.find(_name("x")) is not None
    known.keep(_name("z"), _image(3))
    assert [known.find(_name(each)) is None for each in "xyz"] == [False, True, False]
    known.keep(_name("huge"), _image(4, 31))
    assert all(known.find(_name(each)) is None for each in ("x", "z", "huge"))
    few = KnownImages(max_names=1)
    few.keep(_name("x"), _image(1))
    few.keep(_name("y"), _image(2))
    assert few.find(_name("x")) is None and few.find(_name("y")) is not None


@pytest.mark.parametrize("wrong", ["", "x" * (MAX_NAME_LEN + 1), 3, b"x", ["x"]])
def test_names_are_short_texts(wrong: object) -> None:
    with pytest.raises(InvalidParameterError, match="text of 1 to 256"):
        check_uuid(wrong, "uuid")
    assert check_uuid(None, "uuid") is None
