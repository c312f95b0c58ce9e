"""The grammars of calls: what a model may write where tools are offered, and what not."""

from __future__ import annotations

import asyncio

import pytest

from quire.core.grammars import Grammar
from quire.grammar.backend import NativeVocabulary, Vocabulary, compile_grammar
from quire.grammar.judge import judge
from quire.server.api.tools import Demand, Function, settle_tools
from quire.server.http.errors import ApiError
from quire.text.tools import HERMES, LLAMA3, MISTRAL, ToolFormat

BYTES = Vocabulary([*(bytes([byte]) for byte in range(256)), b"<end>"], frozenset({256}), (256,))
HERMES_CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
SCHEMA = {"properties": {"a": {"type": "integer"}}, "additionalProperties": False}


def accepted(form: ToolFormat, text: str, demand: Demand) -> tuple[int, bool]:
    """(bytes of the text that can be written, whether the answer may end there)."""
    function = Function(name="f", parameters=SCHEMA, strict=True)
    settled = asyncio.run(settle_tools([function, Function(name="g")], demand, (form, None)))
    assert settled is not None and settled.grammar is not None
    matcher = compile_grammar(settled.grammar, NativeVocabulary(BYTES)).deep_copy()
    return matcher.try_consume_tokens(list(text.encode())), matcher.is_accepting()


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, "A text with <tool and <b> in it"),
        (HERMES, f"Let me see. {HERMES_CALL}"),
        (HERMES, f"{HERMES_CALL}\n{HERMES_CALL}"),
        (MISTRAL, "A text"),
        (
            MISTRAL,
            '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        ),
        (LLAMA3, "A text with {braces}"),
        (LLAMA3, '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {"x": []}}'),
    ],
)
def test_with_a_strict_function_text_or_calls_or_both(form: ToolFormat, text: str) -> None:
    assert accepted(form, text, Demand()) == (len(text), True)


@pytest.mark.parametrize(
    ("text", "num_refused"),
    [
        ('Let me see. <tool_call>\n{"name": "f", "arguments": {"b', 1),
        ('<tool_call>\n{"name": "h', 1),
        ("<tool_call>x", 1),
        (f"{HERMES_CALL} and", 4),
    ],
)
def test_with_a_strict_function_a_call_has_its_form(text: str, num_refused: int) -> None:
    assert accepted(HERMES, text, Demand())[0] == len(text) - num_refused


def test_a_demand_leaves_no_room_for_text() -> None:
    assert accepted(HERMES, HERMES_CALL, Demand(mode="required")) == (len(HERMES_CALL), True)
    assert accepted(HERMES, "A", Demand(mode="required"))[0] == 0
    assert accepted(HERMES, f"{HERMES_CALL}\n", Demand(mode="required", is_parallel=False))[
        0
    ] == len(HERMES_CALL)
    only_g = Demand(mode="named", names={"g"})
    assert accepted(HERMES, '<tool_call>\n{"name": "f', only_g)[0] == len('<tool_call>\n{"name": "')


def test_t20_between_two_schemas_the_loop_does_other_things() -> None:
    """Also where all verdicts are known already, so that nothing has to be waited for."""
    functions = [Function(name=f"f{number}", parameters=SCHEMA) for number in range(64)]

    async def count_turns() -> int:
        await settle_tools(functions, Demand(mode="required"), (HERMES, None))
        settling = asyncio.create_task(
            settle_tools(functions, Demand(mode="required"), (HERMES, None))
        )
        num_turns = 0
        while not settling.done():
            await asyncio.sleep(0)
            num_turns += 1
        return num_turns

    assert asyncio.run(count_turns()) >= 64


def test_t11_schemas_that_nothing_holds_a_call_to_are_not_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And of those that are, no more than fit into one grammar: each may take a second."""

    async def refuse(grammar: Grammar) -> None:
        raise AssertionError("nothing needs this grammar")

    monkeypatch.setattr(judge, "check_async", refuse)
    large = [
        Function(name=f"f{n}", parameters={"properties": {"a": {"const": "x" * 9000}}})
        for n in range(64)
    ]
    settled = asyncio.run(settle_tools(large, Demand(), (HERMES, None)))
    assert settled is not None and settled.grammar is None and len(settled.shown) == 64
    with pytest.raises(ApiError, match="together"):
        asyncio.run(settle_tools(large, Demand(mode="required"), (HERMES, None)))
