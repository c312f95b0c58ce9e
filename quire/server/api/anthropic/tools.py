"""Tools as Anthropic's API writes them: what is offered, and what is demanded of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.server.api.tools import Demand, Function, ToolShape, functions_of
from quire.server.http.errors import bad_request

SHAPE = ToolShape(
    schema="input_schema", kinds=(None, "custom"), kept=("name", "description", "parameters")
)
_MODES: Mapping[str, Any] = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}


def read_tools(tools: Any, choice: Any) -> tuple[list[Function], Demand]:
    """Return what `tools` and `tool_choice` say. Raises ApiError 400."""
    functions = functions_of(tools, SHAPE)
    if choice is None:
        return functions, Demand()
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if not isinstance(kind, str) or kind not in _MODES:
        raise bad_request(
            "tool_choice: its type must be auto, any, tool or none", param="tool_choice"
        )
    if not functions and kind in ("any", "tool"):
        raise bad_request("tool_choice: there are no tools to choose from", param="tool_choice")
    names = None
    if kind == "tool":
        names = [choice.get("name")]
        if not any(function.name == names[0] for function in functions):
            raise bad_request(
                "tool_choice: it names a function that is not among the tools", param="tool_choice"
            )
    is_parallel = choice.get("disable_parallel_tool_use") is not True
    return functions, Demand(mode=_MODES[kind], names=names, is_parallel=is_parallel)
