"""Image parts of messages are told apart from whatever else a client writes there."""

from __future__ import annotations

from typing import Any

import pytest

from quire.errors import InvalidParameterError, NotAvailableError
from quire.media.parts import image_part, is_image, take_images, with_parts

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
    messages = with_parts([{"role": "user", "content": ["x", part]}], "")
    shown, (source,) = take_images(messages)
    text = {"type": "text", "text": "x"}
    assert shown == [{"role": "user", "content": [text, {"type": "image"}]}]
    assert source[:2] == (URL, "messages[0].content[1]")


@pytest.mark.parametrize(
    "part", [{"type": "image"}, {"type": "image_url", "image_url": {"url": 3}}]
)
def test_an_image_without_a_url_is_refused(part: Any) -> None:
    with pytest.raises(InvalidParameterError, match="needs a URL"):
        image_part(part, "messages[0]")


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("a", {"type": "text", "text": "a"}),
        ({"text": "a"}, {"type": "text", "text": "a"}),
        ({"type": "input_text", "text": ""}, {"type": "text", "text": ""}),
        (
            {"type": "refusal", "refusal": "no"},
            {"type": "text", "text": "no", "refusal": "no"},
        ),
        ({"type": "thinking", "thinking": "a"}, {"type": "thinking", "thinking": "a"}),
    ],
)
def test_parts_of_text_have_one_form(part: Any, expected: dict[str, str]) -> None:
    template = "{% if part['type'] == 'thinking' %}"
    (message,) = with_parts([{"role": "user", "content": [part]}], template)
    assert message == {"role": "user", "content": [expected]}


@pytest.mark.parametrize(
    "part",
    [
        5,
        None,
        [],
        {},
        {"type": "text"},
        {"type": "text", "text": None},
        {"type": 5, "text": "a"},
        {"type": "output_text", "text": ["a"]},
        {"type": "video", "video": "a"},
        {"type": "input_audio", "input_audio": {}},
        {"type": "thinking", "thinking": "a"},
        {"type": "", "text": "a"},
    ],
)
def test_no_part_is_passed_over(part: Any) -> None:
    template = "{% if part.type == 'video' %}<video>{% elif 'text' in part %}{% endif %}"
    with pytest.raises((InvalidParameterError, NotAvailableError), match=r"messages\[1\].content"):
        with_parts(
            [{"role": "user", "content": "x"}, {"role": "user", "content": ("a", part)}], template
        )


@pytest.mark.parametrize("content", [5, True, {"type": "text", "text": "a"}, b"a"])
def test_a_content_is_a_text_or_a_list(content: Any) -> None:
    with pytest.raises(InvalidParameterError, match="a text or a list of parts, not"):
        with_parts([{"role": "user", "content": content}], "")
    fine: list[Any] = ["a", None, []]
    for each in fine:
        assert with_parts([{"role": "user", "content": each}], "")
