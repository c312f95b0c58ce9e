"""The `tokenizers` library, met at one boundary: what it may be given, and what becomes of its
panics.

Owns loading a `tokenizer.json` into the library, and `contained`, through which every call into it
goes that reads a file or a text. The library is Rust: a malformed file, or a text that its regular
expressions give up on, may end in a panic, which Python gets as an exception outside the Exception
tree; uncaught, it would end the process.

Steps that replace text are bounded before anything is loaded, since the library itself applies them
while it loads:
nine steps that each make ten characters of one would make a billion.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from quire.errors import CheckpointError, QuireError, RequestError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_MAX_GROWTH: Final = 64
"""Characters that the steps together may make of one."""
_MAX_STAGES: Final = 64
_MAX_DEPTH: Final = 16
_MAX_ADDED_CHARS: Final = 256
_MAX_REASON_CHARS: Final = 200
_ASCII_DIGITS: Final = frozenset("234567")
_MAY_BE_EMPTY: Final = re.compile(r"[?*|{^$]|\\[bBAzZG]")
"""What a regular expression holds that can match where nothing is."""


def load_backend(tokenizer_json: str) -> Backend:
    """Return the library's tokenizer. Raises CheckpointError for a document that is not one,
    or that it cannot bear."""
    from tokenizers import Tokenizer as Backend

    for name in ("normalizer", "decoder"):
        for stages in _find_sections(tokenizer_json, name):
            check_growth(stages, name)
    _check_subwords(tokenizer_json)
    with contained(CheckpointError, "tokenizer.json cannot be used"):
        backend = Backend.from_str(tokenizer_json)
        backend.no_truncation()
        backend.no_padding()
        return backend


def encode_bare(backend: Backend, text: str) -> list[int]:
    """Return token ids of a text without what a post-processor adds. Raises RequestError for a text
    that it cannot encode.

    The batch call is the one that lets other threads run meanwhile: a plain `encode` of 1 MB keeps
    the interpreter to itself for seconds (measured: 4.1 s without a pause, against pauses of at
    most 9 ms).
    """
    with contained(RequestError, "the model's tokenizer cannot encode this text"):
        ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids


def beginning_of(backend: Backend, text: str, num_tokens: int) -> str:
    """Return the beginning of a text up to the end of its token of this number, or to the end of
    the character before, where that token is a part of one. By itself it has no more tokens. Raises
    RequestError as `encode_bare` does."""
    least_step = 1
    while True:
        with contained(RequestError, "the model's tokenizer cannot encode this text"):
            offsets = backend.encode_batch([text], add_special_tokens=False)[0].offsets
        if len(offsets) <= num_tokens:
            return text
        end = min(offsets[num_tokens - 1][1], offsets[num_tokens][0])
        # What is left may have more tokens by itself than it had before what was cut off (Unigram):
        # it is cut again, each time by twice as much at least, so that this comes to an end.
        text = text[: max(0, min(end, len(text) - least_step))]
        least_step *= 2


@contextmanager
def contained(kind: type[QuireError], what: str) -> Iterator[None]:
    """Turn what the library raises, panics included, into an error of ours."""
    try:
        yield
    except QuireError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = str(error) or type(error).__name__
        raise kind(f"{what}: {reason[:_MAX_REASON_CHARS]}") from None


def check_growth(stages: Any, name: str) -> None:
    """Refuse steps that could make a huge text of a short one. Raises CheckpointError."""
    growth = 1
    for num_before, stage in enumerate(_flatten(stages, name)):
        growth *= _growth(stage)
        if growth > _MAX_GROWTH or num_before >= _MAX_STAGES:
            raise CheckpointError(
                f"tokenizer.json has a {name} whose steps make more than {_MAX_GROWTH} "
                "characters of one, or are more "
                f"than {_MAX_STAGES}; no text could be encoded in bounded time"
            )


def _flatten(stage: Any, name: str, depth: int = 0) -> Iterator[dict[str, Any]]:
    if not isinstance(stage, dict):
        return
    if depth > _MAX_DEPTH:
        raise CheckpointError(
            f"tokenizer.json has a {name} that is nested more than {_MAX_DEPTH} deep"
        )
    nested = [each for key in ("normalizers", "decoders") for each in _list(stage.get(key))]
    if stage.get("type") != "Sequence":
        yield stage
    for each in nested:
        yield from _flatten(each, name, depth + 1)


def _growth(stage: dict[str, Any]) -> int:
    """Characters that a step makes of one, at most."""
    kind = stage.get("type")
    added = (
        stage.get("prepend")
        if kind == "Prepend"
        else stage.get("content")
        if kind == "Replace"
        else None
    )
    if not isinstance(added, str):
        return 1
    if len(added) > _MAX_ADDED_CHARS:
        return _MAX_GROWTH + 1
    if kind == "Prepend":
        return 1
    pattern = stage.get("pattern")
    match pattern:
        case {"String": str(text)} if text:
            return max(1, math.ceil(len(added) / len(text)))
        case {"Regex": str(text)} if text and not _MAY_BE_EMPTY.search(text):
            return max(1, len(added))
    return 1 + len(added)  # before every character


def _find_sections(document: str, name: str) -> Iterator[Any]:
    """Yield what a JSON document may mean by the key `name`, without reading all of it:
    a vocabulary takes a second."""
    if _has_escaped_letters(document):  # the key may be spelt otherwise
        yield _parsed(document).get(name)
        return
    key, at = f'"{name}"', 0
    while (at := document.find(key, at)) >= 0:
        at += len(key)
        if (value := re.compile(r"\s*:\s*(?=\{)").match(document, at)) is not None:
            with contained(CheckpointError, f"tokenizer.json has a {name} that cannot be read"):
                yield json.JSONDecoder().raw_decode(document, value.end())[0]


def _has_escaped_letters(document: str) -> bool:
    """Return whether an ASCII character is written as `\\u00..`, which no program has a reason to
    do."""
    at = -1
    while (at := document.find("\\u00", at + 1)) >= 0:
        if document[at + 4 : at + 5] in _ASCII_DIGITS:
            return True
    return False


def _parsed(document: str) -> dict[str, Any]:
    with contained(CheckpointError, "tokenizer.json cannot be used"):
        content = json.loads(document)
    return content if isinstance(content, dict) else {}


def _check_subwords(document: str) -> None:
    """Refuse a prefix of subwords that BPE's merges do not have.

    The library cuts it off all the same, in the middle of a character if need be, and the panic
    about that is one that it does not survive: the process ends.
    """
    key, at, is_used = '"continuing_subword_prefix"', 0, _has_escaped_letters(document)
    while not is_used and (at := document.find(key, at)) >= 0:
        at += len(key)
        is_used = re.compile(r'\s*:\s*"[^"]').match(document, at) is not None
    model = _parsed(document).get("model") if is_used else None
    if not isinstance(model, dict) or not isinstance(model.get("merges"), list):
        return
    prefix = model.get("continuing_subword_prefix") or ""
    pairs = [each.split(" ") if isinstance(each, str) else each for each in model["merges"]]
    fits = isinstance(prefix, str) and prefix.isascii()
    if not fits or not all(
        isinstance(pair, list) and str(pair[-1:][0]).startswith(prefix) for pair in pairs if pair
    ):
        raise CheckpointError(
            f"tokenizer.json has model.continuing_subword_prefix={str(prefix)[:20]!r}, with "
            "which its merges do not begin"
        )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
