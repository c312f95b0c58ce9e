"""POST /v1/decisions: predicates, choices and scores over one input, answered by probabilities.

What an input and questions come to is the same as `LLM.decide` makes of them. Runs through the
generator, with all its limits: a request is as many prompts as it has questions, which begin alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from quire.engine.decisions.answers import Answer, ChoiceAnswer, PredicateAnswer, answer_to
from quire.engine.decisions.prompts import (
    DecisionPrompts,
    Message,
    QuestionPrompt,
    StatePrompt,
)
from quire.engine.decisions.questions import (
    Choice,
    Level,
    Option,
    Predicate,
    Question,
    Score,
    num_chars,
)
from quire.errors import InvalidParameterError
from quire.server.api.generation import GenerationJob, Usage
from quire.server.api.openai.fields import NO_EFFECT, asks_for_something
from quire.server.api.openai.messages import for_template
from quire.server.api.openai.response_items import InputReader, messages_of
from quire.server.api.openai.shapes import InputItem
from quire.server.http.body import read_json, shape
from quire.server.http.call import Call, call_of
from quire.server.http.errors import bad_request, unavailable_feature
from quire.server.http.off_loop import off_loop
from quire.server.http.responses import json_response
from quire.server.state import Api

MAX_QUESTIONS = 400
_T = TypeVar("_T")
Priority = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]
Name = Annotated[str, Meta(max_length=256)]
_HINTS = ("prompt_cache_key", "prompt_cache_options", "safety_identifier")


class InstructionPart(Struct):
    """A piece of a question."""

    type: str
    text: str = ""


class ChoiceOption(Struct):
    """One of the values to choose among."""

    value: str | bool
    description: str | None = None


class ScoreLevel(Struct):
    """One level, the lowest first."""

    label: str
    description: str | None = None


class AskedQuestion(Struct, kw_only=True, tag_field="type"):
    """What all questions have."""

    instructions: str | list[InstructionPart]
    name: Name | None = None


class AskedPredicate(AskedQuestion, kw_only=True, tag="predicate"):
    """How likely it is that a statement about the input holds."""


class AskedChoice(AskedQuestion, kw_only=True, tag="choice"):
    """Which of the values is the right one."""

    choices: list[ChoiceOption]


class AskedScore(AskedQuestion, kw_only=True, tag="score"):
    """Where the input stands on a scale."""

    levels: list[ScoreLevel]


class DecisionFields(Struct, kw_only=True):
    """What the bodies of both endpoints may have."""

    model: str | None = None
    user: Any = None
    priority: Priority | None = None
    cache_salt: Annotated[str, Meta(max_length=1024)] | None = None
    state_field: ClassVar[str] = "input"
    """What holds what the questions are about."""


class DecisionRequest(DecisionFields, kw_only=True):
    """The body."""

    input: str | list[Annotated[dict[str, Any], shape(InputItem)]]
    questions: list[AskedPredicate | AskedChoice | AskedScore]
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    safety_identifier: Any = None


class Decisions:
    """The endpoint."""

    def __init__(self, runs: DecisionRuns, *, is_strict: bool) -> None:
        self._runs = runs
        self._is_strict = is_strict

    async def post(self, request: Request) -> Response:
        """Answer questions about one input by the probabilities of their options."""
        call = call_of(request)
        body = await read_json(request, DecisionRequest, is_strict=self._is_strict)
        model = self._runs.choose_model(call, body)
        call.ignore((name for name in _HINTS if asks_for_something(getattr(body, name))), NO_EFFECT)
        messages = await off_loop(call.num_body_bytes, lambda: _messages(body.input))
        questions = named(
            (f"questions[{number}]", each, _question) for number, each in enumerate(body.questions)
        )
        answers, usage = await self._runs.answer(call, body, messages, questions, request.receive)
        return json_response(
            call,
            {"model": model, "answers": list(map(_shown, answers)), "usage": _usage(usage)},
        )


class DecisionRuns:
    """Runs the questions of one server."""

    def __init__(self, api: Api) -> None:
        self._api = api
        tokenizer = api.client.tokenizer
        self._prompts = (
            None if tokenizer is None else DecisionPrompts(tokenizer, api.prompts.template)
        )

    def choose_model(self, call: Call, body: DecisionFields) -> str:
        """The name to answer under. Raises ApiError."""
        return self._api.choose_generator(call, body.model)

    async def answer(
        self,
        call: Call,
        body: DecisionFields,
        messages: Sequence[Message],
        questions: Mapping[str, Question],
        receive: Receive | None,
    ) -> tuple[list[Answer], Usage]:
        """Answer questions about a conversation, in order, by where in the body they stand. Raises
        ApiError or a QuireError."""
        most = min(MAX_QUESTIONS, self._api.config.max_prompts)
        if not 1 <= len(questions) <= most:
            raise bad_request(
                f"questions: {len(questions)} are given; a request has 1 to {most}",
                param="questions",
            )
        state, prompts = await self._encode(call, messages, list(questions.values()))
        is_long = len(state.token_ids) >= self._api.prompts.max_model_len
        jobs = [
            GenerationJob(
                each.token_ids,
                each.digest.params,
                None,
                body.cache_salt,
                body.priority,
                digest=each.digest,
                where=body.state_field if is_long else where,
            )
            for where, each in zip(questions, prompts, strict=True)
        ]
        outputs, usage = await self._api.generator.answer(call, jobs, receive)
        return [answer_to(*each) for each in zip(questions.values(), outputs, strict=True)], usage

    async def _encode(
        self, call: Call, messages: Sequence[Message], questions: Sequence[Question]
    ) -> tuple[StatePrompt, list[QuestionPrompt]]:
        encoder = self._api.prompts
        made = self._prompts or DecisionPrompts(
            encoder.tokenizer, None
        )  # which raises: there is none
        size = sum(map(num_chars, questions))
        encoder.check_chars(call.num_body_bytes)
        state = await encoder.work(call.num_body_bytes, lambda: made.state(messages))
        return state, await encoder.work(
            size + 64 * len(questions), lambda: [made.question(state, each) for each in questions]
        )


def named(asked: Iterable[tuple[str, _T, Callable[[_T, str], Question]]]) -> dict[str, Question]:
    """Make questions of what stands at places of a body. Raises ApiError naming the place."""
    made = dict[str, Question]()
    for where, each, make in asked:
        try:
            made[where] = make(each, where)
        except InvalidParameterError as error:
            raise bad_request(f"{where}: {error}", param=where, code="invalid_value") from None
    return made


def _messages(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    items = InputReader(lambda sealed: None).items(given)
    return for_template(messages_of(items))


def _question(asked: AskedQuestion, where: str) -> Question:
    text = _text(asked.instructions, f"{where}.instructions")
    if isinstance(asked, AskedChoice):
        options = [Option(each.value, each.description) for each in asked.choices]
        return Choice(text, options, asked.name)
    if isinstance(asked, AskedScore):
        levels = [Level(each.label, each.description) for each in asked.levels]
        return Score(text, levels, asked.name)
    return Predicate(text, asked.name)


def _text(instructions: str | list[InstructionPart], where: str) -> str:
    if isinstance(instructions, str):
        return instructions
    for number, part in enumerate(instructions):
        if part.type != "input_text":
            raise unavailable_feature(
                f"{where}[{number}]", f"parts of type {part.type[:64]!r} are not read; give text"
            )
    return "\n".join(part.text for part in instructions)


def _shown(answer: Answer) -> dict[str, Any]:
    """An answer as OpenAI shows it."""
    if isinstance(answer, PredicateAnswer):
        return {"type": "predicate", "name": answer.name, "probability": answer.probability}
    if isinstance(answer, ChoiceAnswer):
        chances = [
            {"value": option.value, "probability": chance}
            for option, chance in answer.probabilities
        ]
        named: dict[str, Any] = {"type": "choice", "name": answer.name, "choice": answer.choice}
        return {**named, "probabilities": chances, "confidence": answer.confidence}
    levels = [
        {"value": number, "label": level.label, "probability": chance}
        for number, (level, chance) in enumerate(answer.probabilities)
    ]
    named = {"type": "score", "name": answer.name, "score": answer.score}
    return {**named, "probabilities": levels, "confidence": answer.confidence}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.num_cached_tokens,
            "cache_write_tokens": usage.num_cache_write_tokens,
        },
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
    }
