"""POST /v1/decisions and /v1/systemone: the answers are those of `LLM.decide`, in two forms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import openai
import pytest
from servers import MODEL, RunningServer

from quire import LLM, Choice, Level, Option, Predicate, Score
from quire.engine.decisions.answers import ChoiceAnswer, PredicateAnswer, ScoreAnswer
from quire.engine.decisions.questions import Question

STATE = "Once upon a time there was a fox who found a red ball in the snow. He was very happy."
ASKED: list[dict[str, Any]] = [
    {"type": "predicate", "name": "happy", "instructions": "The fox is happy."},
    {
        "type": "choice", "name": "animal", "instructions": "Which animal is it?",
        "choices": [{"value": "fox"}, {"value": True}, {"value": "owl", "description": "flies"}],
    },
    {
        "type": "score", "instructions": [{"type": "input_text", "text": "How cold is it?"}],
        "levels": [{"label": "warm"}, {"label": "cold", "description": "there is snow"}],
    },
]  # fmt: skip
QUESTIONS: list[Question] = [
    Predicate("The fox is happy.", "happy"),
    Choice("Which animal is it?", ["fox", True, Option("owl", "flies")], "animal"),
    Score("How cold is it?", ["warm", Level("cold", "there is snow")]),
]
Three = tuple[PredicateAnswer, ChoiceAnswer, ScoreAnswer]


@pytest.fixture(scope="module")
def wanted() -> Iterator[Three]:
    with closing(LLM("quire-storyteller", kv_cache_memory="8MiB")) as llm:
        predicate, choice, score = llm.decide(STATE, QUESTIONS)
        assert isinstance(predicate, PredicateAnswer) and isinstance(choice, ChoiceAnswer)
        assert isinstance(score, ScoreAnswer)
        yield predicate, choice, score


def test_openais_client_gets_the_answers_of_the_library(
    client: openai.OpenAI, wanted: Three
) -> None:
    decision = client.decisions.create(model=MODEL, input=STATE, questions=ASKED)  # type: ignore[arg-type]
    predicate, choice, score = decision.answers
    assert predicate.type == "predicate" and predicate.name == "happy"
    assert predicate.probability == wanted[0].probability
    assert choice.type == "choice" and choice.choice == wanted[1].choice
    assert [(each.value, each.probability) for each in choice.probabilities] == [
        (option.value, chance) for option, chance in wanted[1].probabilities
    ]
    assert choice.confidence == wanted[1].confidence
    assert score.type == "score" and score.name is None and score.score == wanted[2].score
    assert [(each.value, each.label) for each in score.probabilities] == [(0, "warm"), (1, "cold")]
    usage = decision.usage
    assert usage.output_tokens == 0 and usage.total_tokens == usage.input_tokens > 100
    again = client.decisions.create(model=MODEL, input=STATE, questions=ASKED)  # type: ignore[arg-type]
    assert again.answers == decision.answers
    assert again.usage.input_tokens_details.cached_tokens > 0.9 * usage.input_tokens


def test_an_input_can_be_a_conversation(client: openai.OpenAI) -> None:
    items = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": STATE}]},
        {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "a fox"},
    ]
    first = client.decisions.create(model=MODEL, input=items, questions=ASKED[:1])  # type: ignore[arg-type]
    second = client.decisions.create(model=MODEL, input=items[:2], questions=ASKED[:1])  # type: ignore[arg-type]
    assert first.answers != second.answers


@pytest.mark.slow
def test_langchains_users_get_them_too(server: RunningServer, wanted: Three) -> None:
    decisions = pytest.importorskip("langchain_openai.decisions")
    with pytest.warns(Warning, match="is in beta"):
        model = decisions.OpenAIDecisions(model=MODEL, base_url=server.v1, api_key="none")
    question = decisions.Predicate(instructions="The fox is happy.")
    found = model.invoke({"input": STATE, "questions": {"happy": question}})
    assert found.predicates["happy"].probability == wanted[0].probability


def test_system_ones_clients_get_the_same_by_name(http: httpx.Client, wanted: Three) -> None:
    body = {
        "model": MODEL, "state": STATE,
        "questions": {
            "happy": {"type": "noul", "instructions": "The fox is happy."},
            "animal": {"type": "choice", "instructions": "Which animal is it?",
                       "criteria": {"fox": None, "true": None, "owl": "flies"}},
            "cold": {"type": "score", "instructions": "How cold is it?",
                     "criteria": ["warm", "cold (there is snow)"]},
        },
    }  # fmt: skip
    answer = http.post("/v1/systemone", json=body).raise_for_status().json()
    happy, animal, cold = (answer["answers"][name] for name in ("happy", "animal", "cold"))
    assert happy == {"type": "noul", "noul": wanted[0].probability}
    chosen = wanted[1].choice
    assert animal["choice"] == ("true" if chosen is True else chosen)  # names are text here
    assert list(animal["probabilities"].values()) == [p for _, p in wanted[1].probabilities]
    assert cold["score"] == wanted[2].score and cold["legend"]["0"] == "warm"
    assert list(cold["probabilities"]) == ["0", "1"]
    assert answer["usage"]["output_tokens"] == 0 and answer["model"] == MODEL


def test_a_state_can_be_json(http: httpx.Client) -> None:
    questions = {"a": {"type": "noul", "instructions": {"say": "is it so?"},
                       "criteria": {"true": "it is", "false": ["not", "it"]}}}  # fmt: skip
    body = {"state": {"fox": "happy"}, "questions": questions}
    answer = http.post("/v1/systemone", json=body).raise_for_status().json()
    body["state"] = '{"fox":"happy"}'
    assert http.post("/v1/systemone", json=body).json()["answers"] == answer["answers"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"questions": []}, "questions: 0 are given; a request has 1 to"),
        ({"questions": ASKED * 134}, "questions: 402 are given; a request has 1 to"),
        ({"questions": [{**ASKED[1], "choices": [{"value": "a"}]}]}, "a question has 2 to 255"),
        ({"questions": [{**ASKED[0], "instructions": [{"type": "input_image"}]}]},
         r"questions[0].instructions[0]: parts of type 'input_image' are not read"),
        ({"questions": [{"type": "poem", "instructions": "a"}]},
         "questions[0].type: it is none of the values that are allowed: 'predicate', 'choice'"),
        ({"questions": [*ASKED, {**ASKED[0], "instructions": " "}]}, "questions[3]: instructions"),
        ({"questions": [ASKED[0], {**ASKED[0], "instructions": "fox " * 999}]},
         "questions[1]: the text has"),
        ({"input": []}, "input: it is empty"),
        ({"input": "fox " * 5000}, "input: the text has 5"),
        ({"model": "other"}, "the model 'other' is not served here"),
    ],
)  # fmt: skip
def test_what_cannot_be_answered_is_refused(
    change: dict[str, Any], complaint: str, http: httpx.Client
) -> None:
    answer = http.post("/v1/decisions", json={"input": STATE, "questions": ASKED, **change})
    assert answer.status_code in (400, 404)
    assert complaint in answer.json()["error"]["message"]


def test_a_question_is_named_by_its_name(http: httpx.Client) -> None:
    asked = {"a": {"type": "noul", "instructions": "a"}}
    for instructions, complaint in ((" ", "instructions must be"), ("fox " * 999, "the text has")):
        questions = {**asked, "b": {"type": "noul", "instructions": instructions}}
        answer = http.post("/v1/systemone", json={"state": STATE, "questions": questions})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "questions.b")
        assert error["message"].startswith(f"questions.b: {complaint}")


def test_images_are_refused_and_not_left_out(http: httpx.Client) -> None:
    parts = [
        {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
        {"type": "input_text", "text": STATE},
    ]
    body = {"input": [{"role": "user", "content": parts}], "questions": ASKED}
    response = http.post("/v1/decisions", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert "images" in error["message"] and error["param"] == "input"


def test_decisions_are_counted_and_limited_like_generation(http: httpx.Client) -> None:
    def counted() -> float:
        lines = http.get("/metrics").text.splitlines()
        names = [line for line in lines if "prompt_tokens_total{" in line]
        return float(names[0].rpartition(" ")[2])

    before = counted()
    body = {"input": f"{STATE} Twice.", "questions": ASKED}
    usage = http.post("/v1/decisions", json=body).raise_for_status().json()["usage"]
    assert counted() - before == usage["input_tokens"]
