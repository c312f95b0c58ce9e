"""Image parts of chat messages, as the APIs of OpenAI and Anthropic and vLLM's `LLM.chat` write
them: told apart from text, so that a template sees where an image stands and not what it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import InvalidParameterError
from quire.media.known import check_uuid
from quire.media.sources import ImageSource

SHOWN = {"type": "image"}
"""What a template sees of an image."""
IMAGE_TYPES = frozenset({"image_url", "input_image", "image", "image_pil"})
_SOURCE = "source"


def is_image(part: object) -> bool:
    """Whether a part of a content is an image."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return isinstance(kind, str) and kind in IMAGE_TYPES


def image_part(part: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a part as `take_images` reads it, whatever API it came by; with a `uuid` alone, it is
    the image that came with it before. Raises InvalidParameterError for one that names none."""
    content, uuid = _content(part, where), check_uuid(part.get("uuid"), f"{where}.uuid")
    if content is None and uuid is None:
        raise InvalidParameterError(
            f"{where}: an image needs a URL: "
            '{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}',
            param=where,
        )
    return {**SHOWN, _SOURCE: ImageSource(content, where, uuid=uuid)}


def take_images(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[Sequence[Mapping[str, Any]], list[ImageSource]]:
    """Return the messages as templates read them, and their images in order."""
    sources: list[ImageSource] = []

    def shown(part: Any) -> Any:
        if not isinstance(part, Mapping) or _SOURCE not in part or part.get("type") != "image":
            return part
        sources.append(ImageSource(*part[_SOURCE]))  # a list, where it was stored meanwhile
        return dict(SHOWN)

    found = [
        {**message, "content": [shown(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]
    return (found, sources) if sources else (messages, sources)


def with_image_parts(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages of a script with their image parts in one form. Raises
    InvalidParameterError."""
    each_one = messages if isinstance(messages, list | tuple) else [messages]
    for each in each_one:
        if not isinstance(each, Mapping):
            raise InvalidParameterError(
                f"a message is of type {type(each).__name__}; give messages as a list such as "
                '[{"role": "user", "content": ...}], or several such lists',
                param="messages",
            )
    return [
        {
            **message,
            "content": [
                image_part(part, f"messages[{number}].content[{place}]") if is_image(part) else part
                for place, part in enumerate(message["content"])
            ],
        }
        if isinstance(message.get("content"), list | tuple)
        else message
        for number, message in enumerate(messages)
    ]


def _content(part: Mapping[str, Any], where: str) -> Any:
    """What names an image: a URL, or pixels that a script has in memory."""
    for key in ("image_pil", "image"):
        if (given := part.get(key)) is not None:
            return given
    url = part.get("image_url", part.get("url"))
    if isinstance(url, Mapping):
        url = url.get("url")
    if isinstance(url, str):
        return url
    source = part.get(_SOURCE)
    if not isinstance(source, Mapping):
        return None
    data, kind = source.get("data"), source.get("media_type")
    if source.get("type") == "base64" and isinstance(data, str) and isinstance(kind, str):
        return f"data:{kind};base64,{data}"
    found = source.get("url")
    return found if source.get("type") == "url" and isinstance(found, str) else None
