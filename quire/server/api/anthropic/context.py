"""`context_management` of /v1/messages: what is taken out of a long conversation before it becomes
a prompt.

Owns the two edits that only leave things out, old reasoning and old results of tools, and reports
what each has cleared. The third, a summary, would have to be written by the model: it is accepted
until its trigger is reached, and refused by name from there on. Turns are never changed in place,
and tokens are counted only where an edit needs it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.server.api.anthropic.blocks import Block, Turn
from quire.server.http.body import convert
from quire.server.http.errors import ApiError, bad_request, unavailable_feature

CLEARED = "[This result was removed to make room.]"
_PARAM = "context_management"
Amount = Annotated[int, Meta(ge=0, lt=1 << 31)]


class _Counted(msgspec.Struct, kw_only=True):
    """So many of something."""

    type: Literal["input_tokens", "tool_uses", "thinking_turns", "all"]
    value: Amount = 0


class ClearThinking(msgspec.Struct, kw_only=True):
    """Leaves the reasoning of older turns out."""

    type: str
    keep: Literal["all"] | _Counted = msgspec.field(
        default_factory=lambda: _Counted(type="thinking_turns", value=1)
    )

    @property
    def num_kept(self) -> int | None:
        """None keeps all."""
        return None if isinstance(self.keep, str) or self.keep.type == "all" else self.keep.value


class ClearToolUses(msgspec.Struct, kw_only=True):
    """Puts a remark in place of older results of tools, once there is enough of them."""

    type: str
    trigger: _Counted = msgspec.field(
        default_factory=lambda: _Counted(type="input_tokens", value=100_000)
    )
    keep: _Counted = msgspec.field(default_factory=lambda: _Counted(type="tool_uses", value=3))
    clear_at_least: _Counted | None = None
    exclude_tools: list[str] | None = None
    clear_tool_inputs: bool | list[str] | None = None

    def clears_input(self, name: str) -> bool:
        """Return whether the calls of this tool lose their arguments, too."""
        wish = self.clear_tool_inputs
        return name in wish if isinstance(wish, list) else bool(wish)


class Compact(msgspec.Struct, kw_only=True):
    """Would summarize a conversation that is longer than its trigger."""

    type: str
    trigger: _Counted | None = None
    instructions: str | None = None
    pause_after_compaction: bool = False

    @property
    def num_tokens(self) -> int:
        """From how many on."""
        return 150_000 if self.trigger is None else self.trigger.value


Edit = ClearThinking | ClearToolUses | Compact
_KINDS: Mapping[str, type[ClearThinking] | type[ClearToolUses] | type[Compact]] = {
    "clear_thinking_20251015": ClearThinking,
    "clear_tool_uses_20250919": ClearToolUses,
    "compact_20260112": Compact,
}
CountTokens = Callable[[Sequence[Turn]], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class Edited:
    """A conversation after its edits."""

    turns: Sequence[Turn]
    applied: tuple[dict[str, Any], ...] = ()
    """What has been cleared, as answers report it."""
    num_tokens: int | None = None
    """Of its prompt, where that had to be counted."""


def read_edits(value: Any) -> list[Edit]:
    """Return the edits that the request names, each kind at most once.
    Raises ApiError 400 naming the one that is wrong."""
    if value is None:
        return []
    edits = value.get("edits") if isinstance(value, Mapping) else ()
    if edits is None:
        return []
    if not isinstance(edits, list):
        raise bad_request(f"{_PARAM}: it must be an object with a list of edits", param=_PARAM)
    read: list[Edit] = []
    for number, edit in enumerate(edits):
        where = f"{_PARAM}.edits[{number}]"
        kind = edit.get("type") if isinstance(edit, Mapping) else None
        if not isinstance(kind, str) or kind not in _KINDS:
            raise unavailable_feature(
                f"{where}.type", f"the edits that are available are {', '.join(_KINDS)}"
            )
        try:
            made = convert(edit, _KINDS[kind])
        except ApiError as error:
            raise bad_request(
                f"{where}.{error.message}", param=f"{where}.{error.param}", code=error.code
            ) from None
        if any(type(each) is type(made) for each in read):
            raise bad_request(f"{where}: there is another edit of the type {kind}", param=where)
        read.append(made)
    return read


async def apply_edits(turns: Sequence[Turn], edits: Sequence[Edit], count: CountTokens) -> Edited:
    """Return what is left after the edits, in their order.
    Raises ApiError 400 where a summary would be due."""
    edited = Edited(turns)
    for edit in edits:
        if isinstance(edit, Compact):
            await _check_length(edited, edit, count)
        elif isinstance(edit, ClearThinking):
            edited = await _clear_thinking(edited, edit, count)
        else:
            edited = await _clear_tool_uses(edited, edit, count)
    return edited


async def _num_tokens(edited: Edited, count: CountTokens) -> int:
    return await count(edited.turns) if edited.num_tokens is None else edited.num_tokens


async def _check_length(edited: Edited, edit: Compact, count: CountTokens) -> None:
    num_tokens = await _num_tokens(edited, count)
    if num_tokens >= edit.num_tokens:
        message = (
            f"the conversation has {num_tokens} tokens, of which {edit.type} would make a "
            "summary; this server makes none"
        )
        raise unavailable_feature(f"{_PARAM}.edits", message)


async def _clear_thinking(edited: Edited, edit: ClearThinking, count: CountTokens) -> Edited:
    thinking = [
        number for number, turn in enumerate(edited.turns) if any(map(_is_reasoning, _blocks(turn)))
    ]
    older = (
        set() if edit.num_kept is None else set(thinking[: max(0, len(thinking) - edit.num_kept)])
    )
    if not older:
        return edited
    turns = [
        _without_reasoning(turn) if number in older else turn
        for number, turn in enumerate(edited.turns)
    ]
    return await _applied(
        edited, turns, count, {"type": edit.type, "cleared_thinking_turns": len(older)}
    )


async def _clear_tool_uses(edited: Edited, edit: ClearToolUses, count: CountTokens) -> Edited:
    uses = [
        block for turn in edited.turns for block in _blocks(turn) if block.get("type") == "tool_use"
    ]
    is_counting_uses = edit.trigger.type == "tool_uses"
    num = len(uses) if is_counting_uses else await _num_tokens(edited, count)
    older = uses[: max(0, len(uses) - edit.keep.value)] if num > edit.trigger.value else []
    cleared = [use for use in older if use.get("name") not in (edit.exclude_tools or ())]
    if not cleared:
        return edited
    ids = {_key(use, "id") for use in cleared}
    emptied = {_key(use, "id") for use in cleared if edit.clears_input(str(use.get("name")))}
    turns = [_with_cleared(turn, ids, emptied) for turn in edited.turns]
    after = await _applied(
        edited, turns, count, {"type": edit.type, "cleared_tool_uses": len(cleared)}
    )
    least = 0 if edit.clear_at_least is None else edit.clear_at_least.value
    return after if after.applied[-1]["cleared_input_tokens"] >= least else edited


async def _applied(
    before: Edited, turns: Sequence[Turn], count: CountTokens, report: dict[str, Any]
) -> Edited:
    """Return the conversation with these turns, and a report of what that has saved."""
    num_before, num_after = await _num_tokens(before, count), await count(turns)
    saved = {**report, "cleared_input_tokens": max(0, num_before - num_after)}
    return replace(before, turns=turns, applied=(*before.applied, saved), num_tokens=num_after)


def _blocks(turn: Turn) -> Sequence[Block]:
    return [] if isinstance(turn.content, str) else turn.content


def _is_reasoning(block: Block) -> bool:
    return block.get("type") in ("thinking", "redacted_thinking")


def _without_reasoning(turn: Turn) -> Turn:
    return Turn(
        role=turn.role, content=[block for block in _blocks(turn) if not _is_reasoning(block)] or ""
    )


def _with_cleared(turn: Turn, ids: set[str | None], emptied: set[str | None]) -> Turn:
    if isinstance(turn.content, str):
        return turn
    return Turn(role=turn.role, content=[_cleared(block, ids, emptied) for block in turn.content])


def _cleared(block: Block, ids: set[str | None], emptied: set[str | None]) -> Block:
    kind = block.get("type")
    if kind == "tool_result" and _key(block, "tool_use_id") in ids:
        return {**block, "content": CLEARED}
    if kind == "tool_use" and _key(block, "id") in emptied:
        return {**block, "input": {}}
    return block


def _key(block: Block, name: str) -> str | None:
    """Return an id, or None for what is none (and may not even be hashable)."""
    value = block.get(name)
    return value if isinstance(value, str) else None
