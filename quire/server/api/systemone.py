"""POST /v1/systemone: the questions of /v1/decisions in the form of System One's clients.

Questions and answers go by names of the client's choice; a predicate is called `noul`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.decisions.answers import Answer, ChoiceAnswer, PredicateAnswer
from quire.engine.decisions.questions import Choice, Level, Option, Predicate, Question, Score
from quire.server.api.decisions import DecisionFields, DecisionRuns, named
from quire.server.http.body import read_json
from quire.server.http.call import call_of
from quire.server.http.off_loop import off_loop
from quire.server.http.responses import json_response

Content = str | dict[str, Any] | list[Any]
"""A text, or JSON, which is shown to the model as JSON."""


class TruthCriteria(Struct):
    """What it means that a statement holds, and that it does not."""

    true: Content | None = None
    false: Content | None = None


class SystemOneQuestion(Struct, kw_only=True, tag_field="type"):
    """What all questions have."""

    instructions: Content


class SystemOneNoul(SystemOneQuestion, kw_only=True, tag="noul"):
    """How likely it is that a statement holds."""

    criteria: TruthCriteria | None = None


class SystemOneChoice(SystemOneQuestion, kw_only=True, tag="choice"):
    """Which option is the right one: their names, with descriptions or without."""

    criteria: dict[str, Content | None] | list[str]


class SystemOneScore(SystemOneQuestion, kw_only=True, tag="score"):
    """Where the state stands on a scale, the lowest level first."""

    criteria: list[Content]


class SystemOneRequest(DecisionFields, kw_only=True):
    """The body."""

    state_field: ClassVar[str] = "state"
    state: Content
    questions: dict[
        Annotated[str, Meta(max_length=256)], SystemOneNoul | SystemOneChoice | SystemOneScore
    ]


class SystemOne:
    """The endpoint."""

    def __init__(self, runs: DecisionRuns, *, is_strict: bool) -> None:
        self._runs = runs
        self._is_strict = is_strict

    async def post(self, request: Request) -> Response:
        """Answer named questions about one state by the probabilities of their options."""
        call = call_of(request)
        body = await read_json(request, SystemOneRequest, is_strict=self._is_strict)
        model = self._runs.choose_model(call, body)
        state = await off_loop(call.num_body_bytes, lambda: _text(body.state))
        questions = named(
            (f"questions.{name}", each, _question) for name, each in body.questions.items()
        )
        answers, usage = await self._runs.answer(
            call, body, [{"role": "user", "content": state}], questions, request.receive
        )
        shown = {str(answer.name): _shown(answer) for answer in answers}
        counts = {
            "input_tokens": usage.num_prompt_tokens,
            "output_tokens": usage.num_output_tokens,
        }
        return json_response(call, {"model": model, "answers": shown, "usage": counts})


def _question(asked: SystemOneNoul | SystemOneChoice | SystemOneScore, where: str) -> Question:
    name, text = where.removeprefix("questions."), _text(asked.instructions)
    if isinstance(asked, SystemOneChoice):
        given = asked.criteria
        named = given if isinstance(given, dict) else dict.fromkeys(given)
        if len(named) < len(given):
            return Choice(text, list(given), name)  # refused: names that come twice
        return Choice(text, [Option(key, _optional(each)) for key, each in named.items()], name)
    if isinstance(asked, SystemOneScore):
        return Score(text, [Level(_text(each)) for each in asked.criteria], name)
    criteria = asked.criteria or TruthCriteria()
    return Predicate(text, name, _optional(criteria.true), _optional(criteria.false))


def _shown(answer: Answer) -> dict[str, Any]:
    if isinstance(answer, PredicateAnswer):
        return {"type": "noul", "noul": answer.probability}
    if isinstance(answer, ChoiceAnswer):
        chances = {str(option.value): chance for option, chance in answer.probabilities}
        named: dict[str, Any] = {"type": "choice", "choice": answer.choice}
        return {**named, "probabilities": chances, "confidence": answer.confidence}
    levels = list(enumerate(answer.probabilities))
    return {
        "type": "score",
        "score": answer.score,
        "legend": {str(number): level.label for number, (level, _) in levels},
        "probabilities": {str(number): chance for number, (_, chance) in levels},
        "confidence": answer.confidence,
    }


def _text(content: Content) -> str:
    return content if isinstance(content, str) else msgspec.json.encode(content).decode()


def _optional(content: Content | None) -> str | None:
    return None if content is None else _text(content)
