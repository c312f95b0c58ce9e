"""Prompts as users give them, brought into one form."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, NotRequired, SupportsIndex, TypedDict, TypeVar

from quire.core.beam_params import BeamSearchParams
from quire.core.images import PlacedImage
from quire.core.params import SamplingParams
from quire.errors import InvalidParameterError, NotAvailableError
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.media.reader import ImageReader, ReadImage
    from quire.media.sources import ImageSource


class PromptDict(TypedDict, total=False):
    """A prompt with more to say: text or token ids,
    and optionally a salt that keeps its cached KV to itself."""

    prompt: str
    prompt_token_ids: Sequence[int]
    cache_salt: str
    multi_modal_data: Mapping[str, Any]
    mm_processor_kwargs: Mapping[str, Any]
    multi_modal_uuids: Mapping[str, Any]


class TextPrompt(TypedDict):
    """A prompt of text."""

    prompt: str
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[Mapping[str, Any]]
    mm_processor_kwargs: NotRequired[Mapping[str, Any]]
    multi_modal_uuids: NotRequired[Mapping[str, Any]]


class TokensPrompt(TypedDict):
    """A prompt of token ids. Its text, where it is given too, is only handed back."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[Mapping[str, Any]]
    mm_processor_kwargs: NotRequired[Mapping[str, Any]]
    multi_modal_uuids: NotRequired[Mapping[str, Any]]


Prompt = str | Sequence[int] | PromptDict | TextPrompt | TokensPrompt
"""Text, token ids, or a dict with either."""

_NO_MEDIA = (
    "prompt_embeds",
    "encoder_prompt",
)
"""Keys of prompts that mean nothing here."""
_KEYS = (
    "prompt", "prompt_token_ids", "cache_salt", "multi_modal_data", "mm_processor_kwargs",
    "multi_modal_uuids",
)  # fmt: skip


class ParsedPrompt(NamedTuple):
    """What the engine needs of a prompt."""

    text: str | None
    token_ids: Sequence[int]
    cache_salt: str | None = None
    images: tuple[PlacedImage, ...] = ()
    """Whose places the token ids have."""


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or several as a list. A flat list of integers is one prompt of token
    ids."""
    if isinstance(prompts, str | bytes | bytearray | Mapping) or not isinstance(prompts, Iterable):
        return [prompts]
    listed: list[Prompt] = list(prompts)  # type: ignore[arg-type]
    if listed and all(isinstance(item, SupportsIndex) for item in listed):
        return [listed]  # type: ignore[list-item]
    return listed


def parse_prompt(
    prompt: Prompt,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    images: ImageReader | None = None,
) -> ParsedPrompt:
    """Tokenize if need be, and check; `images` reads those of a prompt, for a model that reads any.
    Raises InvalidParameterError for anything that is not a prompt."""
    text: Any = None
    token_ids: Any = None
    salt: Any = None
    media: Any = None
    settings: Any = None
    uuids: Any = None
    if isinstance(prompt, str):
        text = prompt
    elif isinstance(prompt, Mapping):
        text, token_ids, salt, media, settings, uuids = map(prompt.get, _KEYS)
        for key in _NO_MEDIA:
            if prompt.get(key):
                raise NotAvailableError(
                    f"a prompt with {key!r} is not available in this version; give text or "
                    "token ids"
                )
        unknown = set(prompt) - {*_KEYS, *_NO_MEDIA}
        if unknown or (text is None and token_ids is None):
            raise InvalidParameterError(
                "a prompt dict needs 'prompt' or 'prompt_token_ids' (and may have 'cache_salt'), "
                f"not {sorted(map(str, prompt))}",
                param="prompt",
            )
    elif isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Iterable):
        text = prompt
    else:
        token_ids = prompt
    if not isinstance(salt, str | None):
        raise InvalidParameterError(
            f"cache_salt must be text, not {type(salt).__name__}", param="cache_salt"
        )
    shown = text if isinstance(text, str) else None
    sources = _sources(media, settings, uuids)
    if images is None:
        if sources or settings:
            raise no_images("multi_modal_data" if sources else "mm_processor_kwargs")
        token_ids = _encode(text, tokenizer) if token_ids is None else token_ids
        return ParsedPrompt(shown, check_token_ids(token_ids, vocab_size), salt)
    read = images.read(sources, salt or "")
    if token_ids is None:
        token_ids = _encode(_marked(text, tokenizer, images, read), tokenizer)
    expanded = images.expand(check_token_ids(token_ids, vocab_size), read)
    return ParsedPrompt(shown, expanded.token_ids, salt, expanded.images)


def no_images(param: str) -> InvalidParameterError:
    """Return what an image is answered where the model reads none."""
    return InvalidParameterError(
        f"{param}: this model reads text alone; load one that reads images, such as LLaVA",
        param=param,
    )


def _marked(
    text: object, tokenizer: Tokenizer | None, images: ImageReader, read: Sequence[ReadImage]
) -> object:
    """Return a text with what its marks of images stand for, where the model has any."""
    vision = images.limits.vision
    if vision.frame is None or tokenizer is None or not isinstance(text, str):
        return text
    from quire.engine.front.image_marks import marks_of, write_plainly

    return write_plainly(text, marks_of(vision, tokenizer, read))


def _sources(media: object, settings: object, uuids: object) -> list[ImageSource]:
    """Return the images of a prompt's `multi_modal_data`, to be read with these settings, and
    named by these uuids."""
    if settings is not None and not isinstance(settings, Mapping):
        raise InvalidParameterError(
            "mm_processor_kwargs must be a dict such as {'max_pixels': 501760}, not "
            f"{type(settings).__name__}",
            param="mm_processor_kwargs",
        )
    listed, names = _listed(media, "multi_modal_data"), _listed(uuids, "multi_modal_uuids")
    if uuids is not None and media is None:
        listed = [None] * len(names)
    if names and len(names) != len(listed):
        raise InvalidParameterError(
            f"multi_modal_uuids has {len(names)} for {len(listed)} images; give one for each, or "
            "None for those without",
            param="multi_modal_uuids",
        )
    if not listed:
        return []
    from quire.media.known import check_uuid
    from quire.media.sources import ImageSource

    found = []
    for number, each in enumerate(listed):
        where = f"multi_modal_data['image'][{number}]"
        uuid = check_uuid(names[number], f"multi_modal_uuids['image'][{number}]") if names else None
        source = each if isinstance(each, ImageSource) else ImageSource(each, where)
        found.append(source._replace(settings=settings, uuid=uuid or source.uuid))
    return found


def _listed(given: object, param: str) -> list[Any]:
    """Return what a dict by kinds of media has for images."""
    if given is None:
        return []
    if not isinstance(given, Mapping):
        raise InvalidParameterError(
            f"{param} must be a dict such as {{'image': ...}}, not {type(given).__name__}",
            param=param,
        )
    others = sorted(str(kind) for kind, each in given.items() if kind != "image" and _is_any(each))
    if others:
        raise NotAvailableError(
            f"{param} with {', '.join(map(repr, others))} is not available in this version; "
            "images are read under 'image'"
        )
    images = given.get("image")
    return list(images) if isinstance(images, list | tuple) else [] if images is None else [images]


def _is_any(given: object) -> bool:
    """Whether something is given: not nothing, and no empty list."""
    return given is not None and not (isinstance(given, list | tuple) and not given)


def _encode(text: object, tokenizer: Tokenizer | None) -> list[int]:
    if not isinstance(text, str):
        raise InvalidParameterError(
            f"a prompt must be text or token ids, not {type(text).__name__}", param="prompt"
        )
    if tokenizer is None:
        raise InvalidParameterError(
            "this engine has no tokenizer, so it takes token ids alone; give "
            "{'prompt_token_ids': [...]}",
            param="prompt",
        )
    # The author of a raw prompt writes the template's part too, so special tokens are meant; in a
    # chat they are not.
    return tokenizer.encode(text, parse_special=True)


def check_token_ids(token_ids: Iterable[Any], vocab_size: int) -> tuple[int, ...]:
    """Return a prompt's token ids as plain integers. Raises InvalidParameterError for what is none,
    or not the model's."""
    try:
        checked = tuple(map(operator.index, token_ids))
    except TypeError:
        raise InvalidParameterError(
            "prompt_token_ids must be a list of integers", param="prompt_token_ids"
        ) from None
    for token_id in checked:
        if not 0 <= token_id < vocab_size:
            raise InvalidParameterError(
                f"token id {token_id} is not in the model's vocabulary of {vocab_size}",
                param="prompt_token_ids",
            )
    if not checked:
        raise InvalidParameterError("the prompt is empty; give at least one token", param="prompt")
    return checked


AnyParams = TypeVar(
    "AnyParams", SamplingParams, BeamSearchParams, SamplingParams | BeamSearchParams
)


def with_truncation(params: AnyParams, tokenization_kwargs: Mapping[str, Any] | None) -> AnyParams:
    """Return parameters with what `tokenization_kwargs` says of a prompt's length;
    NotAvailableError for what else it says."""
    kwargs = {} if tokenization_kwargs is None else tokenization_kwargs
    if not isinstance(kwargs, Mapping):
        raise InvalidParameterError(
            f"tokenization_kwargs must be a dict, not {type(kwargs).__name__}",
            param="tokenization_kwargs",
        )
    given = {name: value for name, value in kwargs.items() if value is not None}
    keep = given.pop("truncate_prompt_tokens", None)
    if given:
        names = ", ".join(map(repr, sorted(map(str, given))))
        raise NotAvailableError(
            f"tokenization_kwargs with {names} is not available in this version; give token "
            "ids as the prompt"
        )
    if keep is None:
        return params
    if isinstance(params, BeamSearchParams):
        raise NotAvailableError(
            "truncate_prompt_tokens is not available for beam search; shorten the prompt's "
            "token ids"
        )
    return replace(params, truncate_prompt_tokens=keep)
