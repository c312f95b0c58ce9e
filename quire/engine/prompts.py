"""Prompts as users give them, brought into one form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypedDict

from quire.errors import InvalidParameterError
from quire.text.tokenizer import Tokenizer


class PromptDict(TypedDict, total=False):
    """A prompt with more to say: text or token ids, and optionally a salt that keeps its cached KV to itself."""

    prompt: str
    prompt_token_ids: Sequence[int]
    cache_salt: str


Prompt = str | Sequence[int] | PromptDict
"""Text, token ids, or a dict with either."""


class ParsedPrompt(NamedTuple):
    """What the engine needs of a prompt."""

    text: str | None
    token_ids: tuple[int, ...]
    cache_salt: str | None


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list. A flat list of integers is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    listed: list[Prompt] = list(prompts)  # type: ignore[arg-type]
    if listed and all(isinstance(item, int) for item in listed):
        return [listed]  # type: ignore[list-item]
    return listed


def parse_prompt(prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int) -> ParsedPrompt:
    """Tokenize if need be, and check. Raises InvalidParameterError for anything that is not a prompt."""
    text, token_ids, salt = None, None, None
    if isinstance(prompt, str):
        text = prompt
    elif isinstance(prompt, Mapping):
        text, token_ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
        unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
        if unknown or (text is None and token_ids is None):
            raise InvalidParameterError(
                f"a prompt dict needs 'prompt' or 'prompt_token_ids' (and may have 'cache_salt'), not {sorted(prompt)}",
                param="prompt",
            )
    else:
        token_ids = prompt
    if token_ids is None:
        assert text is not None
        token_ids = _encode(text, tokenizer)
    return ParsedPrompt(text, _check_token_ids(token_ids, vocab_size), salt)


def _encode(text: str, tokenizer: Tokenizer | None) -> list[int]:
    if tokenizer is None:
        raise InvalidParameterError(
            "this engine has no tokenizer, so it takes token ids alone; give {'prompt_token_ids': [...]}", param="prompt"
        )
    if not isinstance(text, str):
        raise InvalidParameterError(f"prompt={text!r} must be text", param="prompt")
    # Whoever writes a raw prompt writes the template's part too, so special tokens are meant; in a chat they are not.
    return tokenizer.encode(text, parse_special=True)


def _check_token_ids(token_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    try:
        checked = tuple(int(token_id) for token_id in token_ids)
    except (TypeError, ValueError):
        raise InvalidParameterError(
            f"prompt_token_ids must be integers, not {str(token_ids)[:80]}", param="prompt_token_ids"
        ) from None
    for token_id in checked:
        if not 0 <= token_id < vocab_size:
            raise InvalidParameterError(
                f"token id {token_id} is not in the model's vocabulary of {vocab_size}", param="prompt_token_ids"
            )
    if not checked:
        raise InvalidParameterError("the prompt is empty; give at least one token", param="prompt")
    return checked
