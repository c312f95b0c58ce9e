"""Tools as OpenAI's two chat APIs write them: what is offered, and what is demanded of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.server.api.tools import Demand, Function, ToolShape, functions_of
from quire.server.http.errors import bad_request

CHAT = ToolShape(within="function")
RESPONSES = ToolShape()


def read_tools(
    tools: Any, choice: Any, is_parallel: bool | None, shape: ToolShape
) -> tuple[list[Function], Demand]:
    """Return what `tools`, `tool_choice` and `parallel_tool_calls` say. Raises ApiError 400."""
    functions = functions_of(tools, shape)
    return functions, replace(_demand(choice, functions), is_parallel=is_parallel is not False)


def _demand(choice: Any, functions: Sequence[Function]) -> Demand:
    if choice is None:
        return Demand()
    if choice in ("none", "auto"):
        return Demand(mode=choice)
    if not functions:
        raise bad_request("tool_choice: there are no tools to choose from", param="tool_choice")
    if choice == "required":
        return Demand(mode="required")
    names = {function.name for function in functions}
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind == "function":
        return Demand(mode="named", names=_known([choice], names))
    if kind == "allowed_tools":
        inner = choice.get("allowed_tools")
        inner = inner if isinstance(inner, Mapping) else choice
        mode, listed = inner.get("mode", "auto"), inner.get("tools")
        if mode in ("auto", "required") and isinstance(listed, list) and listed:
            return Demand(mode=mode, names=_known(listed, names))
    message = (
        "tool_choice: it must be none, auto, required, a function, or allowed_tools with a mode "
        "and tools"
    )
    raise bad_request(message, param="tool_choice")


def _known(chosen: Sequence[Any], names: set[str]) -> set[str]:
    """Return the names that are chosen, all of which must be among the tools."""
    found = set()
    for each in chosen:
        function = each.get("function", each) if isinstance(each, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or name not in names:
            raise bad_request(
                "tool_choice: it names a function that is not among the tools", param="tool_choice"
            )
        found.add(name)
    return found
