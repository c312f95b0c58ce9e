"""Tools of a request, whichever API it speaks: what it offers and demands, and the grammar that
holds the model to it.

`required`, a named function, `strict` and `parallel_tool_calls=false` are enforced by a grammar in
the model's own notation, so what they promise holds by construction; and so are calls beside a form
for text answers (`response_format`), which an answer has unless it is a call. With `auto` and none
of these the model writes what it likes, and the parser reads it. Without tools, or with
`tool_choice: "none"`, no parser runs.

The template is shown the functions as the client wrote them, key for key, and all of them where a
grammar sees to which are called.
"""

from __future__ import annotations

import asyncio
import secrets
import string
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.core.grammars import Grammar
from quire.core.json_schema import checked_schema, closed_schema
from quire.core.structure import MAX_GRAMMAR_LEN, lark_literal
from quire.errors import InvalidParameterError
from quire.grammar.backend import embedded_schema
from quire.grammar.judge import judge
from quire.server.api.channels import calls_grammar
from quire.server.api.structure import NAME
from quire.server.http.body import convert
from quire.server.http.errors import ApiError, bad_request, unavailable_feature
from quire.text.tools import ToolFormat

MAX_TOOLS = 128
MAX_CALLS = 32
"""In one answer, where a grammar says how many."""
Mode = Literal["none", "auto", "required", "named"]
_ANY_ARGUMENTS = '{"type":"object"}'


class Function(msgspec.Struct, kw_only=True):
    """A function that the model may call."""

    name: str
    description: Annotated[str, Meta(max_length=1 << 16)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    where: str = ""
    """Where the body has its parameters."""
    shown: dict[str, Any] | None = None
    """As templates read it, in the client's words and order."""


@dataclass(frozen=True, slots=True)
class ToolShape:
    """How an API writes a tool down."""

    within: str = ""
    """The key of the object that holds a function's fields; "" where the tool does."""
    schema: str = "parameters"
    """The key of the parameters."""
    kinds: tuple[str | None, ...] = ("function",)
    """Values of `type` that mean a function."""
    kept: tuple[str, ...] | None = None
    """Keys that are shown to the model; None for all."""

    def shown(self, tool: Mapping[str, Any]) -> dict[str, Any]:
        """Return a tool that holds a function's fields itself, in the form that templates read,
        its keys in their order."""
        fields = {
            ("parameters" if name == self.schema else name): value
            for name, value in tool.items()
            if name != "type"
        }
        return {
            "type": "function",
            "function": {k: v for k, v in fields.items() if self.kept is None or k in self.kept},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a request wants of its functions."""

    mode: Mode = "auto"
    names: Collection[str] | None = None
    """Of those that may be called; None for all."""
    is_parallel: bool = True


@dataclass(slots=True, kw_only=True)
class ToolUse:
    """What a request settles about tools."""

    mode: Mode
    shown: list[dict[str, Any]]
    """For the chat template."""
    form: ToolFormat
    grammar: Grammar | None
    """None where the model is left alone."""
    shows_special: bool
    """Whether the notation's marker is a special token,
    which must not be hidden from the parser."""

    @property
    def is_enforced(self) -> bool:
        """Whether an answer is a call from its first token on."""
        return self.mode in ("required", "named")


def call_id(form: ToolFormat, prefix: str = "call") -> str:
    """Return an id that no other call has; Mistral's templates want exactly nine letters and
    digits."""
    if form.name == "mistral":
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    return f"{prefix}_{secrets.token_hex(12)}"


async def settle_tools(
    functions: Sequence[Function],
    demand: Demand,
    model: tuple[ToolFormat | None, int | None],
    *,
    has_form: bool = False,
) -> ToolUse | None:
    """Return what the functions of a request and its demand come to; None where no call can come.
    Raises ApiError 400.

    `model` is the notation of the model's calls, if known, and the id of its marker where that is a
    special token. With `has_form` an answer that is text has a form, so the grammar is one of calls
    alone.
    """
    if not functions or demand.mode == "none":
        return None
    form, marker = model
    if form is None:
        message = (
            "the notation in which this model calls tools is not known here; the operator may "
            "choose one (tool_parser)"
        )
        raise unavailable_feature("tools", message)
    allowed = [
        function for function in functions if demand.names is None or function.name in demand.names
    ]
    grammar = None
    if (
        has_form
        or demand.mode != "auto"
        or not demand.is_parallel
        or any(function.strict for function in allowed)
    ):
        is_single = demand.mode == "named" or not demand.is_parallel
        most = 1 if is_single or form.has_special_parts else MAX_CALLS
        named = list(
            zip((function.name for function in allowed), await _schemas(allowed), strict=True)
        )
        how = ("required" if has_form else demand.mode, most)
        # the judge's vocabulary has no special tokens
        await judge.check_async(Grammar("lark", _grammar(form, named, how, None)))
        grammar = Grammar("lark", _grammar(form, named, how, marker))
    shown = [_shown(function) for function in (allowed if grammar is None else functions)]
    return ToolUse(
        mode=demand.mode, shown=shown, form=form, grammar=grammar, shows_special=marker is not None
    )


def functions_of(tools: Any, shape: ToolShape) -> list[Function]:
    """Return the functions that a request offers. Raises ApiError 400 naming what is wrong with
    them."""
    if tools is None or tools == []:
        return []
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise bad_request(f"tools: it must be a list of at most {MAX_TOOLS}", param="tools")
    functions: list[Function] = []
    names: set[str] = set()
    for number, tool in enumerate(tools):
        where = f"tools[{number}]"
        if not isinstance(tool, Mapping) or tool.get("type") not in shape.kinds:
            raise unavailable_feature(f"{where}.type", "only functions can be called here")
        fields, where = (
            (tool.get(shape.within), f"{where}.{shape.within}") if shape.within else (tool, where)
        )
        function = _function(fields, where, shape.schema)
        function.shown = dict(tool) if shape.within else shape.shown(tool)
        if not NAME.match(function.name) or function.name in names:
            message = (
                f"{where}.name: it must have 1 to 64 letters, digits, - or _, and no other "
                "function may have it"
            )
            raise bad_request(message, param=f"{where}.name")
        names.add(function.name)
        functions.append(function)
    return functions


def _function(fields: Any, where: str, schema: str) -> Function:
    if not isinstance(fields, Mapping):
        raise bad_request(f"{where}: it must be an object", param=where)
    known = {name: fields.get(name) for name in ("name", "description", "strict")}
    try:
        function = convert({**known, "parameters": fields.get(schema)}, Function)
    except ApiError as error:
        name = schema if error.param == "parameters" else error.param or ""
        raise bad_request(
            f"{where}.{error.message}", param=f"{where}.{name}", code=error.code
        ) from None
    function.where = f"{where}.{schema}"
    return function


async def _schemas(functions: Sequence[Function]) -> list[str]:
    """Return the schemas that calls' arguments are held to. Only of a strict function must it be
    one that can be enforced.

    No function has parameters that it does not declare, unless it says so, and models that may name
    others go on doing so.
    """
    texts: list[str] = []
    for function in functions:
        try:
            schema = {"type": "object", **(function.parameters or {})}
            if function.strict and schema["type"] != "object":
                raise InvalidParameterError(
                    f"{function.where}: its type must be object", param=function.where
                )
            closed = closed_schema(schema, function.where, is_strict=bool(function.strict))
            texts.append(checked_schema(closed, function.where))
        except InvalidParameterError as error:
            texts.append(_any_arguments(function, error))
        await asyncio.sleep(0)  # each takes up to 20 ms
    # before any is compiled, which takes up to a second
    if sum(map(len, texts)) > 4 * MAX_GRAMMAR_LEN:
        raise bad_request(
            f"tools: their schemas have more than {4 * MAX_GRAMMAR_LEN} bytes together",
            param="tools",
        )
    for number, (function, text) in enumerate(zip(functions, texts, strict=True)):
        try:
            await judge.check_async(Grammar("json", text))
        except InvalidParameterError as error:
            texts[number] = _any_arguments(function, error)
    return texts


def _any_arguments(function: Function, error: InvalidParameterError) -> str:
    if function.strict:
        raise bad_request(
            f"{function.where}: {str(error).partition(': ')[2]}", param=function.where
        ) from None
    return _ANY_ARGUMENTS


def _shown(function: Function) -> dict[str, Any]:
    """Return a function as templates read it."""
    return function.shown or {"type": "function", "function": {"name": function.name}}


def _grammar(
    form: ToolFormat,
    functions: Sequence[tuple[str, str]],
    demand: tuple[Mode, int],
    marker: int | None,
) -> str:
    """Return a grammar of one to `most` calls in the model's notation, behind any text where the
    mode is `auto`."""
    mode, most = demand
    if form.has_special_parts:
        is_demanded = mode != "auto"
        return calls_grammar(functions, is_demanded=is_demanded, has_tokens=marker is not None)
    begin = f"<[{marker}]>" if marker is not None else lark_literal(form.begin)
    rules = []
    for number, (name, schema) in enumerate(functions):
        head = lark_literal('{"name": "' + name + '", "' + form.arguments_key + '": ')
        rules.append(f'object_{number}: {head} arguments_{number} "}}"')
        rules.append(f"arguments_{number}: %json {embedded_schema(schema)}")
    rules.append("object: " + " | ".join(f"object_{number}" for number in range(len(functions))))
    newline = lark_literal("\n")

    def several(one: str, first: str, between: str) -> str:
        return first + (f" ({between} {one}){{0,{most - 1}}}" if most > 1 else "")

    if form.is_list:
        calls = f'{begin} "[" {several("object", "object", lark_literal(", "))} "]"'
    elif form.begin:
        rules.append(f"body: {lark_literal(form.glue)} object {lark_literal(form.glue + form.end)}")
        calls = several(f"{begin} body", f"{begin} body", newline)
    else:
        calls = several("object", "object", lark_literal("; "))
    rules.append(f"calls: {calls}")
    if mode != "auto":
        start = "calls"
    elif marker is not None:  # which no text can hold
        start = "TEXT | TEXT calls | calls\nTEXT: /(?s:.+)/"
    elif form.begin and not form.is_list:
        # Only a lazy rule finds the marker behind a text: a greedy one takes the marker's first
        # characters for more of it.
        start = (
            f"TEXT | lead {several(f'{begin} body', 'body', newline)}\nlead[suffix={begin}]: "
            "/(?s:.*)/\n"
        )
        start += f"TEXT: /(?s:.+)/ & ~/(?s:.*){_literal_regex(form.begin)}(?s:.*)/"
    else:
        start = "TEXT | calls\nTEXT: /[^{\\[ \\n](?s:.)*/"
    return "\n".join([*rules, f"start: {start}"])


def _literal_regex(text: str) -> str:
    """Return a regular expression of this text alone; a backslash before `<`
    would mean the edge of a word."""
    return "".join(
        char if char.isalnum() or char == "_" else f"\\x{{{ord(char):x}}}" for char in text
    )
