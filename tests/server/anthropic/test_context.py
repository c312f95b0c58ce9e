"""Edits of long conversations: what is cleared, what stays, and what is said of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from servers import MODEL, serve_model

from quire.config.api import ApiConfig

if TYPE_CHECKING:
    import anthropic  # which takes seconds: not in workers without these tests

TEMPLATE = (
    "{% for each in messages %}[{{ each.role }}{% if each.reasoning_content %} thinks {{ "
    "each.reasoning_content }}{% endif %}"
    "{% for call in each.tool_calls or [] %} calls {{ call.function.name }} {{ "
    "call.function.arguments | tojson }}{% endfor %}"
    " says {{ each.content }}]{% endfor %}{# <think> </think> <tool_call> #}"
)
SUN = "It is warm and dry. " * 8


@pytest.fixture(scope="module")
def claude(tmp_path_factory: pytest.TempPathFactory) -> Iterator[anthropic.Anthropic]:
    """The shipped model behind a template that shows everything."""
    import anthropic

    path = tmp_path_factory.mktemp("template") / "template.jinja"
    path.write_text(TEMPLATE)
    config = ApiConfig(chat_template=str(path), reasoning_parser="think")
    with (
        serve_model(config) as server,
        anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client,
    ):
        yield client


def turns(num_uses: int) -> list[Any]:
    """A conversation in which a tool was used so often, each time after a thought."""
    made: list[Any] = [{"role": "user", "content": "Weather?"}]
    for number in range(num_uses):
        thought = {
            "type": "thinking",
            "thinking": f"I ask again and again, {number}",
            "signature": "",
        }
        name = "look" if number == 0 else "weather"
        use = {"type": "tool_use", "id": f"t{number}", "name": name, "input": {"city": "Oslo"}}
        made.append({"role": "assistant", "content": [thought, use]})
        result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": SUN}
        made.append({"role": "user", "content": [result]})
    return made


def run(
    claude: anthropic.Anthropic, *edits: dict[str, Any], num_uses: int = 5, messages: Any = None
) -> Any:
    """(tokens of the prompt, tokens before the edits, what was applied),
    as both endpoints and a stream agree."""
    fields: Any = {
        "model": MODEL,
        "messages": messages or turns(num_uses),
        "context_management": {"edits": list(edits)},
    }
    fields["betas"] = ["context-management-2025-06-27"]
    whole = claude.beta.messages.create(**fields, max_tokens=1)
    assert whole.context_management is not None
    events = list(claude.beta.messages.create(**fields, max_tokens=1, stream=True))
    (last,) = [event for event in events if event.type == "message_delta"]
    assert last.context_management == whole.context_management
    counted = claude.beta.messages.count_tokens(**fields)
    usage = whole.usage
    cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    used = usage.input_tokens + cached
    assert counted.input_tokens == used and counted.context_management is not None
    applied = [each.model_dump() for each in whole.context_management.applied_edits]
    return used, counted.context_management.original_input_tokens, applied


def test_no_edit_clears_nothing(claude: anthropic.Anthropic) -> None:
    used, original, applied = run(claude)
    assert used == original and applied == []


@pytest.mark.parametrize(
    ("keep", "num_cleared"), [(None, 4), (2, 3), (0, 5), (9, 0), ("all", 0), ({"type": "all"}, 0)]
)
def test_thoughts_of_older_turns_are_left_out(
    claude: anthropic.Anthropic, keep: Any, num_cleared: int
) -> None:
    kept = {"type": "thinking_turns", "value": keep} if isinstance(keep, int) else keep
    edit = {"type": "clear_thinking_20251015", **({} if keep is None else {"keep": kept})}
    used, original, applied = run(claude, edit)
    saved = {
        "type": edit["type"],
        "cleared_thinking_turns": num_cleared,
        "cleared_input_tokens": original - used,
    }
    assert applied == ([saved] if num_cleared else []) and (used < original) is bool(num_cleared)
    bare = turns(5)
    for number in range(num_cleared):
        del bare[1 + 2 * number]["content"][0]
    assert used == claude.messages.count_tokens(model=MODEL, messages=bare).input_tokens


def edit_of(**fields: Any) -> dict[str, Any]:
    trigger = {"type": "tool_uses", "value": 3}
    return {
        "type": "clear_tool_uses_20250919",
        "trigger": trigger,
        "keep": {"type": "tool_uses", "value": 2},
        **fields,
    }


def test_older_results_of_tools_are_left_out(claude: anthropic.Anthropic) -> None:
    used, original, applied = run(claude, edit_of())
    assert (
        applied
        == [
            {
                "type": "clear_tool_uses_20250919",
                "cleared_tool_uses": 3,
                "cleared_input_tokens": original - used,
            }
        ]
        and used < original
    )
    spared, _, applied = run(claude, edit_of(exclude_tools=["look"]))
    assert applied[0]["cleared_tool_uses"] == 2 and spared > used
    emptied, _, _ = run(claude, edit_of(clear_tool_inputs=True))
    some, _, _ = run(claude, edit_of(clear_tool_inputs=["look"]))
    assert emptied < some < used


def test_results_stay_where_the_trigger_or_the_least_is_not_reached(
    claude: anthropic.Anthropic,
) -> None:
    assert run(claude, edit_of(), num_uses=3)[2] == []
    assert run(claude, {"type": "clear_tool_uses_20250919"})[2] == [], (
        "by default from 100,000 tokens on"
    )
    _, original, _ = run(claude)
    for tokens, is_due in ((original, False), (original - 1, True)):
        applied = run(claude, edit_of(trigger={"type": "input_tokens", "value": tokens}))[2]
        assert bool(applied) is is_due
    cleared = run(claude, edit_of())[2][0]["cleared_input_tokens"]
    for least, is_due in ((cleared, True), (cleared + 1, False)):
        applied = run(claude, edit_of(clear_at_least={"type": "input_tokens", "value": least}))[2]
        assert bool(applied) is is_due


def test_edits_are_applied_in_their_order(claude: anthropic.Anthropic) -> None:
    used, original, applied = run(claude, {"type": "clear_thinking_20251015"}, edit_of())
    assert [each["type"] for each in applied] == [
        "clear_thinking_20251015",
        "clear_tool_uses_20250919",
    ]
    assert original - used == sum(each["cleared_input_tokens"] for each in applied)


def test_a_summary_is_refused_once_it_is_due(claude: anthropic.Anthropic) -> None:
    import anthropic

    assert run(claude, {"type": "compact_20260112"})[2] == []
    trigger = {"type": "input_tokens", "value": 50}
    with pytest.raises(anthropic.BadRequestError, match="compact_20260112 would make a summary"):
        run(claude, {"type": "compact_20260112", "trigger": trigger})


@pytest.mark.parametrize(
    ("edits", "param"),
    [
        ([{"type": "clear_thinking_20251015", "keep": "none"}], "edits[0].keep"),
        (
            [{"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": -1}}],
            "edits[0].keep.value",
        ),
        ([edit_of(), edit_of()], "edits[1]"),
        ([edit_of(), 5], "edits[1].type"),
        ([edit_of(exclude_tools="look")], "edits[0].exclude_tools"),
    ],
)
def test_wrong_edits_are_refused_by_name(
    claude: anthropic.Anthropic, edits: Any, param: str
) -> None:
    import anthropic

    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.beta.messages.create(
            model=MODEL, max_tokens=1, messages=turns(1), context_management={"edits": edits}
        )
    body: Any = caught.value.body
    assert body["error"]["param"] == f"context_management.{param}"
