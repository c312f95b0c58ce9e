"""Image parts of chat messages, as the APIs of OpenAI and Anthropic and vLLM's `LLM.chat` write
them: told apart from text, so that a template sees where an image stands and not what it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import InvalidParameterError, NotAvailableError
from quire.media.known import check_uuid
from quire.media.sources import ImageSource

SHOWN = {"type": "image"}
"""What a template sees of an image."""
IMAGE_TYPES = frozenset({"image_url", "input_image", "image", "image_pil"})
_SOURCE = "source"
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of parts that are text, and where they have it."""
_UNREAD = frozenset(
    {"video", "video_url", "input_video", "audio", "audio_url", "input_audio", "file", "input_file"}
)
"""Types of parts that a template may have a place for, and no model here reads."""


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


def with_parts(messages: Sequence[Mapping[str, Any]], template: str) -> list[Mapping[str, Any]]:
    """Return messages of a script with the parts of their contents in one form: texts, images, and
    what else a chat template of this source reads. Raises InvalidParameterError or
    NotAvailableError for others, which a template would pass over."""
    each_one = messages if isinstance(messages, list | tuple) else [messages]
    for each in each_one:
        if not isinstance(each, Mapping):
            raise InvalidParameterError(
                f"a message is of type {type(each).__name__}; give messages as a list such as "
                '[{"role": "user", "content": ...}], or several such lists',
                param="messages",
            )
    return [_with_parts(message, number, template) for number, message in enumerate(messages)]


def _with_parts(message: Mapping[str, Any], number: int, template: str) -> Mapping[str, Any]:
    content, where = message.get("content"), f"messages[{number}].content"
    if content is None or isinstance(content, str):
        return message
    if not isinstance(content, list | tuple):
        raise InvalidParameterError(
            f"{where}: it must be a text or a list of parts, not {type(content).__name__}",
            param=where,
        )
    parts = [_part(part, f"{where}[{place}]", template) for place, part in enumerate(content)]
    return {**message, "content": parts}


def _part(part: Any, where: str, template: str) -> Mapping[str, Any]:
    """Return a part of a content, which may be a text alone, as vLLM takes it, too."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise InvalidParameterError(
            f'{where}: a part is an object such as {{"type": "text", "text": ...}}, not '
            f"{type(part).__name__}",
            param=where,
        )
    if is_image(part):
        return image_part(part, where)
    kind = part.get("type", "text")
    if not isinstance(kind, str):
        raise InvalidParameterError(f"{where}: its type must be a text", param=where)
    if kind in _TEXTS:
        text = part.get(_TEXTS[kind])
        if not isinstance(text, str):
            raise InvalidParameterError(f"{where}: its {_TEXTS[kind]} must be a text", param=where)
        return {**part, "type": "text", "text": text}
    if kind in _UNREAD or not any(f"{quote}{kind}{quote}" in template for quote in "\"'"):
        raise NotAvailableError(
            f"{where}: parts of type {kind[:40]!r} are not possible: the model, or its chat "
            "template, does not read them"
        )
    return part


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
