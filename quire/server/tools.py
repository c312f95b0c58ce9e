"""Tools of a chat: what a request offers and demands, the grammar that holds the model to it, and the calls in its answer.

`required`, a named function, `strict` and `parallel_tool_calls=false` are enforced by a grammar in the model's own notation, so
what they promise holds by construction. With `auto` and none of these the model writes what it likes, and the parser reads it.
Without tools, or with `tool_choice: "none"`, no parser runs.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.core.json_schema import checked_schema
from quire.core.plan import Grammar
from quire.core.structure import MAX_GRAMMAR_LEN, lark_literal
from quire.errors import InvalidParameterError
from quire.grammar.backend import embedded_schema
from quire.grammar.judge import judge
from quire.server.body import convert
from quire.server.errors import bad_request, unavailable_feature
from quire.server.structure import NAME
from quire.text.tools import CallArguments, CallBegin, Event, Text, ToolFormat, ToolParser

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


class Tool(msgspec.Struct, kw_only=True):
    """OpenAI's envelope of it."""

    function: Function
    type: Literal["function"] = "function"


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
    """Whether the notation's marker is a special token, which must not be hidden from the parser."""

    def reader(self) -> CallReader:
        """For one answer."""
        return CallReader(self.form)

    def finish_reason(self, reason: str | None, num_calls: int) -> str | None:
        """OpenAI's reasons: a call that was demanded by name ends with `stop`."""
        return "tool_calls" if reason == "stop" and num_calls and self.mode != "named" else reason


class CallReader:
    """One answer's calls, in OpenAI's forms."""

    def __init__(self, form: ToolFormat) -> None:
        self._parser = ToolParser(form)
        self._is_short = form.name == "mistral"

    @property
    def num_calls(self) -> int:
        """Calls that are complete."""
        return self._parser.num_calls

    def deltas(self, text: str, *, is_last: bool) -> list[dict[str, Any]]:
        """What a piece of the answer brings, as a stream's deltas."""
        events = self._parser.feed(text) + (self._parser.flush() if is_last else [])
        return [self._delta(event) for event in events]

    def message(self, text: str) -> dict[str, Any]:
        """A whole answer: its `content`, and `tool_calls` where there are any."""
        calls: dict[int, dict[str, Any]] = {}
        content = ""
        for delta in self.deltas(text, is_last=True):
            content += delta.get("content", "")
            for part in delta.get("tool_calls", ()):
                call = calls.setdefault(part["index"], {key: value for key, value in part.items() if key != "index"})
                if call["function"] is not part["function"]:
                    call["function"]["arguments"] += part["function"]["arguments"]
        return {"content": content, **({"tool_calls": list(calls.values())} if calls else {})}

    def _delta(self, event: Event) -> dict[str, Any]:
        if isinstance(event, Text):
            return {"content": event.text}
        if isinstance(event, CallArguments):
            return {"tool_calls": [{"index": event.number, "function": {"arguments": event.text}}]}
        return {"tool_calls": [self._begin(event)]}

    def _begin(self, event: CallBegin) -> dict[str, Any]:
        function = {"name": event.name, "arguments": ""}
        return {"index": event.number, "id": call_id(is_short=self._is_short), "type": "function", "function": function}


def call_id(*, is_short: bool) -> str:
    """An id that no other call has; Mistral's templates want exactly nine letters and digits."""
    if is_short:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


async def settle_tools(
    tools: Any, choice: Any, is_parallel: bool, model: tuple[ToolFormat | None, int | None]
) -> ToolUse | None:
    """What `tools` and `tool_choice` come to; None where no call can come. Raises ApiError 400.

    `model` is the notation of the model's calls, if known, and the id of its marker where that is a special token.
    """
    offered = _functions(tools)
    mode, allowed = _choice(choice, offered)
    if not offered or mode == "none":
        return None
    form, marker = model
    if form is None:
        message = "the notation in which this model calls tools is not known here; the operator may choose one (tool_parser)"
        raise unavailable_feature("tools", message)
    functions = [function for function in offered if function.name in allowed]
    schemas = [await _arguments(function, f"tools[{offered.index(function)}]") for function in functions]
    is_bound = mode != "auto" or not is_parallel or any(function.strict for function in functions)
    grammar = None
    if is_bound:
        most = 1 if mode == "named" or not is_parallel else MAX_CALLS
        named = list(zip((function.name for function in functions), schemas, strict=True))
        await judge.check_async(Grammar("lark", _grammar(form, named, (mode, most), None)))
        grammar = Grammar("lark", _grammar(form, named, (mode, most), marker))
        if len(grammar.text) > 4 * MAX_GRAMMAR_LEN:
            raise bad_request(f"tools: their schemas have more than {4 * MAX_GRAMMAR_LEN} bytes together", param="tools")
    shown = [{"type": "function", "function": _shown(function)} for function in functions]
    return ToolUse(mode=mode, shown=shown, form=form, grammar=grammar, shows_special=marker is not None)


def _functions(tools: Any) -> list[Function]:
    if tools is None or tools == []:
        return []
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise bad_request(f"tools: it must be a list of at most {MAX_TOOLS}", param="tools")
    functions: list[Function] = []
    for number, tool in enumerate(tools):
        where = f"tools[{number}]"
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise unavailable_feature(f"{where}.type", "only functions can be called here")
        function = convert(dict(tool), Tool).function
        if not NAME.match(function.name) or function.name in {each.name for each in functions}:
            message = f"{where}.function.name: it must have 1 to 64 letters, digits, - or _, and no other function may have it"
            raise bad_request(message, param=f"{where}.function.name")
        functions.append(function)
    return functions


def _choice(choice: Any, functions: Sequence[Function]) -> tuple[Mode, set[str]]:
    """(mode, names of the functions that may be called)."""
    names = {function.name for function in functions}
    if choice is None:
        return "auto", names
    if choice in ("none", "auto"):
        return choice, names
    if not functions:
        raise bad_request("tool_choice: there are no tools to choose from", param="tool_choice")
    if choice == "required":
        return "required", names
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind == "function":
        return "named", _known([choice], names)
    if kind == "allowed_tools":
        inner = choice.get("allowed_tools")
        inner = inner if isinstance(inner, Mapping) else choice
        mode, listed = inner.get("mode", "auto"), inner.get("tools")
        if mode in ("auto", "required") and isinstance(listed, list) and listed:
            return mode, _known(listed, names)
    message = "tool_choice: it must be none, auto, required, a function, or allowed_tools with a mode and tools"
    raise bad_request(message, param="tool_choice")


def _known(chosen: Sequence[Any], names: set[str]) -> set[str]:
    """The names that are chosen, all of which must be among the tools."""
    found = set()
    for each in chosen:
        function = each.get("function", each) if isinstance(each, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or name not in names:
            raise bad_request("tool_choice: it names a function that is not among the tools", param="tool_choice")
        found.add(name)
    return found


async def _arguments(function: Function, where: str) -> str:
    """The schema that a call's arguments are held to. Only of a strict function must it be one that can be enforced."""
    if function.parameters is None:
        return _ANY_ARGUMENTS
    param = f"{where}.function.parameters"
    try:
        text = checked_schema({"type": "object", **function.parameters}, param)
        await judge.check_async(Grammar("json", text))
    except InvalidParameterError as error:
        if function.strict:
            raise bad_request(f"{param}: {str(error).partition(': ')[2]}", param=param) from None
        return _ANY_ARGUMENTS
    return text


def _shown(function: Function) -> dict[str, Any]:
    """A function as templates read it."""
    parameters = function.parameters if function.parameters is not None else {"type": "object", "properties": {}}
    return {"name": function.name, "description": function.description or "", "parameters": parameters}


def _grammar(form: ToolFormat, functions: Sequence[tuple[str, str]], demand: tuple[Mode, int], marker: int | None) -> str:
    """One to `most` calls in the model's notation, behind any text where the mode is `auto`."""
    mode, most = demand
    begin = f"<[{marker}]>" if marker is not None else lark_literal(form.begin)
    rules = []
    for number, (name, schema) in enumerate(functions):
        head = lark_literal('{"name": "' + name + '", "' + form.arguments_key + '": ')
        rules.append(f'object_{number}: {head} arguments_{number} "}}"')
        rules.append(f"arguments_{number}: %json {embedded_schema(schema)}")
    rules.append("object: " + " | ".join(f"object_{number}" for number in range(len(functions))))
    more = f"{{0,{most - 1}}}" if most > 1 else ""
    if form.is_list:
        calls = f'{begin} "[" object' + (f' (", " object){more}' if more else "") + ' "]"'
        text = "TEXT" if marker is not None else ""
    elif form.begin:
        one = f"{begin} {lark_literal(form.glue)} object {lark_literal(form.glue + form.end)}"
        rules.append(f"call: {one}")
        calls = "call" + (f' ("\\n" call){more}' if more else "")
        text = "TEXT"
    else:
        calls, text = "object" + (f' ("; " object){more}' if more else ""), ""
    rules.append(f"calls: {calls}")
    if mode != "auto":
        return "\n".join([*rules, "start: calls"])
    if text:
        rules.append(_text_rule(form, is_special=marker is not None))
        return "\n".join([*rules, "start: TEXT | TEXT calls | calls"])
    return "\n".join([*rules, "TEXT: /[^{\\[ \\n](?s:.)*/", "start: TEXT | calls"])


def _text_rule(form: ToolFormat, *, is_special: bool) -> str:
    """Text without a marker in it; a special token is in no text anyway."""
    marker = "".join(f"\\{char}" if not char.isalnum() and char != "_" else char for char in form.begin)
    return "TEXT: /(?s:.+)/" if is_special else f"TEXT: /(?s:.+)/ & ~/(?s:.*){marker}(?s:.*)/"
