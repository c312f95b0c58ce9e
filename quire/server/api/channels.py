"""Grammars of answers in the harmony format: messages on channels, the last of them a call or text.

Each mark is a special token, which no text can hold, so a grammar has room for reasoning and for
remarks to the user before what it demands. A call ends with a token that ends the answer, so there
is at most one in each.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.grammars import Grammar
from quire.core.structure import lark_literal
from quire.grammar.backend import embedded_schema

_BEFORE = "(thought | remark)* "
"""What may come before the message that counts."""


def calls_grammar(
    functions: Sequence[tuple[str, str]], *, is_demanded: bool, has_tokens: bool
) -> str:
    """Return a grammar of an answer that is a call of one of the functions (name, schema), or where
    none is demanded, may be text. Without `has_tokens` marks are text, for a vocabulary that has
    not their tokens."""

    def mark(name: str) -> str:
        return f"<|{name}|>" if has_tokens else lark_literal(f"<|{name}|>")

    channel, message = mark("channel"), mark("message")
    following = f'{mark("end")} {mark("start")} "assistant"'
    rules = []
    for number, (name, schema) in enumerate(functions):
        head = lark_literal(f"commentary to=functions.{name} ")
        rules.append(
            f'call_{number}: {channel} {head} {mark("constrain")} "json" {message} '
            f"arguments_{number}"
        )
        rules.append(f"arguments_{number}: %json {embedded_schema(schema)}")
    last = "call" if is_demanded else "(call | answer BODY?)"
    return "\n".join(
        [
            *rules,
            "call: " + " | ".join(f"call_{number}" for number in range(len(functions))),
            f'thought: {channel} "analysis" {message} BODY? {following}',
            f'remark: {channel} "commentary" {message} BODY? {following}',
            f'answer: {channel} "final" {message}',
            "BODY: /(?s:.+)/",
            f"start: {_BEFORE}{last}",
        ]
    )


def with_form(form: str, calls: str) -> Grammar:
    """Return a grammar of answers that are one of `calls_grammar`, or a text of `form`, a grammar
    that ends with the rule `start`."""
    (one, _, text), (other, _, _) = form.rpartition("start: "), calls.rpartition("start: ")
    return Grammar("lark", f"{one}{other}start: {_BEFORE}(call | answer {text})")
