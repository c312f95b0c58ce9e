"""Grammars as both planes know them: what the control plane orders of the compiler,
and what the compiler answers."""

from __future__ import annotations

from typing import NamedTuple

GRAMMARS = "grammars"
"""Of `StepPlan.orders`: each a `Grammar` to compile. Of `StepResult.news`:
a `GrammarVerdict` on each, in any later step."""


class Grammar(NamedTuple):
    """The form that a row's output must have, before it is compiled."""

    kind: str
    """"json" and "json_compact" (a JSON schema, the latter without white space), "regex",
    "lark" or "gbnf"."""
    text: str


class GrammarVerdict(NamedTuple):
    """The outcome of compiling a grammar: it is ready, or `error` says why it never will be."""

    grammar: Grammar
    error: str | None = None
