"""`cache_control` in Anthropic's requests: which blocks carry one, and the same request with a mark
behind such a block, by which the end of the block is found in the rendered prompt.

A breakpoint keeps what stands in front of it and the block itself. Where that ends in tokens only
the chat template knows; so the request is rendered once more with a mark at that place, and what
both texts begin with is kept. Owns the places of blocks; renders nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from quire.server.api.anthropic.blocks import Block, Turn
from quire.server.api.retention import control_s

_TOOLS, _SYSTEM, _TURNS = range(3)
"""What a prompt is made of, in the order that breakpoints go by."""


@dataclass(frozen=True, slots=True, order=True)
class BlockPlace:
    """Where a block stands: later ones compare greater."""

    part: int
    number: int
    """Of the tool, the block of the system prompt, or the turn."""
    block: int = 0
    """Of the turn's."""

    @property
    def is_tool(self) -> bool:
        """Whether the block is a tool."""
        return self.part == _TOOLS


class Breakpoint(NamedTuple):
    """A prefix to keep."""

    place: BlockPlace | None
    """Of its last block; None where it is the whole prompt."""
    seconds: float


def breakpoints(
    whole: Any, tools: Sequence[Any] | None, system: Any, turns: Sequence[Turn]
) -> list[Breakpoint]:
    """Return what a request wants kept, the longest time first, each longer than those before it.
    `whole` is the request's own `cache_control`. Raises ApiError for one that is none."""
    found = [] if whole is None else [Breakpoint(None, control_s(whole))]
    end = _end(turns)
    for place, control in _controls(tools, system, turns):
        found.append(Breakpoint(None if place == end else place, control_s(control)))
    kept: list[Breakpoint] = []
    for each in sorted(found, key=_longest_first):
        if not kept or (kept[-1].place is not None and _reach(kept[-1]) < _reach(each)):
            kept.append(each)
    return kept


def _longest_first(each: Breakpoint) -> tuple[float, bool, BlockPlace]:
    is_whole, place = _reach(each)
    return -each.seconds, not is_whole, BlockPlace(-place.part, -place.number, -place.block)


def _reach(each: Breakpoint) -> tuple[bool, BlockPlace]:
    return each.place is None, each.place or BlockPlace(_TURNS, 0)


def _end(turns: Sequence[Turn]) -> BlockPlace | None:
    """The last block of all, behind which only the template writes."""
    content = turns[-1].content if turns else ""
    return (
        BlockPlace(_TURNS, len(turns) - 1, len(content) - 1) if isinstance(content, list) else None
    )


def _controls(
    tools: Sequence[Any] | None, system: Any, turns: Sequence[Turn]
) -> Iterator[tuple[BlockPlace, Any]]:
    """Every `cache_control`; one within a tool's result is the result's."""
    for number, tool in enumerate(tools or ()):
        yield from ((BlockPlace(_TOOLS, number), each) for each in _controls_of(tool))
    if isinstance(system, list):
        for number, block in enumerate(system):
            yield from ((BlockPlace(_SYSTEM, number), each) for each in _controls_of(block))
    for number, turn in enumerate(turns):
        if isinstance(turn.content, list):
            for place, block in enumerate(turn.content):
                yield from (
                    (BlockPlace(_TURNS, number, place), each) for each in _controls_of(block)
                )


def _controls_of(block: Any) -> Iterator[Any]:
    if isinstance(block, Mapping):
        if block.get("cache_control") is not None:
            yield block["cache_control"]
        content = block.get("content")
        for each in content if isinstance(content, list) else ():
            if isinstance(each, Mapping) and each.get("cache_control") is not None:
                yield each["cache_control"]


# -- with a mark
# --------------------------------------------------------------------------------------------------


def marked_tools(
    place: BlockPlace, tools: Sequence[Any] | None, shown: list[dict[str, Any]], mark: str
) -> list[dict[str, Any]]:
    """Return the tools that a template is shown, with one of the mark's name behind that of a
    place."""
    if place.part != _TOOLS or tools is None:
        return shown
    name = tools[place.number].get("name")
    function = {"name": mark, "description": mark, "parameters": {"type": "object"}}
    marked = list[dict[str, Any]]()
    for each in shown:
        marked.append(each)
        if each.get("function", {}).get("name") == name:
            marked.append({"type": "function", "function": function})
    return marked


def marked_system(place: BlockPlace, system: Any, mark: str) -> Any:
    """Return a system prompt with the mark in it, if the place is there."""
    return system if place.part != _SYSTEM else _with_mark(system, place.number, mark)


def marked_turns(
    place: BlockPlace, turns: Sequence[Turn], mark: str, *, is_behind: bool = False
) -> Sequence[Turn]:
    """Return the turns with the mark in them, if the place is there; `is_behind` puts it into a
    text behind a block that the template does not show."""
    if place.part != _TURNS:
        return turns
    turn = turns[place.number]
    content = _with_mark(turn.content, place.block, mark, is_behind)
    marked = msgspec.structs.replace(turn, content=content)
    return [*turns[: place.number], marked, *turns[place.number + 1 :]]


def _with_mark(blocks: Any, number: int, mark: str, is_behind: bool = False) -> list[Block]:
    marked = _marked(blocks[number], mark, is_behind)
    return [*blocks[:number], *marked, *blocks[number + 1 :]]


def _marked(block: Block, mark: str, is_behind: bool) -> list[Block]:
    """A block that ends with the mark; what cannot has a text behind it."""
    kind, text = block.get("type"), {"type": "text", "text": mark}
    if is_behind:
        return [block, text]
    if kind in ("text", "thinking"):
        return [{**block, kind: block[kind] + mark}]
    if kind == "tool_use":
        return [{**block, "input": {**block["input"], mark: mark}}]
    if kind == "tool_result":
        content = block.get("content")
        marked = [*content, text] if isinstance(content, list) else (content or "") + mark
        return [{**block, "content": marked}]
    return [block, text]
