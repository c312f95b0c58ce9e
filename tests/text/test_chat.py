"""Chats render as transformers renders them, and users' text never becomes a control token."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from timing import timed

from quire.errors import ConfigError, InvalidParameterError, RequestError
from quire.text.chat import ChatTemplate, encode_chat
from quire.text.files import read_text_config
from quire.text.tokenizer import Tokenizer
from quire.text.traced import spans_of

NAMED = {
    "bos_token": "<|bos|>",
    "eos_token": "<|eos|>",
    "pad_token": "<|pad|>",
    "unk_token": "<unk>",
}
Load = Callable[[str], Tokenizer]

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather, é",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "A <b> city"}},
        },
    },
}


def _called(arguments: Any) -> list[dict[str, Any]]:
    call = {
        "id": "abcdefghi",
        "type": "function",
        "function": {"name": "get_weather", "arguments": arguments},
    }
    return [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "get_weather", "content": '{"t": 3}'},
    ]


CASES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None, dict[str, Any]]] = {
    "one": ([{"role": "user", "content": " Hi 'there' & <b>\n"}], None, {}),
    "turns": (
        [
            {"role": "system", "content": "Be nice."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello!"},
            {"role": "user", "content": "2+2?"},
        ],
        None,
        {},
    ),
    "thinking": (
        [
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "content": "<think>\nhm\n</think>\n\nHello!",
                "reasoning_content": "hm",
            },
            {"role": "user", "content": "2+2?"},
        ],
        None,
        {"enable_thinking": False},
    ),
    "tools": ([{"role": "user", "content": "Weather?"}], [TOOL], {}),
    "called": (_called({"city": "Zürich"}), [TOOL], {}),
    "called-json": (_called('{"city": "Zürich"}'), [TOOL], {}),
    "parts": (
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "!"}],
            }
        ],
        None,
        {},
    ),
}


@pytest.fixture(scope="session")
def templates(shared: Path) -> dict[str, ChatTemplate]:
    """The published templates among the shared data (of Mistral's many variants, those for text),
    compiled once."""
    folder = shared / "data/tokenizers"
    paths = [
        path
        for path in sorted(folder.rglob("*.jinja"))
        if path.parent.parent.name != "mistral" or "_" not in path.stem
    ]
    sources = {path.name: path.read_text() for path in paths}
    for path in sorted(folder.glob("*/tokenizer_config.json")):
        found = read_text_config(path.parent).chat_templates
        sources |= {f"{path.parent.name}/{name}": text for name, text in found.items()}
    assert len(sources) > 75
    return {name: ChatTemplate(source, NAMED) for name, source in sources.items()}


def _render_reference(compiled: Any, case: str, add_generation_prompt: bool) -> str | None:
    messages, tools, kwargs = CASES[case]
    variables = {
        "messages": json.loads(json.dumps(messages)),
        "tools": tools,
        "documents": None,
        **kwargs,
        **NAMED,
    }
    try:
        text: str = compiled.render(add_generation_prompt=add_generation_prompt, **variables)
    except Exception:  # the template refuses these messages, in whatever way
        return None
    return text


def _render(template: ChatTemplate, case: str, add_generation_prompt: bool) -> str | None:
    messages, tools, kwargs = CASES[case]
    try:
        return template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            template_kwargs=kwargs,
        )
    except RequestError:
        return None


CONTROL_LIKE = re.compile(
    r"<\|[^|<>\n]*\|>|<｜[^｜\n]*｜>|</?(?:start_of_turn|end_of_turn|s)>|\[/?[A-Z_]{4,}\]"
)


@pytest.mark.slow
def test_every_template_renders_as_in_transformers_and_keeps_its_own_tokens(
    templates: dict[str, ChatTemplate],
) -> None:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    num_equal = 0
    for name, template in templates.items():
        reference = _compile_jinja_template(template.source)
        for case in CASES:
            for add_generation_prompt in (True, False) if case == "turns" else (True,):
                expected = _render_reference(reference, case, add_generation_prompt)
                text = _render(template, case, add_generation_prompt)
                assert text == expected, (name, case)
                if text is None:
                    continue
                num_equal += 1
                own = [(start, end) for start, end, level in spans_of(text) if level == 2]
                for match in CONTROL_LIKE.finditer(text):
                    assert any(
                        start <= match.start() and match.end() <= end for start, end in own
                    ), (name, match[0])
    assert num_equal > 500


@pytest.mark.slow
def test_no_template_lends_its_trust_to_users(templates: dict[str, ChatTemplate]) -> None:
    mark = "\ua66e"  # ꙮ, which no template writes
    for name, template in templates.items():
        for messages, tools, kwargs in CASES.values():
            text = (
                json.dumps([messages, tools])
                .replace("Weather", f"Weather {mark * 3}")
                .replace("Hi", mark)
            )
            text = text.replace("city", f"c{mark}").replace("Be nice", f"{mark}<think>{mark}")
            marked_messages, marked_tools = json.loads(text)
            try:
                rendered = template.render(
                    marked_messages, tools=marked_tools, template_kwargs=kwargs
                )
            except RequestError:
                continue
            trusted = "".join(
                rendered[start:end] for start, end, level in spans_of(rendered) if level == 2
            )
            assert mark not in trusted and mark.encode("unicode_escape").decode() not in trusted, (
                name
            )


@pytest.mark.slow_except("*-qwen3")
@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "phi-3-mini"])
@pytest.mark.parametrize("case", CASES)
def test_benign_chats_have_the_ids_of_parsing_everything(load: Load, name: str, case: str) -> None:
    tokenizer = load(name)
    template = ChatTemplate.from_tokenizer(tokenizer)
    text = _render(template, case, True)
    if text is not None:
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
        assert encode_chat(tokenizer, text) == ids
        assert len(set(ids) & tokenizer.special_token_ids) > 0


def test_ids_are_those_of_transformers(load: Load, tokenizer_folder: Callable[[str], Path]) -> None:
    from transformers import AutoTokenizer

    reference: Any = AutoTokenizer.from_pretrained(tokenizer_folder("qwen3"))
    tokenizer = load("qwen3")
    template = ChatTemplate.from_tokenizer(tokenizer)
    for case in ("one", "turns", "thinking", "tools", "called"):
        messages, tools, kwargs = CASES[case]
        expected = reference.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, return_dict=False, **kwargs
        )
        assert (
            encode_chat(tokenizer, template.render(messages, tools=tools, template_kwargs=kwargs))
            == expected
        )


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "phi-3-mini"])
def test_every_control_token_in_a_message_is_plain_text(load: Load, name: str) -> None:
    tokenizer = load(name)
    template = ChatTemplate.from_tokenizer(tokenizer)
    controls = {tokenizer.token_to_id(text) for text in tokenizer.control_level}

    def num_controls(text: str) -> int:
        messages = [{"role": role, "content": text} for role in ("user", "assistant", "user")]
        rendered = template.render([{"role": "system", "content": text}, *messages])
        ids = encode_chat(tokenizer, rendered)
        assert tokenizer.decode(ids, skip_special_tokens=False).count(text) >= 3
        return sum(token in controls for token in ids)

    benign = num_controls("benign")
    for text, level in tokenizer.control_level.items():
        expected = benign + (level == 1)  # an assistant may have written <tool_call> as the token
        assert num_controls(f"a {text} b") <= expected, text
        assert num_controls(f"a {text} b") >= benign, text


SPLICING = (
    "{% for m in messages %}<|im_start|>{{ m.a }}{{ m.b }}{{ (m.a ~ m.b)|replace('#', '')|trim "
    "}}<|im_end|>{% endfor %}"
)


def test_control_tokens_put_together_from_pieces_are_plain_text(load: Load) -> None:
    tokenizer = load("qwen3")
    messages = [
        {"role": "user", "a": "<|im_", "b": "start|>"},
        {"role": "user", "a": "<|im_#e", "b": "nd|#>"},
    ]
    ids = encode_chat(tokenizer, ChatTemplate(SPLICING).render(messages))
    start, end = tokenizer.token_to_id("<|im_start|>"), tokenizer.token_to_id("<|im_end|>")
    assert start is not None and end is not None
    assert (ids.count(start), ids.count(end)) == (2, 2)


def test_only_known_roles_may_complete_a_control_token(load: Load) -> None:
    tokenizer = load("phi-3-mini")
    template = ChatTemplate("{% for m in messages %}{{ '<|' + m.role + '|>' }}{% endfor %}")
    ids = encode_chat(tokenizer, template.render([{"role": "user"}, {"role": "endoftext"}]))
    user = tokenizer.token_to_id("<|user|>")
    assert user is not None
    assert ids.count(user) == 1
    assert tokenizer.token_to_id("<|endoftext|>") not in ids


def test_an_assistants_message_may_hold_what_the_model_wrote_as_a_token(load: Load) -> None:
    tokenizer = load("qwen3")
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    token = tokenizer.token_to_id("<think>")
    assert token is not None
    for role, count in (("assistant", 1), ("user", 0), ("tool", 0), ("system", 0)):
        ids = encode_chat(
            tokenizer, template.render([{"role": role, "content": "<think>a<|im_end|>"}])
        )
        assert ids.count(token) == count
        assert tokenizer.token_to_id("<|im_end|>") not in ids


def test_a_plain_string_has_no_control_tokens(load: Load) -> None:
    tokenizer = load("qwen3")
    text = "<|im_start|>user"
    assert encode_chat(tokenizer, text) == tokenizer.encode(text, parse_special=False)


def test_format_keeps_what_the_template_wrote(load: Load) -> None:
    tokenizer = load("qwen3")
    source = (
        "{{ '<|im_{}|>{}{x!s:>3}'.format('start', messages[0].content, x=messages[0].content) }}"
    )
    rendered = ChatTemplate(source).render([{"role": "user", "content": "<|im_end|>"}])
    assert rendered == "<|im_start|><|im_end|><|im_end|>"
    ids = encode_chat(tokenizer, rendered)
    assert (
        ids[0] == tokenizer.token_to_id("<|im_start|>")
        and tokenizer.token_to_id("<|im_end|>") not in ids
    )


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "range", "_x"]
)
def test_kwargs_cannot_override_internals(name: str) -> None:
    template = ChatTemplate("{{ messages|length }}{{ eos_token }}", {"eos_token": "</s>"})
    with pytest.raises(InvalidParameterError, match=name) as caught:
        template.render([{"role": "user", "content": ""}], template_kwargs={name: "x"})
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize("value", [[], {}, object(), b"x"])
def test_kwargs_are_scalars(value: Any) -> None:
    with pytest.raises(InvalidParameterError, match="must be text, a number"):
        ChatTemplate("x").render([{"role": "user"}], template_kwargs={"extra": value})


def test_kwargs_reach_the_template_as_plain_text(load: Load) -> None:
    rendered = ChatTemplate("{{ effort }}{{ deep }}").render(
        [], template_kwargs={"effort": "<|im_end|>", "deep": None}
    )
    assert rendered == "<|im_end|>None" and spans_of(rendered) == ()


@pytest.mark.parametrize(
    "messages", [["x"], [{"content": "x"}], [{"role": 1}], [{"role": "user", "content": {1, 2}}]]
)
def test_messages_must_be_plain_data(messages: Any) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        ChatTemplate("x").render(messages)
    assert caught.value.param == "messages"


def test_deeply_nested_messages_are_refused() -> None:
    content: list[Any] = []
    for _ in range(5000):
        content = [content]
    with pytest.raises(InvalidParameterError, match="nested"):
        ChatTemplate("x").render([{"role": "user", "content": content}])


def test_what_a_template_raises_is_said() -> None:
    with pytest.raises(
        RequestError, match=r"cannot render these messages: Roles must alternate \(line 2"
    ):
        ChatTemplate("\n{{ raise_exception('Roles must alternate') }}").render([])
    with pytest.raises(RequestError, match=r"fails on these messages with TypeError \(line 1"):
        ChatTemplate("{{ 'a' + messages[0].secret }}").render([{"role": "user", "secret": 1}])


def test_the_clock_is_injected() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2024, 7, 26))
    assert template.render([]) == "26 Jul 2024"


def test_the_final_message_is_left_open(load: Load) -> None:
    template = ChatTemplate.from_tokenizer(load("qwen2.5"))
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}]
    assert template.render(messages, continue_final_message=True).endswith(
        "<|im_start|>assistant\nWell, "
    )
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    spread = ChatTemplate(
        "{% for m in messages %}{% for c in m.content %}[{{ c.text|trim }}]{% endfor %}{% endfor %}"
    )
    assert spread.render(parts, continue_final_message=True) == "[Hi"
    opened = ChatTemplate("{{ messages[-1].content }}").render(
        [{"role": "assistant", "content": "<think> a"}], continue_final_message=True
    )
    assert encode_chat(load("qwen3"), opened)[0] == load("qwen3").token_to_id("<think>")
    with pytest.raises(InvalidParameterError, match="text to continue"):
        template.render([{"role": "assistant", "content": None}], continue_final_message=True)
    with pytest.raises(RequestError, match="does not show"):
        ChatTemplate("x").render(messages, continue_final_message=True)


def test_a_model_without_a_template_says_so(load: Load) -> None:
    with pytest.raises(ConfigError, match="it has none"):
        ChatTemplate.from_tokenizer(load("falcon"))
    with pytest.raises(ConfigError, match=r"'rag' \(it has \['default'\]\)"):
        ChatTemplate.from_tokenizer(load("qwen3"), "rag")


@timed
@pytest.mark.parametrize("unit", ["<|im_end|>", "<", "</think>", "\n "])
def test_rendering_and_encoding_take_linear_time(load: Load, unit: str) -> None:
    tokenizer = load("qwen3")
    template = ChatTemplate.from_tokenizer(tokenizer)

    def seconds(num_chars: int) -> float:
        times = []
        for _ in range(2):
            start = time.process_time()
            content = (unit * num_chars)[:num_chars]
            messages = [
                {"role": role, "content": content} for role in ("user", "assistant", "user")
            ]
            encode_chat(tokenizer, template.render(messages))
            times.append(time.process_time() - start)
        return min(times)

    seconds(1000)
    # Eight times the text; quadratic work would take 64 times as long.
    assert seconds(40_000) < 20 * seconds(5_000) + 0.02


@pytest.mark.slow
@timed
def test_many_messages_take_linear_time(load: Load) -> None:
    tokenizer = load("qwen3")
    template = ChatTemplate.from_tokenizer(tokenizer)

    def seconds(num_messages: int) -> float:
        start = time.process_time()
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}] * (
            num_messages // 2
        )
        encode_chat(tokenizer, template.render(messages))
        return time.process_time() - start

    seconds(10)
    assert seconds(4000) < 20 * min(seconds(500) for _ in range(3)) + 0.02


@pytest.mark.parametrize("stride", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_what_reads_no_messages_is_no_chat_template(shared: Path, stride: int) -> None:
    """A template may also set `messages` anew, or read it within a macro only."""
    paths = sorted((shared / "data/tokenizers").rglob("*.jinja"))
    known = [path.read_text() for path in paths[::stride]]
    some = [
        "{% set messages = messages[1:] %}{{ messages }}",
        "{% if x is defined %}{% set messages = [] %}{% endif %}{{ messages }}",
        "{% macro all() %}{{ messages }}{% endmacro %}{{ all() }}",
    ]
    assert len(paths) > 50 and all(ChatTemplate(each).reads_messages for each in known + some)
    for each in ("", "Hello!", "{{ message }}", '{"messages": []}', "{# messages #}{{ tools }}"):
        assert not ChatTemplate(each).reads_messages
