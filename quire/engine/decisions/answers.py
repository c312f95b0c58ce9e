"""From the logits of a question's options to its answer.

The probabilities are those of the model's next token, given that it is one of the options: a
softmax over their logits alone, in float64, one after the other. They are as exact as the logits
are and depend on nothing but state and question; nothing calibrates them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from quire.engine.decisions.questions import Choice, Level, Option, Predicate, Question
from quire.engine.front.outputs import RequestOutput
from quire.errors import RequestError


@dataclass(frozen=True, slots=True)
class PredicateAnswer:
    """How likely it is that the statement holds."""

    name: str | None
    probability: float


@dataclass(frozen=True, slots=True)
class ChoiceAnswer:
    """The likeliest option, the first of several."""

    name: str | None
    choice: str | bool
    probabilities: tuple[tuple[Option, float], ...]
    """Of all options, in their order."""
    confidence: float
    """How far the likeliest option is above all being alike: 0 to 1."""


@dataclass(frozen=True, slots=True)
class ScoreAnswer:
    """The mean of the levels' numbers, from 0 up, weighted by their probabilities."""

    name: str | None
    score: float
    probabilities: tuple[tuple[Level, float], ...]
    """Of all levels, in their order."""
    confidence: float
    """As that of a choice."""


Answer = PredicateAnswer | ChoiceAnswer | ScoreAnswer


def answer_to(question: Question, output: RequestOutput) -> Answer:
    """Read the answer out of what a request came to. RequestError where it failed."""
    if output.error is not None:
        raise RequestError(f"request {output.request_id} failed: {output.error}")
    data = output.pooled or b""
    chances = softmax(struct.unpack(f"<{len(data) // 4}f", data))
    if isinstance(question, Predicate):
        return PredicateAnswer(question.name, chances[0])
    confidence = confidence_of(chances)
    if isinstance(question, Choice):
        options = question.options
        best = options[max(range(len(chances)), key=chances.__getitem__)]
        pairs = tuple(zip(options, chances, strict=True))
        return ChoiceAnswer(question.name, best.value, pairs, confidence)
    mean = math.fsum(number * chance for number, chance in enumerate(chances))
    return ScoreAnswer(
        question.name, mean, tuple(zip(question.steps, chances, strict=True)), confidence
    )


def softmax(logits: Sequence[float]) -> list[float]:
    """Probabilities of options by their logits; they add up to 1."""
    highest = max(logits)
    weights = [math.exp(each - highest) for each in logits]
    total = math.fsum(weights)
    return [each / total for each in weights]


def confidence_of(chances: Sequence[float]) -> float:
    """Return 1 where one option has all of the probability, 0 where all have the same:
    (n * max - 1) / (n - 1)."""
    count = len(chances)
    return min(1.0, max(0.0, (count * max(chances) - 1.0) / (count - 1)))
