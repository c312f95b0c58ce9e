"""OpenAI behaviours 48 to 53: answers of a given form, through the official client,
and what cannot be enforced."""

from __future__ import annotations

import asyncio
import json
import re
from enum import Enum
from typing import Annotated, Any, Optional

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field
from servers import MODEL, RunningServer

from quire.text.tokenizer import Tokenizer
from quire.weights.folder import resolve_model

CAT: list[Any] = [{"role": "user", "content": "Tell me of a cat."}]


class Colour(Enum):
    BLACK = "black"
    RED = "red"


class Paw(BaseModel):
    is_white: bool
    toes: list[Annotated[int, Field(ge=1, le=5)]] = Field(max_length=2)


class Cat(BaseModel):
    name: str = Field(max_length=8)
    colour: Colour
    age: Optional[Annotated[int, Field(ge=0, le=30)]]  # noqa: UP045 - as users write it
    paws: list[Annotated[list[Paw], Field(max_length=4)]] = Field(max_length=1)


TOKENIZER = Tokenizer.from_folder(resolve_model(MODEL))


class Tree(BaseModel):
    value: int = Field(ge=0, le=9)
    children: list[Tree] = Field(max_length=1)


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "kind": {"enum": ["cat", "dog", 3, None]},
        "tags": {
            "type": "array",
            "items": {"type": "string", "pattern": "^[a-z]{1,4}$"},
            "maxItems": 2,
        },
        "at": {"type": "string", "format": "date"},
    },
    "required": ["name", "kind", "tags", "at"],
    "additionalProperties": False,
}


def named(schema: Any, **changes: Any) -> dict[str, Any]:
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": True, **changes},
    }


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    fields = {"max_tokens": 200, "seed": 7, "temperature": 1.0, **fields}
    return client.chat.completions.create(model=MODEL, messages=CAT, **fields)


def refused(client: openai.OpenAI, **fields: Any) -> openai.BadRequestError:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, extra_body=fields)
    return caught.value


def test_48_50_a_strict_schema_always_validates(client: openai.OpenAI) -> None:
    answer = ask(client, response_format=named(PERSON), n=8)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), PERSON)
    assert len({choice.message.content for choice in answer.choices}) == 8


def test_48_a_json_object_is_one(client: openai.OpenAI) -> None:
    whole = [
        json.loads(choice.message.content)
        for choice in ask(
            client,
            response_format={"type": "json_object"},
            n=8,
            max_tokens=60,
            stop=["}"],
            extra_body={"include_stop_str_in_output": True},
        ).choices
        if choice.message.content.count("{") == 1 and choice.finish_reason == "stop"
    ]
    assert all(isinstance(each, dict) for each in whole)
    assert (
        ask(client, response_format={"type": "json_object"}, max_tokens=1)
        .choices[0]
        .message.content.startswith("{")
    )


_INNERMOST = {str(TOKENIZER.encode("x")[0]): 20}
"""Left to itself, the model opens one bracket in another without end."""


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[a-z]{3} [0-9]{2}"}, "[a-z]{3} [0-9]{2}"),
        ({"guided_choice": ["yes", 'no "really"']}, 'yes|no "really"'),
        ({"structured_outputs": {"regex": "(a|b){4}"}}, "[ab]{4}"),
        ({"structured_outputs": {"choice": ["Ä", "\n"]}}, "Ä|\n"),
        ({"guided_grammar": 'start: "(" start ")" | "x"', "logit_bias": _INNERMOST}, r"\(*x\)*"),
        ({"guided_json": {"type": "integer", "minimum": 10, "maximum": 99}}, "[1-9][0-9]"),
        (
            {"structured_outputs": {"json": '{"const":{"a":[1]}}', "disable_any_whitespace": True}},
            r'\{"a":\[1\]\}',
        ),
    ],
)
def test_forms_that_vllm_adds(
    client: openai.OpenAI, http: httpx.Client, fields: dict[str, Any], pattern: str
) -> None:
    content = ask(client, extra_body=fields).choices[0].message.content
    assert re.fullmatch(pattern, content)
    body = {"prompt": "Once", "max_tokens": 60, "seed": 3, **fields}
    legacy = http.post("/v1/completions", json=body).json()["choices"][0]
    assert re.fullmatch(pattern, legacy["text"]) and legacy["finish_reason"] == "stop"


@pytest.mark.parametrize("name", [None, "", "has space", "x" * 65, "ä", 5])
def test_49_the_name_is_required(client: openai.OpenAI, name: Any) -> None:
    assert (
        refused(client, response_format=named({}, name=name)).param
        == "response_format.json_schema.name"
    )


def test_51_a_cut_answer_says_so_and_parse_raises(client: openai.OpenAI) -> None:
    answer = ask(client, response_format=named(PERSON), max_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=MODEL, messages=CAT, response_format=Cat, max_tokens=3)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (
            {"response_format": named({"type": "object", "not": {}})},
            "response_format.json_schema.schema",
            "'not'",
        ),
        (
            {"response_format": named({"oneOf": [{"type": "integer"}, {"type": "number"}]})},
            "response_format.json_schema.schema",
            "oneOf",
        ),
        (
            {"response_format": named({"type": "strnig"})},
            "response_format.json_schema.schema",
            "strnig",
        ),
        (
            {"response_format": named(False)},
            "response_format.json_schema.schema",
            "accepts nothing",
        ),
        ({"response_format": named([])}, "response_format.json_schema.schema", "list"),
        (
            {"response_format": named({"$ref": "file:///etc/passwd"})},
            "response_format.json_schema.schema",
            "fetched",
        ),
        (
            {"response_format": named({}, strict="yes")},
            "response_format.json_schema.strict",
            "true or false",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "object"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type", "json_schema"),
        ({"response_format": "json"}, "response_format.type", "json_schema"),
        ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
        ({"guided_regex": "(a"}, "guided_regex", "cannot be compiled"),
        ({"guided_grammar": "root ::= 'a' b"}, "guided_grammar", "line 1, column 14"),
        ({"guided_grammar": "start: 'a'"}, "guided_grammar", "cannot be compiled"),
        (
            {"structured_outputs": {"grammar": "root ::= [a"}},
            "structured_outputs",
            "line 1, column 10",
        ),
        ({"guided_choice": []}, "guided_choice", "strings"),
        ({"guided_json": "{"}, "guided_json", "JSON"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "together"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "structural_tag"),
        ({"structured_outputs": {"json": {"if": {}}}}, "structured_outputs.json", "'if'"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "both"),
        ({"guided_regex": "a", "min_tokens": 5}, "min_tokens", "contradicts"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "contradicts"),
    ],
)
def test_52_what_cannot_be_enforced_is_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str, words: str
) -> None:
    error = refused(client, **fields)
    assert error.param == param and words in error.message


def test_53_parse_with_pydantic(client: openai.OpenAI) -> None:
    for seed in range(3):
        fields: dict[str, Any] = {"model": MODEL, "messages": CAT, "seed": seed, "max_tokens": 300}
        cat = client.chat.completions.parse(**fields, response_format=Cat).choices[0].message.parsed
        assert isinstance(cat, Cat) and cat.colour in Colour
        # left to itself, the model opens one list in another without end
        ends = {
            str(token): 10 for text in ("]", " ]", "]}") for token in TOKENIZER.encode(text)[:1]
        }
        tree = (
            client.chat.completions.parse(**fields, response_format=Tree, logit_bias=ends)
            .choices[0]
            .message.parsed
        )
        assert isinstance(tree, Tree)


@pytest.mark.slow
def test_53_parse_asynchronously_and_as_a_stream(
    server: RunningServer, client: openai.OpenAI
) -> None:
    fields: dict[str, Any] = {
        "model": MODEL,
        "messages": CAT,
        "seed": 5,
        "max_tokens": 300,
        "response_format": Cat,
    }

    async def main() -> Any:
        async with openai.AsyncOpenAI(base_url=server.v1, api_key="x", max_retries=0) as client:
            return (await client.chat.completions.parse(**fields)).choices[0].message

    message = asyncio.run(main())
    with client.chat.completions.stream(**fields) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_completion().choices[0].message
    assert {"content.delta", "content.done"} <= kinds
    assert streamed.content == message.content and streamed.parsed == message.parsed


@pytest.mark.slow
def test_logprobs_penalties_and_stop_strings_beside_a_form(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "response_format": named(PERSON),
        "presence_penalty": 1.5,
        "frequency_penalty": 1.0,
        "top_p": 0.9,
    }
    answer = ask(client, **fields, logprobs=True, top_logprobs=2).choices[0]
    jsonschema.validate(json.loads(answer.message.content), PERSON)
    assert (
        b"".join(bytes(token.bytes or ()) for token in answer.logprobs.content).decode()
        == answer.message.content
    )
    stopped = ask(client, **fields, stop='"kind"').choices[0]
    assert (
        stopped.message.content == answer.message.content[: answer.message.content.index('"kind"')]
    )


@pytest.mark.slow
def test_responses_with_a_form(client: openai.OpenAI) -> None:
    text: Any = {
        "format": {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}
    }
    response = client.responses.create(
        model=MODEL, input="A cat?", text=text, max_output_tokens=200, temperature=0.8
    )
    assert response.status == "completed"
    jsonschema.validate(json.loads(response.output_text), PERSON)
    assert (
        response.text is not None
        and response.text.format is not None
        and response.text.format.type == "json_schema"
    )
    parsed = client.responses.parse(
        model=MODEL, input="A cat?", text_format=Cat, max_output_tokens=300
    ).output_parsed
    assert isinstance(parsed, Cat)
    unfit: Any = {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="x", text=unfit)
    assert caught.value.param == "text.format.schema"


def test_a_form_changes_nothing_for_the_neighbours(client: openai.OpenAI) -> None:
    plain = [ask(client, max_tokens=12, seed=seed).choices[0].message.content for seed in range(3)]

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=str(client.base_url), api_key="x", max_retries=0
        ) as many:
            jobs = [
                many.chat.completions.create(
                    model=MODEL, messages=CAT, seed=seed % 3, temperature=1.0, max_tokens=12,
                    extra_body={} if seed < 3 else {"guided_regex": f"[a-z]{{{seed},9}}"},
                )
                for seed in range(8)
            ]  # fmt: skip
            return [each.choices[0].message.content or "" for each in await asyncio.gather(*jobs)]

    assert asyncio.run(main())[:3] == plain
