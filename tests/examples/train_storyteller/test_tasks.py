"""Requests that are no stories: what is asked can be answered from the request, in the format of
the chat template, and held-out tools are never trained on."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from tokenizers import Tokenizer

from examples.train_storyteller import prompts
from examples.train_storyteller.abilities import _call_in, declared, repeated_share
from examples.train_storyteller.samples import MAX_LEN, Encoder
from examples.train_storyteller.tasks import TaskSource, draw_call, draw_object, tools_turn
from quire.text.chat import ChatTemplate
from quire.text.tools import HERMES, format_of_template
from quire.weights.folder import resolve_model


def test_the_right_call_can_be_read_in_the_request() -> None:
    rng = random.Random(1)
    for _ in range(300):
        tools, request, tool, value = draw_call(rng, ("teaspoon",))
        assert tool in tools and value in request and not tool.is_held_out
        assert len({each.name for each in tools}) == len(tools) <= 3
        call = _call_in(tool.call(value))
        assert call == {"name": tool.name, "arguments": {tool.argument: value}}
    assert all(draw_call(rng, is_held_out=True)[2].is_held_out for _ in range(20))


def test_an_object_is_what_the_text_says() -> None:
    rng = random.Random(2)
    for _ in range(300):
        exchange, record = draw_object(rng, ("teaspoon",), is_made_up=False)
        assert json.loads(exchange.answer) == record
        for key, value in record.items():
            assert key in exchange.head and str(value) in exchange.head


def test_exchanges_fit_the_context_and_name_what_is_in_the_answer() -> None:
    tokenizer = Tokenizer.from_file(str(resolve_model("quire-storyteller") / "tokenizer.json"))
    source, encoder, rng = TaskSource(("teaspoon",)), Encoder(tokenizer), random.Random(3)
    for _ in range(200):
        exchange = source.draw(rng)
        answer = exchange.answer.lower()
        assert all(word.lower() in answer for word in exchange.named)
        sample = encoder.join([(exchange.head, exchange.answer)], True, exchange.named)
        assert len(sample.ids) < MAX_LEN and any(sample.is_target)


@pytest.mark.parametrize("has_result", [False, True])
def test_the_chat_template_writes_what_is_trained_on(has_result: bool) -> None:
    template = ChatTemplate(prompts.CHAT_TEMPLATE)
    tools, request, tool, value = draw_call(random.Random(4))
    shown = [declared(each.name, each.description, each.argument) for each in tools]
    messages: list[dict[str, Any]] = [{"role": "user", "content": request}]
    wanted = tools_turn(tools) + prompts.turn("user", request) + prompts.reply_start()
    if has_result:
        function = {"name": tool.name, "arguments": json.dumps({tool.argument: value})}
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [{"function": function}]},
            {"role": "tool", "content": "sunny"},
        ]
        wanted += tool.call(value) + "<|im_end|>\n" + prompts.turn("tool", "sunny")
        wanted += prompts.reply_start()
    assert template.render(messages, add_generation_prompt=True, tools=shown) == wanted


def test_the_template_is_known_by_its_notation_and_leaves_chats_as_they_were() -> None:
    assert format_of_template(prompts.CHAT_TEMPLATE) is HERMES
    template = ChatTemplate(prompts.CHAT_TEMPLATE)
    parts = [{"type": "text", "text": "Tell me "}, {"type": "text", "text": "a story."}]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": parts},
    ]
    assert template.render(messages, add_generation_prompt=True) == (
        prompts.turn("system", "Be kind.") + prompts.turn("user", "Tell me a story.")
        + prompts.reply_start()
    )  # fmt: skip


def test_what_is_no_single_call_is_none() -> None:
    for text in ("", "Hello.", "<tool_call>\n{</tool_call>", "<tool_call>\n[1]\n</tool_call>"):
        assert _call_in(text) == {}


def test_repetition_is_counted_between_texts() -> None:
    one, other = "a b c d e f g", "h i j k l m n"
    assert repeated_share([one, other]) == 0.0 and repeated_share([one, one]) == 1.0
    assert repeated_share([one + " x", one, other]) == pytest.approx((2 / 3 + 1 + 0) / 3)
