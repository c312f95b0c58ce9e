"""Image parts of messages are told apart from whatever else a client writes there."""

from __future__ import annotations

from typing import Any

import pytest

from quire.errors import InvalidParameterError
from quire.media.parts import image_part, is_image, take_images, with_image_parts

URL = "data:image/png;base64,AA=="


@pytest.mark.parametrize(
    "part", ["image", None, 3, [], {}, {"type": 1}, {"type": []}, {"type": {}}, {"type": "text"}]
)
def test_what_is_no_image(part: Any) -> None:
    assert not is_image(part)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "image_url", "image_url": URL},
        {"type": "input_image", "image_url": URL},
        {"type": "image", "source": {"type": "url", "url": URL}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
    ],
)
def test_every_way_to_write_an_image_names_the_same_one(part: Any) -> None:
    assert is_image(part)
    messages = with_image_parts([{"role": "user", "content": ["x", part]}])
    shown, (source,) = take_images(messages)
    assert shown == [{"role": "user", "content": ["x", {"type": "image"}]}]
    assert source[:2] == (URL, "messages[0].content[1]")


@pytest.mark.parametrize(
    "part", [{"type": "image"}, {"type": "image_url", "image_url": {"url": 3}}]
)
def test_an_image_without_a_url_is_refused(part: Any) -> None:
    with pytest.raises(InvalidParameterError, match="needs a URL"):
        image_part(part, "messages[0]")
