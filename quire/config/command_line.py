"""vLLM's ways to write a command line, as words that a parser of ours knows: `--max_model_len`,
`-tp 2`, `-O3`, and keys of a JSON option one by one, `--speculative-config.method ngram`.

Owns the spelling alone: which options there are is the parser's, and what they mean is said where
they are declared. Standard library only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Any

from quire.common.json_text import RepeatedKeyError, read_json
from quire.errors import ConfigError

SHORT_NAMES = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-q": "--quantization",
    "-O": "--optimization-level",
    "-cc": "--compilation-config",
    "-ac": "--attention-config",
    "-sc": "--speculative-config",
}
"""Which apply where a parser has the long name, and not the short one for something else."""

_OPTION = re.compile(r"(--?[A-Za-z][A-Za-z0-9_-]*)(\.[^=]*)?(=.*)?\Z", re.DOTALL)
_LEVEL = re.compile(r"-O=?([0-9]+)\Z")


def known_words(words: Sequence[str], known: Collection[str]) -> list[str]:
    """Return a command line in words that a parser with the options `known` takes. Raises
    ConfigError for an option that is given both as JSON and by its keys."""
    result, keys, rest = list[str](), dict[str, dict[str, Any]](), list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            result += [word, *rest]
            break
        name, path, value = _divided(word, known)
        if name is None:
            result.append(word)
        elif path is None:
            result.append(name + (value or ""))
        else:
            if name not in keys:
                result.append(name)  # its value is put behind it below
            if value is None and rest and not rest[0].startswith("--"):
                value = f"={rest.pop(0)}"
            _put(keys.setdefault(name, {}), path, True if value is None else _read(value[1:]), word)
    for name, given in keys.items():
        if any(each == name or each.startswith(f"{name}=") for each in words):
            raise ConfigError(f"{name} is given as a whole and by its keys; give it one way")
        result[result.index(name)] = f"{name}={json.dumps(given)}"
    return result


def _divided(word: str, known: Collection[str]) -> tuple[str | None, str | None, str | None]:
    """Return an option's long name, the keys behind it and its value with the sign of equality;
    no name for what is no option that `known` has."""
    if (level := _LEVEL.match(word)) and "-O" not in known:
        word = f"-O={level[1]}"
    found = _OPTION.match(word)
    if found is None:
        return None, None, None
    short, path, value = found.groups()
    name = short.replace("_", "-") if short.startswith("--") else short
    if name not in known and name in SHORT_NAMES:
        name = SHORT_NAMES["-cc" if name == "-O" and path else name]
    return (name if name in known else None), path, value


def _put(given: dict[str, Any], path: str, value: Any, word: str) -> None:
    *folders, last = path.removeprefix(".").split(".")
    for key in folders:
        given = given.setdefault(key, {})
        if not isinstance(given, dict):
            raise ConfigError(f"{word} names a key of {key!r}, which was given a value of its own")
    if not all((*folders, last)):
        raise ConfigError(f"{word} has an empty key; write --option.key VALUE")
    if last in given:
        raise ConfigError(f"{word.partition('=')[0]} is given twice; give it once")
    given[last] = value


def _read(text: str) -> Any:
    try:
        return read_json(text)
    except RepeatedKeyError as error:
        raise ConfigError(f"{text}: {error}") from None
    except ValueError:
        return text
