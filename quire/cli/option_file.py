"""A file of options for a command line: YAML, or TOML where its name ends so.

Owns the words that a file's keys stand for; which options there are, and what the command line says
otherwise, is the parser's. Reads nothing but the file, by a loader that makes plain values only.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quire.common.bounded_files import read_whole
from quire.errors import ConfigError

MAX_BYTES = 1 << 20


def read_options(path: str) -> dict[str, Any]:
    """Return the file's keys, in its order, and their values. Raises ConfigError, with the line and
    column of what is wrong."""
    try:
        text = read_whole(Path(path).expanduser(), MAX_BYTES).decode("utf-8")
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"config={path!r} cannot be read: {reason}") from None
    options = _read_toml(path, text) if path.endswith(".toml") else _read_yaml(path, text)
    if not isinstance(options, dict) or not all(isinstance(key, str) for key in options):
        raise ConfigError(
            f"config={path!r} must be a mapping of options to values, such as 'port: 8001'"
        )
    return options


def _read_toml(path: str, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"config={path!r}: {error}") from None


def _read_yaml(path: str, text: str) -> Any:
    import yaml  # takes 10 ms

    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return {}
        _refuse_repeated(path, root)
        return loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"config={path!r}: {error.problem}{_place(error.problem_mark)}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"config={path!r}: {' '.join(str(error).split())}") from None
    except (ValueError, RecursionError) as error:  # of a date that is none, or of deep lists
        raise ConfigError(f"config={path!r}: {error}") from None


def _refuse_repeated(path: str, root: Any) -> None:
    """Refuse a key that comes twice in one mapping, however deep, of which YAML's loader takes the
    last."""
    nodes, seen = [root], set[int]()
    while nodes:
        node = nodes.pop()
        if not isinstance(node.value, list) or id(node) in seen:  # a text, or one behind an anchor
            continue
        seen.add(id(node))
        said: set[str] = set()
        for each in node.value:
            key, *value = each if isinstance(each, tuple) else (each,)
            nodes += value or [key]
            if value and isinstance(key.value, str):
                if key.value in said:
                    place = _place(key.start_mark)
                    raise ConfigError(f"config={path!r}: {key.value!r} comes twice{place}")
                said.add(key.value)


def _place(mark: Any) -> str:
    return "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"


def words_for(key: str, value: Any, actions: Mapping[str, argparse.Action]) -> Iterator[str]:
    """Yield the words of a command line that say what a key of the file says. `actions` are the
    parser's, by their options. A key without a value says nothing. Raises ConfigError for a value
    that is none of JSON."""
    name = f"--{key.replace('_', '-')}"
    action, negated = actions.get(name), f"--no-{name[2:]}"
    if isinstance(value, list) and isinstance(action, argparse._AppendAction):
        for each in value:
            yield f"{name}={_text(each)}"
    elif value is False and negated in actions:
        yield negated
    elif isinstance(value, bool) and action is not None and action.nargs == 0:
        yield from [name] if value else []
    elif value is not None:
        yield f"{name}={_text(value)}"


def _text(value: Any) -> str:
    if not isinstance(value, dict | list | bool):
        return str(value)
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:  # a date, or a list within itself
        raise ConfigError(f"{error}; a value must be one of JSON") from None
