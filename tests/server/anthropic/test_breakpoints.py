"""`cache_control` keeps the prompt up to the block that carries it, wherever that block stands."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from servers import serve_model

from quire.config.api import ApiConfig
from quire.server.api.anthropic.blocks import Turn
from quire.server.api.anthropic.breakpoints import (
    BlockPlace,
    Breakpoint,
    breakpoints,
    marked_turns,
)

SHORT, HOUR = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
STORY = "Once upon a time there was a little girl who had a big red ball. "
TOOL = {
    "name": "look", "description": "Look at a thing. " * 5,
    "input_schema": {"type": "object", "properties": {"thing": {"type": "string"}}},
}  # fmt: skip


def text(words: str, control: Any = None) -> dict[str, Any]:
    block = {"type": "text", "text": words}
    return block if control is None else {**block, "cache_control": control}


def test_the_longest_time_counts_and_what_reaches_further_for_less() -> None:
    turns = [
        Turn(role="user", content=[text("a", SHORT), text("b")]),
        Turn(role="assistant", content="c"),
        Turn(role="user", content=[text("d"), text("e", SHORT)]),
    ]
    assert breakpoints(None, None, "s", turns) == [Breakpoint(None, 300.0)]
    tools, system = [{"name": "f", "cache_control": HOUR}], [text("s", HOUR), text("t")]
    assert breakpoints(None, tools, system, turns) == [
        Breakpoint(BlockPlace(1, 0), 3600.0), Breakpoint(None, 300.0),
    ]  # fmt: skip
    assert breakpoints(HOUR, tools, system, turns) == [Breakpoint(None, 3600.0)]
    assert breakpoints(None, tools, None, turns[:2]) == [
        Breakpoint(BlockPlace(0, 0), 3600.0), Breakpoint(BlockPlace(2, 0, 0), 300.0),
    ]  # fmt: skip
    within = {"type": "tool_result", "tool_use_id": "x", "content": [text("r", SHORT)]}
    last = [*turns[:1], Turn(role="user", content=[within, text("u")])]
    assert breakpoints(None, None, None, last) == [Breakpoint(BlockPlace(2, 1, 0), 300.0)]
    assert breakpoints(None, None, None, [Turn(role="user", content="x")]) == []


TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }};{% endfor %}"
    "{% for each in messages %}[{{ each.role }} says {{ each.content | trim }}"
    "{% if each.tool_calls and each.content and 'Let me' not in each.content %}"
    "{{ raise_exception('it speaks while it calls') }}{% endif %}"
    "{% for call in each.tool_calls or [] %} and calls {{ call.function.name }} "
    "{{ call.function.arguments | tojson }}{% endfor %}]{% endfor %}{# <tool_call> #}"
)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    path = tmp_path_factory.mktemp("template") / "template.jinja"
    path.write_text(TEMPLATE)
    config = ApiConfig(chat_template=str(path))
    with (
        serve_model(config, kv_cache_memory="8MiB") as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


def num_kept(client: httpx.Client, **fields: Any) -> int:
    """Blocks that a request keeps in an empty cache."""
    client.delete("/v1/cache")
    body = {"model": "quire-storyteller", "max_tokens": 2, "temperature": 0, **fields}
    answer = client.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    return int(client.get("/v1/cache").json()["num_kept_blocks"])


def num_tokens(client: httpx.Client, **fields: Any) -> int:
    body = {"model": "quire-storyteller", **fields}
    answer = client.post("/v1/messages/count_tokens", json=body)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["input_tokens"])


def test_a_prompt_is_kept_up_to_its_breakpoint(client: httpx.Client) -> None:
    def turns(first: Any = None, second: Any = None, last: Any = None) -> dict[str, Any]:
        return {
            "system": [text(3 * STORY)],
            "messages": [
                {"role": "user", "content": [text(4 * STORY, first), text(2 * STORY, second)]},
                {"role": "assistant", "content": "It was red."},
                {"role": "user", "content": [text(4 * STORY, last)]},
            ],
        }

    size = 16
    bare = turns()
    whole = num_tokens(client, **bare)
    assert num_kept(client, **bare) == 0
    assert num_kept(client, **bare, cache_control=SHORT) == whole // size
    assert num_kept(client, **turns(last=HOUR)) == whole // size
    first, second = num_kept(client, **turns(first=SHORT)), num_kept(client, **turns(second=HOUR))
    until_first = num_tokens(
        client,
        system=bare["system"],
        messages=[{"role": "user", "content": [text(4 * STORY)]}],
    )
    assert 0 < first < second < whole // size
    assert abs(first - until_first // size) <= 1  # whose prompt asks for an answer behind it
    assert num_kept(client, **turns(first=SHORT, second=HOUR)) == second
    assert num_kept(client, **turns(first=HOUR, last=SHORT)) == whole // size
    marked = {**bare, "system": [text(3 * STORY, SHORT)]}
    assert 0 < num_kept(client, **marked) < first


def test_every_kind_of_block_can_end_what_is_kept(client: httpx.Client) -> None:
    use = {"type": "tool_use", "id": "t1", "name": "look", "input": {"thing": "ball"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": 2 * STORY}
    plain: dict[str, Any] = {
        "tools": [TOOL, {**TOOL, "name": "listen"}],
        "messages": [
            {"role": "user", "content": 2 * STORY},
            {"role": "assistant", "content": [text("Let me see."), use]},
            {"role": "user", "content": [result, text(2 * STORY)]},
            {"role": "assistant", "content": [text("A ball.")]},
            {"role": "user", "content": STORY},
        ],
    }
    assert num_kept(client, **plain) == 0
    whole, counts = num_tokens(client, **plain) // 16, list[int]()
    for number in range(2):
        tools = [dict(tool) for tool in plain["tools"]]
        tools[number]["cache_control"] = SHORT
        counts.append(num_kept(client, **{**plain, "tools": tools}))
    for number, place in ((1, 0), (1, 1), (2, 0), (2, 1), (3, 0)):
        messages: list[Any] = [dict(each) for each in plain["messages"]]
        blocks = list(messages[number]["content"])
        blocks[place] = {**blocks[place], "cache_control": SHORT}
        messages[number]["content"] = blocks
        counts.append(num_kept(client, **{**plain, "messages": messages}))
    assert counts[0] > 0 and counts[-1] < whole, counts
    assert all(one <= next_ for one, next_ in itertools.pairwise(counts)), counts
    assert len(set(counts)) >= 5, counts


def test_a_template_that_takes_no_mark_refuses_no_request(client: httpx.Client) -> None:
    use = {"type": "tool_use", "id": "t1", "name": "look", "input": {"thing": "ball"}}
    thought = {"type": "thinking", "thinking": "A ball?", "signature": ""}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": 2 * STORY},
        {"role": "assistant", "content": [{**thought, "cache_control": SHORT}, use]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": STORY}],
        },
    ]
    whole = num_tokens(client, tools=[TOOL], messages=turns)
    assert num_kept(client, tools=[TOOL], messages=turns) == whole // 16


def test_a_block_that_the_template_passes_over_ends_where_it_stands() -> None:
    turns = [Turn(role="assistant", content=[text("a"), {"type": "redacted_thinking"}, text("b")])]
    place = BlockPlace(2, 0, 1)
    [marked] = marked_turns(place, turns, "MARK", is_behind=True)
    assert [each.get("text") for each in marked.content if isinstance(each, dict)] == [
        "a", None, "MARK", "b",
    ]  # fmt: skip
