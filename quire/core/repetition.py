"""Answers that go round in circles: what a request says of them, and the watch that sees one.

Owns the rule and its bounds; when the watch is asked, and what then ends, is the scheduler's
business. The names, the defaults and the rule are vLLM's (`RepetitionDetectionParams` in its
documentation of `vllm.sampling_params`; the order of the checks and the words "repetition" and
"repetition_detected" as in its `vllm/v1/core/sched/utils.py`): an answer ends once its last tokens
are a pattern of `min_pattern_size` to `max_pattern_size` tokens, `min_count` times in a row. The
prompt does not count.

How it is seen. A pattern of p tokens stands c times at an answer's end exactly where each of the
last p * (c - 1) tokens equals the one p places before it. So it is enough to know, for each p, how
many tokens in a row have done so. A token costs one search for its like among the
`max_pattern_size` tokens before it, and an entry for each that is found, however large `min_count`
is.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NoReturn

from quire.errors import InvalidParameterError

MAX_PATTERN_SIZE = 1024
"""A token whose like fills the whole window takes 0.1 ms; as a rule it is a few microseconds."""
MAX_COUNT = 1 << 20
PARAM = "repetition_detection"


@dataclass(frozen=True, slots=True)
class RepetitionDetectionParams:
    """When an answer that repeats itself is ended. Names and defaults are vLLM's.

    Raises `InvalidParameterError` with `param` "repetition_detection".
    """

    max_pattern_size: int = 0
    """Tokens of the longest pattern; 0 detects nothing."""
    min_pattern_size: int = 0
    """Tokens of the shortest pattern; 0 means 1."""
    min_count: int = 0
    """How often the pattern must stand there, the first time included; at least 2."""

    def __post_init__(self) -> None:
        low = 2 if _integer("max_pattern_size", self.max_pattern_size, 0, MAX_PATTERN_SIZE) else 0
        _integer("min_pattern_size", self.min_pattern_size, 0, self.max_pattern_size)
        _integer("min_count", self.min_count, low, MAX_COUNT)

    @classmethod
    def from_mapping(cls, values: object) -> RepetitionDetectionParams:
        """Make the parameters from a decoded JSON object, such as an HTTP body's field; null leaves
        a field out."""
        if not isinstance(values, Mapping):
            _refuse("it must be an object")
        known = {item.name for item in fields(cls)}
        for name in values:
            if name not in known:
                _refuse(
                    f"{str(name)[:64]!r} is not available; known are {', '.join(sorted(known))}"
                )
        return cls(**{name: value for name, value in values.items() if value is not None})

    @property
    def rule(self) -> tuple[int, int, int] | None:
        """(shortest pattern, longest pattern, count), all above 0;
        None where nothing is to be detected."""
        return (
            (self.min_pattern_size or 1, self.max_pattern_size, self.min_count)
            if self.max_pattern_size
            else None
        )


class RepetitionWatch:
    """Looks at one sequence's output as it grows.
    What it knows is a function of that output alone; a new one catches up."""

    def __init__(self, rule: tuple[int, int, int], num_prompt_tokens: int) -> None:
        self._min_size, self._max_size, self._min_count = rule
        self._num_prompt_tokens = self._num_seen = num_prompt_tokens
        self._runs: dict[int, int] = {}
        """Pattern size to the number of tokens in a row, up to the last,
        that equal the one so many places before them."""

    def is_looping(self, token_ids: list[int], min_tokens: int = 0) -> bool:
        """Return whether the output at the end of `token_ids`, prompt included, ends with a pattern
        often enough, and has `min_tokens` tokens.
        """
        if len(token_ids) < self._num_prompt_tokens + min_tokens:
            return False
        while self._num_seen < len(token_ids):
            self._take(token_ids, self._num_seen)
            self._num_seen += 1
        repeats = self._min_count - 1
        return any(run >= size * repeats for size, run in self._runs.items())

    def _take(self, token_ids: list[int], place: int) -> None:
        token_id, before, runs = token_ids[place], self._runs, {}
        found, end = (
            max(self._num_prompt_tokens, place - self._max_size) - 1,
            place - self._min_size + 1,
        )
        try:
            while True:
                found = token_ids.index(token_id, found + 1, max(found + 1, end))
                runs[place - found] = before.get(place - found, 0) + 1
        except ValueError:
            self._runs = runs


def _integer(name: str, value: object, low: int, high: int) -> int:
    is_integer = hasattr(value, "__index__") and not isinstance(value, bool)
    if not is_integer or not low <= operator.index(value) <= high:  # type: ignore[arg-type]
        _refuse(f"{name} must be an integer from {low} to {high}")
    return operator.index(value)  # type: ignore[arg-type]


def _refuse(problem: str) -> NoReturn:
    raise InvalidParameterError(f"{PARAM}: {problem}", param=PARAM)
