"""Questions whose answers are among options that are known beforehand: predicates, choices and
scores.

Owns what a question may be and how it is put to a model. Which tokens stand for the options depends
on the model's vocabulary (`quire.engine.decisions.prompts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.errors import InvalidParameterError

MAX_OPTIONS = 255
MAX_LEVELS = 10
_TRUTHS = (("Yes", "No"), ("yes", "no"))


@dataclass(frozen=True, slots=True)
class Option:
    """One of the values that a choice is made among."""

    value: str | bool
    """A text and a boolean that read alike are different values."""
    description: str | None = None
    """When it is the right one."""

    def __post_init__(self) -> None:
        _check_kind("the value of an option", self.value, (str, bool), "text or a boolean")
        _check_optional("the description of an option", self.description)


@dataclass(frozen=True, slots=True)
class Level:
    """One level of a score."""

    label: str
    description: str | None = None
    """What tells it from its neighbours."""

    def __post_init__(self) -> None:
        _check_kind("the label of a level", self.label, (str,), "text")
        _check_optional("the description of a level", self.description)


@dataclass(frozen=True, slots=True)
class Predicate:
    """Whether a statement holds, or what the answer to a yes/no question is."""

    instructions: str
    name: str | None = None
    if_true: str | None = None
    """What it means that it holds, and that it does not."""
    if_false: str | None = None

    def __post_init__(self) -> None:
        _check_text("instructions", self.instructions)
        for name in ("name", "if_true", "if_false"):
            _check_optional(name, getattr(self, name))

    @property
    def lines(self) -> tuple[str, ...]:
        """What is said of each option, in their order."""
        return self.if_true or "it is so", self.if_false or "it is not so"

    def labels(self, letters: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """What the model may be asked to answer with, the best first; `letters` are free to be
        used."""
        return *_TRUTHS, tuple(letters)


@dataclass(frozen=True, slots=True)
class Choice:
    """Which of 2 to 255 values is the right one; texts and booleans stand for options without a
    description."""

    instructions: str
    choices: Sequence[Option | str | bool]
    name: str | None = None

    def __post_init__(self) -> None:
        _check_text("instructions", self.instructions)
        _check_optional("name", self.name)
        _check_list("choices", self.choices, "texts, booleans or Options")
        values = [(type(each.value), each.value) for each in self.options]
        _check_count("choices", len(values), MAX_OPTIONS)
        if len(set(values)) < len(values):
            raise _wrong("choices: two of them have the same value; each must be unique")

    @property
    def options(self) -> tuple[Option, ...]:
        """All of them as options."""
        return tuple(each if isinstance(each, Option) else Option(each) for each in self.choices)

    @property
    def lines(self) -> tuple[str, ...]:
        """What is said of each option, in their order."""
        return tuple(_described(_shown(each.value), each.description) for each in self.options)

    def labels(self, letters: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """As of a predicate."""
        return (tuple(letters),)


@dataclass(frozen=True, slots=True)
class Score:
    """Which of 2 to 10 levels, the lowest first; texts stand for levels without a description."""

    instructions: str
    levels: Sequence[Level | str]
    name: str | None = None

    def __post_init__(self) -> None:
        _check_text("instructions", self.instructions)
        _check_optional("name", self.name)
        _check_list("levels", self.levels, "texts or Levels")
        _check_count("levels", len(self.steps), MAX_LEVELS)

    @property
    def steps(self) -> tuple[Level, ...]:
        """All of them as levels."""
        return tuple(each if isinstance(each, Level) else Level(each) for each in self.levels)

    @property
    def lines(self) -> tuple[str, ...]:
        """What is said of each option, in their order."""
        return tuple(_described(each.label, each.description) for each in self.steps)

    def labels(self, letters: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """As of a predicate."""
        return tuple(map(str, range(len(self.levels)))), tuple(letters)


Question = Predicate | Choice | Score


def text_of(question: Question, labels: Sequence[str]) -> str:
    """Put a question to a model that has read what it is about."""
    listed = [f"{label}: {line}" for label, line in zip(labels, question.lines, strict=True)]
    return "\n".join(
        [
            "Judge what stands above.",
            question.instructions,
            *listed,
            f"Answer with {', '.join(labels[:-1])} or {labels[-1]}, and nothing else.",
        ]
    )


def num_chars(question: Question) -> int:
    """The characters of a question, about."""
    return len(question.instructions) + sum(map(len, question.lines))


def _described(text: str, description: str | None) -> str:
    return text if description is None else f"{text} ({description})"


def _shown(value: str | bool) -> str:
    return value if isinstance(value, str) else str(value).lower()


def _check_text(name: str, text: object) -> None:
    if not isinstance(text, str) or not text.strip():
        raise _wrong(f"{name} must be text that asks something")


def _check_kind(name: str, value: object, kinds: tuple[type, ...], wanted: str) -> None:
    if not isinstance(value, kinds):
        raise _wrong(f"{name} must be {wanted}, not {type(value).__name__}")


def _check_optional(name: str, value: object) -> None:
    _check_kind(name, value, (str, type(None)), "text")


def _check_list(name: str, value: object, wanted: str) -> None:
    """A text is a sequence, too, and what can be read but once is none."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise _wrong(f"{name} must be a list of {wanted}, not {type(value).__name__}")


def _check_count(name: str, count: int, most: int) -> None:
    if not 2 <= count <= most:
        raise _wrong(f"{name}: {count} are given; a question has 2 to {most}")


def _wrong(message: str) -> InvalidParameterError:
    return InvalidParameterError(message, param="questions")
