"""The count of tokens that were thoughts, and what a reading asks of the sampler."""

from __future__ import annotations

import asyncio

import pytest

from quire.core.structure import StructuredOutputsParams
from quire.server.errors import ApiError
from quire.server.reading import Marks, Reading
from quire.server.tools import Demand, Function, Mode, ToolUse, settle_tools
from quire.text.reasoning import MISTRAL_THINK, THINK
from quire.text.tools import HERMES


@pytest.mark.parametrize("size", [1, 2, 7])
def test_tokens_up_to_the_second_mark_are_counted(size: int) -> None:
    pieces = ["<think>", "a", "b", "</think>", "c", "</think>"]
    token_ids = [1, 5, 6, 2, 7, 2]
    reader = Reading(Marks(THINK, 2)).reader()
    for start in range(0, len(pieces), size):
        end = start + size
        reader.feed("".join(pieces[start:end]), token_ids[start:end], is_last=end >= len(pieces))
    assert reader.num_thought_tokens == 4
    silent = Reading(Marks(THINK, 2)).reader()
    silent.feed("a", [5], is_last=True)
    assert silent.num_thought_tokens == 0
    cut = Reading(Marks(THINK, 2), is_inside=True).reader()
    cut.feed("ab", [5, 6], is_last=True)
    assert cut.num_thought_tokens == 2


def tools(mode: Mode) -> ToolUse:
    settled = asyncio.run(settle_tools([Function(name="f")], Demand(mode=mode), (HERMES, None)))
    assert settled is not None
    return settled


def test_special_marks_are_shown_to_the_parser_and_a_form_excludes_demanded_tools() -> None:
    form = StructuredOutputsParams(json_object=True)
    assert Reading(Marks(MISTRAL_THINK, 3, is_special=True)).constraints(None, "x")["skip_special_tokens"] is False
    assert "skip_special_tokens" not in Reading(Marks(THINK, 3)).constraints(None, "x")
    assert Reading(tools=tools("auto")).constraints(form, "x")["structured_outputs"] is form
    with pytest.raises(ApiError) as caught:
        Reading(tools=tools("required")).constraints(form, "text.format")
    assert caught.value.param == "text.format"
