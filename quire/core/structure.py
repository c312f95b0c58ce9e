"""What form an answer must have: the public parameters, checked once, and their translation into
the plan's `Grammar`.

Owns names (vLLM's), limits and the translation. Whether a grammar can be compiled at all is found
out by `quire.grammar`, which has the compiler; when it is compiled is the scheduler's business.
"""

from __future__ import annotations

import json as json_module
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

from quire.core.grammars import Grammar
from quire.core.json_schema import checked_schema
from quire.errors import InvalidParameterError

MAX_REGEX_LEN = 32 << 10
MAX_CHOICES = 10_000
MAX_CHOICES_LEN = 256 << 10
"""Characters of all choices together."""
MAX_GRAMMAR_LEN = 64 << 10
"""A chain of 6,000 rules, 110 kB, took the compiler 2 s."""
_NOT_ASKED = ("json_object", False)
_BEGINS_GBNF = re.compile(
    r"(?:[ \t\r\n]+|#[^\n]*|//[^\n]*)*+[A-Za-z0-9_][A-Za-z0-9_.\-]*[ \t\r\n]*::="
)
_FORMS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The form of an answer: exactly one of the first five. Names are vLLM's.

    Raises `InvalidParameterError` with `param` "structured_outputs.<name>".
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as text or decoded: the answer is a JSON value that it accepts,
    with properties in its order."""
    regex: str | None = None
    """The whole answer matches this regular expression (Rust's syntax; no look-around,
    no back-references)."""
    choice: list[str] | None = None
    """The answer is one of these."""
    grammar: str | None = None
    """A context-free grammar: in Lark's notation, as llguidance reads it, where the rule `start` is
    the answer; or in llama.cpp's (GBNF; vLLM says EBNF), where `root` is. Which one is seen by
    `::=` in its first rule.
    """
    json_object: bool | None = None
    """The answer is a JSON object, of any form."""
    disable_any_whitespace: bool = False
    """JSON without any space or line break; otherwise one space or one line break with
    indentation may stand between parts."""
    wire: Grammar = field(init=False, compare=False, repr=False)
    """What the engine gets."""

    def __post_init__(self) -> None:
        given = [
            name
            for name in _FORMS
            if getattr(self, name) is not None and (name, getattr(self, name)) != _NOT_ASKED
        ]
        if len(given) != 1:
            what = f"{' and '.join(given)} are given together" if given else "it asks for nothing"
            raise InvalidParameterError(
                f"structured_outputs: {what}; give exactly one of {', '.join(_FORMS)}",
                param="structured_outputs",
            )
        object.__setattr__(
            self, "wire", getattr(self, f"_from_{given[0]}")(f"structured_outputs.{given[0]}")
        )

    @classmethod
    def of_grammar(cls, wire: Grammar) -> StructuredOutputsParams:
        """Make the parameters of a generated grammar, which is known to be possible."""
        made = cls(grammar="start: /a/")
        object.__setattr__(made, "grammar", wire.text)
        object.__setattr__(made, "wire", wire)
        return made

    @classmethod
    def from_mapping(cls, values: object) -> StructuredOutputsParams:
        """Make the parameters from a decoded JSON object, such as an HTTP body's field."""
        if not isinstance(values, Mapping):
            raise InvalidParameterError(
                "structured_outputs: it must be an object", param="structured_outputs"
            )
        known = {item.name for item in fields(cls) if item.init}
        asked = {name: value for name, value in values.items() if value is not None}
        for name in asked:
            if name not in known:
                message = (
                    f"structured_outputs: {str(name)[:64]!r} is not available; known are "
                    f"{', '.join(sorted(known))}"
                )
                raise InvalidParameterError(message, param="structured_outputs")
        return cls(**asked)

    def _from_json(self, param: str) -> Grammar:
        return Grammar(self._json_kind, checked_schema(self.json, param))

    def _from_json_object(self, param: str) -> Grammar:
        if self.json_object is not True:
            _refuse(param, "must be true or left out")
        return Grammar(self._json_kind, '{"type":"object"}')

    def _from_regex(self, param: str) -> Grammar:
        return Grammar("regex", _text(self.regex, MAX_REGEX_LEN, param))

    def _from_choice(self, param: str) -> Grammar:
        choices = self.choice
        if not isinstance(choices, list | tuple) or not 1 <= len(choices) <= MAX_CHOICES:
            _refuse(param, f"must be a list of 1 to {MAX_CHOICES} strings")
        for each in choices:
            _text(each, MAX_CHOICES_LEN, param)
        if sum(map(len, choices)) > MAX_CHOICES_LEN:
            _refuse(param, f"has more than {MAX_CHOICES_LEN} characters")
        return Grammar(
            "lark", "start: " + " | ".join(lark_literal(each) for each in dict.fromkeys(choices))
        )

    def _from_grammar(self, param: str) -> Grammar:
        text = _text(self.grammar, MAX_GRAMMAR_LEN, param)
        if _BEGINS_GBNF.match(text):
            return Grammar("gbnf", text)
        for directive in ("%json", "%llguidance"):
            # a schema in there would not be judged by our rules, and options could loosen them
            if directive in text:
                _refuse(param, f"must not contain {directive}; give a schema as 'json'")
        return Grammar("lark", text)

    @property
    def _json_kind(self) -> str:
        return "json_compact" if self.disable_any_whitespace else "json"


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedDecodingParams(StructuredOutputsParams):
    """An older name of `StructuredOutputsParams`, with what older programs give beside a form."""

    backend: str | None = None
    """Accepted for its name's sake, as the next two: there is one compiler of grammars."""
    disable_fallback: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    """Not available; see `disable_any_whitespace`."""

    def __post_init__(self) -> None:
        StructuredOutputsParams.__post_init__(self)
        if self.whitespace_pattern is not None:
            _refuse(
                "guided_decoding.whitespace_pattern",
                "is not available; use disable_any_whitespace, or leave it out",
            )


def lark_literal(text: str) -> str:
    """Return a string as Lark's notation writes it, which is JSON's."""
    return json_module.dumps(text)


def _text(value: object, max_len: int, param: str) -> str:
    if not isinstance(value, str) or not value:
        _refuse(param, "must be text, and not empty")
    if len(value) > max_len:
        _refuse(param, f"has {len(value)} characters; at most {max_len} are allowed")
    if any("\ud800" <= char <= "\udfff" for char in value):
        _refuse(param, "is not valid Unicode")
    return value


def _refuse(param: str, problem: str) -> NoReturn:
    raise InvalidParameterError(f"{param}: it {problem}", param=param)
