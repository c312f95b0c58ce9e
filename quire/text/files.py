"""The text side of a model folder: which files there are and what `tokenizer_config.json` says.

Owns reading and checking of the small JSON files and of the chat templates' sources. Reads nothing
else of the folder and executes nothing; unknown keys are left alone, because every model family
adds its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

from quire.common.small_files import (
    exists,
    is_file,
    is_folder,
    read_optional_object,
    read_text,
)
from quire.errors import CheckpointError, ModelNotFoundError

_MAX_CONFIG_BYTES: Final = 16 << 20  # the largest published tokenizer_config.json is below 2 MiB
_MAX_TOKENIZER_BYTES: Final = 256 << 20  # the largest published tokenizer.json is below 40 MiB
_MAX_TEMPLATE_BYTES: Final = 4 << 20
_MAX_TEMPLATES: Final = 64
_NAMED_TOKENS: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)
_EXTRA_TOKENS: Final = ("additional_special_tokens", "extra_special_tokens")


@dataclass(frozen=True, slots=True)
class TextConfig:
    """What the text files of a model say beside `tokenizer.json`.

    named_tokens: role ("bos_token", "eos_token", ...) to the token's text. extra_special_tokens:
    further tokens declared special. padding_side, truncation_side: where batches of texts are
    filled up and cut. chat_templates: name to Jinja source; "default" is the one used unless
    another is named.
    """

    named_tokens: Mapping[str, str] = field(default_factory=dict)
    extra_special_tokens: tuple[str, ...] = ()
    add_bos_token: bool = False
    add_eos_token: bool = False
    model_max_length: int | None = None
    padding_side: str = "right"
    truncation_side: str = "right"
    chat_templates: Mapping[str, str] = field(default_factory=dict)


def read_text_config(folder: Path) -> TextConfig:
    """Read `tokenizer_config.json`, `special_tokens_map.json` and the chat templates of a folder,
    all optional.

    Raises CheckpointError for a file that is not what its name says.
    """
    config = {
        **read_optional_object(folder / "special_tokens_map.json", _MAX_CONFIG_BYTES),
        **read_optional_object(folder / "tokenizer_config.json", _MAX_CONFIG_BYTES),
    }
    named = {
        role: text for role in _NAMED_TOKENS if (text := _token_text(config.get(role))) is not None
    }
    extra = [
        text
        for key in _EXTRA_TOKENS
        for each in _token_list(config.get(key))
        if (text := _token_text(each))
    ]
    return TextConfig(
        named_tokens=named,
        extra_special_tokens=tuple(extra),
        add_bos_token=config.get("add_bos_token") is True,
        add_eos_token=config.get("add_eos_token") is True,
        model_max_length=_length(config.get("model_max_length")),
        padding_side="left" if config.get("padding_side") == "left" else "right",
        truncation_side="left" if config.get("truncation_side") == "left" else "right",
        chat_templates=_read_templates(folder, config.get("chat_template")),
    )


def read_tokenizer_json(folder: Path) -> str:
    """Return the text of `tokenizer.json`. Raises ModelNotFoundError or CheckpointError,
    saying how to obtain one."""
    if not is_folder(folder):
        raise ModelNotFoundError(f"no folder {str(folder)!r} to read a tokenizer from")
    path = folder / "tokenizer.json"
    if is_file(path):
        return read_text(path, _MAX_TOKENIZER_BYTES)
    others = [
        name
        for name in ("tokenizer.model", "tokenizer.model.v3", "tekken.json")
        if is_file(folder / name)
    ]
    if others:
        raise CheckpointError(
            f"{str(folder)!r} has {others[0]} but no tokenizer.json, the only tokenizer "
            "format that is read; "
            "convert it once with transformers: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    raise CheckpointError(
        f"{str(folder)!r} has no tokenizer.json; add it, or name a folder that has one with "
        "tokenizer (--tokenizer); LLM takes token ids alone with skip_tokenizer_init=True"
    )


def _length(value: Any) -> int | None:
    """Return a number of tokens; None where it is absent, or the enormous one that stands for
    absent."""
    return (
        int(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e15
        else None
    )


def _token_text(value: Any) -> str | None:
    """Return the text of a token given as a string or as a serialised added token."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _token_list(value: Any) -> list[Any]:
    if isinstance(value, dict):  # newer files name their extra tokens
        return list(value.values())
    return value if isinstance(value, list) else []


def _read_templates(folder: Path, inline: Any) -> dict[str, str]:
    """Chat templates by name; files take precedence over `tokenizer_config.json`,
    as they do for transformers."""
    templates: dict[str, str] = {}
    if isinstance(inline, str):
        templates["default"] = inline
    for each in _token_list(inline) if isinstance(inline, list) else []:
        if (
            isinstance(each, dict)
            and isinstance(each.get("name"), str)
            and isinstance(each.get("template"), str)
        ):
            templates[each["name"]] = each["template"]
    for name in ("additional_chat_templates", "chat_templates"):
        for path in sorted(islice((folder / name).glob("*.jinja"), _MAX_TEMPLATES)):
            templates[path.stem] = read_text(path, _MAX_TEMPLATE_BYTES)
    # where processors keep it
    kept = read_optional_object(folder / "chat_template.json", _MAX_TEMPLATE_BYTES)
    if isinstance(kept.get("chat_template"), str):
        templates["default"] = kept["chat_template"]
    if exists(folder / "chat_template.jinja"):
        templates["default"] = read_text(folder / "chat_template.jinja", _MAX_TEMPLATE_BYTES)
    return templates
