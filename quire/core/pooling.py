"""What a pooling request asks for: vLLM's `PoolingParams`, and the task of the worker that it
becomes; and the task that weighs tokens, for decisions.

Such a request computes its prompt and generates nothing. Standard library only: both planes
import it.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, Final, Literal, Self, get_args

from quire.errors import InvalidParameterError

PoolingTask = Literal["embed", "classify", "score", "token_embed", "token_classify"]
TASKS: Final[tuple[PoolingTask, ...]] = get_args(PoolingTask)
OF_TOKENS: Final[frozenset[PoolingTask]] = frozenset({"token_embed", "token_classify"})
"""Tasks that make a vector for each token."""
MAX_DIMENSIONS: Final = 1 << 20
MAX_VECTOR_BYTES: Final = 48 << 20
"""Vectors of one text. They travel as one message between the engine's process and the server's,
which is limited to 64 MiB; 8,192 tokens with 1,024 elements each (BGE-M3's longest text) take 32.
"""


@dataclass(frozen=True, slots=True)
class Pool:
    """Make a vector of a prompt's hidden states, or one for each token. A `Task` of
    `quire.core.plan`.
    """

    is_whole: bool = False
    """Whether all tokens' states are needed. The task is then one of every chunk, else of the last.
    """
    is_per_token: bool = False
    """A vector for each token in place of one for the text."""
    dimensions: int | None = None
    """The first so many elements alone (Matryoshka representation learning, arXiv:2205.13147)."""
    num_skipped: int = 0
    """The first so many tokens are not pooled: an instruction's."""
    is_activated: bool = True
    """Whether vectors are normalised, and logits made probabilities, where the model says so."""

    def num_wanted(self, num_tokens: int) -> int:
        return num_tokens if self.is_whole else 1

    def num_numbers(self, num_tokens: int, num_outputs: int) -> int:
        """Numbers in the vectors of a text of `num_tokens`, by a model that makes `num_outputs` of
        each pooled state."""
        return (num_tokens if self.is_per_token else 1) * (self.dimensions or num_outputs)

    def check_size(self, num_tokens: int, num_outputs: int) -> None:
        """Raise InvalidParameterError, with the numbers, for vectors that take too much memory."""
        num_bytes = 4 * self.num_numbers(num_tokens, num_outputs)
        if num_bytes > MAX_VECTOR_BYTES:
            raise InvalidParameterError(
                f"a vector of {self.dimensions or num_outputs} numbers for each of {num_tokens} "
                f"tokens takes {num_bytes} bytes, and the vectors of one text may take "
                f"{MAX_VECTOR_BYTES}; give shorter texts, or set truncate_prompt_tokens",
                param="prompt",
            )


@dataclass(frozen=True, slots=True)
class WeighTokens:
    """Report the logits of some tokens behind a prompt, and generate none. A `Task` of
    `quire.core.plan`.
    """

    token_ids: tuple[int, ...]

    def num_wanted(self, num_tokens: int) -> int:
        return 1


@dataclass(slots=True, kw_only=True)
class PoolingParams:
    """How to pool a prompt. Names and defaults are vLLM's.

    Raises `InvalidParameterError` (with `param` set) for a value out of its range.
    """

    truncate_prompt_tokens: int | None = None
    """Keep so many tokens, -1 as many as the model takes; None refuses prompts that are longer."""
    dimensions: int | None = None
    """Of the vector, for models that were trained so that its first elements suffice."""
    use_activation: bool | None = None
    """Whether vectors are normalised, or logits made probabilities; None: as the model does."""
    task: PoolingTask | None = None
    """None: what the method that is called, or the endpoint, stands for."""
    skip_reading_prefix_cache: bool = False
    prompt_name: str | None = None
    """Which of the model's prompts to put before a text; None: its default one, if it has one."""

    def __post_init__(self) -> None:
        keep, dimensions = self.truncate_prompt_tokens, self.dimensions
        if keep is not None and (not _is_int(keep) or keep < -1 or keep == 0):
            raise _invalid("truncate_prompt_tokens", keep, "a number of tokens from 1 up, or -1")
        if dimensions is not None and (
            not _is_int(dimensions) or not 1 <= dimensions <= MAX_DIMENSIONS
        ):
            raise _invalid("dimensions", dimensions, f"a number from 1 to {MAX_DIMENSIONS}")
        if not isinstance(self.use_activation, bool | None):
            raise _invalid("use_activation", self.use_activation, "True, False or None")
        if not isinstance(self.prompt_name, str | None):
            raise _invalid("prompt_name", self.prompt_name, "a name, or None")
        if self.task is not None and self.task not in TASKS:
            raise _invalid("task", self.task, f"one of {', '.join(TASKS)}")

    def clone(self) -> Self:
        """A copy, checked again."""
        made = copy(self)
        made.__post_init__()
        return made


def check_task(params: object, task: PoolingTask) -> None:
    """Refuse a task that is none, and parameters, or a list of them, that name another one."""
    PoolingParams(task=task)
    for each in params if isinstance(params, list | tuple) else (params,):
        named = each.task if isinstance(each, PoolingParams) else None
        if named not in (None, task):
            raise InvalidParameterError(
                f"pooling_params have task={named!r}, and this call is for {task!r}; leave it out",
                param="pooling_params",
            )


def read_truncation(keep: int | None, tokenization_kwargs: Mapping[str, Any] | None) -> int | None:
    """Return `truncate_prompt_tokens`, given by itself or among `tokenization_kwargs`, which know
    nothing else."""
    kwargs = {} if tokenization_kwargs is None else tokenization_kwargs
    if not isinstance(kwargs, Mapping):
        raise _invalid("tokenization_kwargs", kwargs, "a dict")
    given = {name: value for name, value in kwargs.items() if value is not None}
    named = given.pop("truncate_prompt_tokens", None)
    if given:
        raise InvalidParameterError(
            f"tokenization_kwargs has {', '.join(map(repr, sorted(map(str, given))))}; only "
            "'truncate_prompt_tokens' is known",
            param="tokenization_kwargs",
        )
    keep = named if keep is None else keep
    return PoolingParams(truncate_prompt_tokens=keep).truncate_prompt_tokens


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _invalid(name: str, value: Any, wanted: str) -> InvalidParameterError:
    return InvalidParameterError(f"{name}={str(value)[:100]} must be {wanted}", param=name)
