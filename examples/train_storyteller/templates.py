"""A small language for sentences with choices and slots: ``[Once|Long ago] {a_hero} lived {home}.``

Owns parsing and expanding of templates, and the last touch on the text: articles, capitals, spaces.
It knows nothing of heroes or plots. ``[a|b]`` takes one of its parts (they nest, and may be empty),
``{name}`` is looked up, ``{Name}`` is looked up and gets a capital letter.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

Lookup = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Slot:
    name: str


@dataclass(frozen=True, slots=True)
class Choice:
    parts: tuple["Sequence", ...]


@dataclass(frozen=True, slots=True)
class Sequence:
    items: tuple[str | Slot | Choice, ...]


class TemplateError(ValueError):
    """A template with unbalanced brackets or braces."""


_TOKEN = re.compile(r"[\[\]|]|\{[A-Za-z_]+\}|[^\[\]|{}]+|.")


@cache
def parse(text: str) -> Sequence:
    """The tree of a template; raises TemplateError where brackets do not match."""
    tokens = _TOKEN.findall(text)
    sequence, end = _sequence(tokens, 0, text)
    if end != len(tokens):
        raise TemplateError(
            f"unexpected {tokens[end]!r} in {text!r}; close every [ and put | only between [ and ]"
        )
    return sequence


def _sequence(tokens: list[str], position: int, text: str) -> tuple[Sequence, int]:
    items: list[str | Slot | Choice] = []
    while position < len(tokens) and tokens[position] not in ("|", "]"):
        token = tokens[position]
        if token == "[":
            choice, position = _choice(tokens, position + 1, text)
            items.append(choice)
            continue
        if token in "{}":
            raise TemplateError(f"a stray {token!r} in {text!r}; slots look like {{name}}")
        items.append(Slot(token[1:-1]) if token[0] == "{" else token)
        position += 1
    return Sequence(tuple(items)), position


def _choice(tokens: list[str], position: int, text: str) -> tuple[Choice, int]:
    parts: list[Sequence] = []
    while True:
        part, position = _sequence(tokens, position, text)
        parts.append(part)
        if position >= len(tokens):
            raise TemplateError(f"a [ is never closed in {text!r}")
        position += 1
        if tokens[position - 1] == "]":
            return Choice(tuple(parts)), position


def expand(text: str, lookup: Lookup, rng: random.Random) -> str:
    """One wording of the template, its slots filled by `lookup` (which may itself
    return expanded templates)."""
    return _expand(parse(text), lookup, rng)


def _expand(sequence: Sequence, lookup: Lookup, rng: random.Random) -> str:
    words = []
    for item in sequence.items:
        if isinstance(item, str):
            words.append(item)
        elif isinstance(item, Choice):
            words.append(_expand(rng.choice(item.parts), lookup, rng))
        else:
            value = lookup(item.name[0].lower() + item.name[1:])
            words.append(value[:1].upper() + value[1:] if item.name[0].isupper() else value)
    return "".join(words)


def article_for(word: str) -> str:
    """``a`` or ``an``, by the sound that the word begins with."""
    lowered = word.lower()
    if lowered.startswith(("uni", "use", "usu", "one", "eu")):
        return "a"
    return "an" if lowered[0] in "aeiou" or lowered.startswith(("hour", "honest", "heir")) else "a"


def _article(match: re.Match[str]) -> str:
    article = article_for(match.group(2))
    return (article.capitalize() if match.group(1) == "A" else article) + " "


def polish(text: str) -> str:
    """Right articles, a capital at the start of each sentence, single spaces,
    no space before a stop."""
    text = re.sub(r"[ \t]+", " ", text)
    text = re.sub(r" +([.,!?;:])", r"\1", text)
    text = re.sub(r"([!?])\.(?!\.)", r"\1", text)
    text = re.sub(r" *\n\n *", "\n\n", text).strip()
    text = re.sub(r"\b([Aa])n? (?=([A-Za-z]+))", _article, text)
    return re.sub(
        r'(^|(?<!\.)[.!?] |\.["\'] |\n\n)([a-z])',
        lambda match: match.group(1) + match.group(2).upper(),
        text,
    )
