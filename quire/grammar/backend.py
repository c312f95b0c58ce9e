"""The one place that knows the compiler library: its grammars, its limits, and what it may cost.

The library is `llguidance`: regular expressions by derivatives (no backtracking), context-free
grammars by Earley's algorithm, both with counted work ("fuel"), so that neither compiling nor a
step can run away. See docs/decisions/0009-grammars.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from string import ascii_letters
from types import ModuleType
from typing import Any, TypeVar

from quire.core.grammars import Grammar
from quire.errors import InvalidParameterError
from quire.grammar.endings import check_ends, reachable_from
from quire.grammar.lark import START, UnknownNotationError, parse_lark
from quire.grammar.lexemes import gbnf_to_lark

WHITE_SPACE = r"( |\n {0,64})?"
"""Between the parts of a JSON text. Bounded,
because small models like to go on with white space forever."""
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,  # 20 ms
    "step_lexer_fuel": 200_000,  # 15 ms a step
    "step_max_items": 50_000,
    # four for each property that may be left out; with 2,000 of them a step takes 45 ms
    "max_items_in_row": 20_000,
    "max_lexer_states": 50_000,  # up to 2 kB each
    "max_grammar_size": 200_000,
    "precompute_large_lexemes": False,  # work that no fuel counts
    "verbose_errors": False,  # they would quote the output
}
_NO_FORCING = '%llguidance {"no_forcing": true}'
"""Else the library writes out at once what can only come: a million steps for `(a{1000}){1000}`,
which no fuel counts."""
_MAX_MESSAGE_LEN = 300
_MAY_BE_EMPTY = re.compile(r"[&~]|\[\^[^\]]*\\[sSdDwWpP]")
"""What can leave a regular expression without any text: intersections, complements, and classes
without what a class has."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's tokens as bytes."""

    tokens: list[bytes]
    """By id; b"" for an id without text, which no grammar allows."""
    special_token_ids: frozenset[int]
    """Allowed only where a grammar names them, whatever their text."""
    eos_token_ids: tuple[int, ...]
    """At least one; allowed where the output is complete."""


class NativeVocabulary:
    """A vocabulary in the library's form: a trie over all tokens. 150,000 tokens take 0.6 s."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        special = set(vocabulary.special_token_ids)
        tokens = list(vocabulary.tokens)
        for token_id, data in enumerate(tokens):
            if not data:
                tokens[token_id] = b"<unused %d>" % token_id
                special.add(token_id)
        nameless = special | set(vocabulary.eos_token_ids)
        self.texts = [
            None if token_id in nameless else text for token_id, text in enumerate(tokens)
        ]
        """By id; None for tokens that stand for no text."""
        self.native = _library().LLTokenizer(
            _Wrapper(tokens, sorted(special | set(vocabulary.eos_token_ids)), vocabulary),
            eos_token=list(vocabulary.eos_token_ids),
        )


class _Wrapper:
    """What the library asks of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self, tokens: list[bytes], special_token_ids: list[int], vocabulary: Vocabulary
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = vocabulary.eos_token_ids[0]

    def __call__(self, text: str) -> list[int]:
        """Return tokens for a text; the library asks once, to see whether bytes are taken,
        and never where nothing is forced."""
        return [token_id for token_id, token in enumerate(self.tokens) if token == text.encode()][
            :1
        ]


def compile_grammar(grammar: Grammar, vocabulary: NativeVocabulary) -> Any:
    """Return a matcher at the start of the grammar, to be copied. Raises InvalidParameterError.
    Call it through `deep_stack.with_deep_stack`."""
    library = _library()
    matcher = library.LLMatcher(
        vocabulary.native, _source(library, grammar), log_level=0, limits=_limits(library)
    )
    if matcher.is_error():
        raise InvalidParameterError(_message(matcher.get_error()), param="structured_outputs")
    return matcher


def validate(grammar: Grammar) -> None:
    """Compile a grammar, to see whether it can be, and follow it for a step. Raises
    InvalidParameterError. Needs a deep stack.

    The vocabulary is one of single bytes: what it decides is cost alone.
    """
    matcher = compile_grammar(grammar, _byte_vocabulary())
    if grammar.kind == "lark":
        _check_lark(grammar.text)
    if _is_empty(matcher):
        raise InvalidParameterError(
            "structured_outputs: no text satisfies the grammar", param="structured_outputs"
        )
    if matcher.is_error():
        raise InvalidParameterError(_message(matcher.get_error()), param="structured_outputs")


def _check_lark(text: str) -> None:
    """Refuse rules that no finite text satisfies, and patterns that none does at all. Raises
    InvalidParameterError."""
    try:
        rules = parse_lark(text)
    except UnknownNotationError:
        return
    if START in rules.nodes:
        check_ends(rules.nodes, reachable_from(rules.nodes, START))
    doubtful: dict[str, list[str]] = {}
    for pattern, definitions in rules.patterns.items():
        if _MAY_BE_EMPTY.search(f"{pattern}\n{definitions}"):
            doubtful.setdefault(definitions, []).append(pattern)
    for definitions, patterns in doubtful.items():
        _check_patterns(dict(zip(ascii_letters, patterns, strict=False)), definitions)


def _check_patterns(patterns: Mapping[str, str], definitions: str) -> None:
    """Refuse a pattern that no text matches. They are compiled together, each behind a letter of
    its own; those of a grammar that has more than there are letters are not all looked at."""
    options = " | ".join(f'"{letter}" {pattern}' for letter, pattern in patterns.items())
    matcher = compile_grammar(
        Grammar("lark", f"start: {options}\n{definitions}"), _byte_vocabulary()
    )
    for letter, pattern in patterns.items():
        behind = matcher.deep_copy()
        behind.consume_token(ord(letter))
        if _is_empty(behind):
            raise InvalidParameterError(
                f"structured_outputs: no text matches {pattern[:64]} of the grammar",
                param="structured_outputs",
            )


def _is_empty(matcher: Any) -> bool:
    """Whether nothing can come."""
    matcher.compute_bitmask()
    return matcher.is_error() and "NoExtension" in matcher.get_error()


@cache
def _byte_vocabulary() -> NativeVocabulary:
    tokens = [*(bytes([byte]) for byte in range(256)), b"<end>"]
    return NativeVocabulary(Vocabulary(tokens, frozenset({256}), (256,)))


def embedded_schema(text: str, *, is_compact: bool = False) -> str:
    """Return a checked schema's text with our options, as it stands behind `%json` in a grammar."""
    options: dict[str, Any] = {"lenient": False}
    options |= {"whitespace_flexible": False} if is_compact else {"whitespace_pattern": WHITE_SPACE}
    rest = text[1:] if text == "{}" else f",{text[1:]}"
    return f'{{"x-guidance":{json.dumps(options)}{rest}'


def _source(library: ModuleType, grammar: Grammar) -> str:
    """Return the grammar in the library's notation."""
    if grammar.kind == "regex":
        text = json.loads(library.LLMatcher.grammar_from_regex(grammar.text))["grammars"][0][
            "lark_grammar"
        ]
    elif grammar.kind == "lark":
        text = grammar.text
    elif grammar.kind == "gbnf":
        text = gbnf_to_lark(grammar.text)
    else:
        schema = embedded_schema(grammar.text, is_compact=grammar.kind == "json_compact")
        text = f"start: %json {schema}"
    return str(library.LLMatcher.grammar_from_lark(f"{text}\n{_NO_FORCING}\n"))


def _limits(library: ModuleType) -> Any:
    return library.LLParserLimits(**_LIMITS)


def _message(text: str) -> str:
    """Return the lines of the library's words that say what is wrong with the grammar,
    without its pictures of it."""
    lines = [line.strip() for line in text.strip().splitlines()]
    shown = [line for place, line in enumerate(lines) if place == 0 or line.startswith("error")]
    return (
        f"structured_outputs: the grammar cannot be compiled: {'; '.join(shown)[:_MAX_MESSAGE_LEN]}"
    )


def _library() -> ModuleType:
    try:
        import llguidance
    except ImportError as error:
        raise InvalidParameterError(
            "structured_outputs need the package llguidance, which is not installed; run "
            "`pip install llguidance`",
            param="structured_outputs",
        ) from error
    return llguidance
