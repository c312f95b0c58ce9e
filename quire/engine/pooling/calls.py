"""`LLM.embed`, `encode`, `classify`, `score` and `reward`: the calls of pooling models, with vLLM's
names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self, TypedDict, TypeVar, Unpack

from quire.core import checks
from quire.core.params import MAX_TOKENS
from quire.core.pooling import PoolingParams, PoolingTask, check_task, read_truncation
from quire.engine.front.adapters import LoRARequests
from quire.engine.front.digest import Digest
from quire.engine.front.outputs import RequestOutput
from quire.engine.front.prompts import Prompt, as_prompts
from quire.engine.pooling.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    cosine,
    output_of,
    vectors_of,
)
from quire.errors import InvalidParameterError, RequestError

if TYPE_CHECKING:
    from quire.engine.loop.engine import Engine
    from quire.engine.pooling.requests import PoolingRequests

_T = TypeVar("_T")
_Made = TypeVar("_Made")
Progress = bool | Callable[..., Any]
Params = PoolingParams | Sequence[PoolingParams] | None


class PoolingOptions(TypedDict, total=False):
    """What every call may be given by name."""

    use_tqdm: Progress
    """Whether to show a progress bar, or what makes one, called as `tqdm` is."""
    truncate_prompt_tokens: int | None
    """As `PoolingParams.truncate_prompt_tokens`, for all prompts."""
    lora_request: LoRARequests
    """An adapter for all prompts, or a list with one, or None, for each."""
    tokenization_kwargs: Mapping[str, Any] | None
    """`truncate_prompt_tokens` by another name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """`PoolingOptions` that were given, and the others' defaults."""

    use_tqdm: Progress = True
    truncate_prompt_tokens: int | None = None
    lora_request: LoRARequests = None
    tokenization_kwargs: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, given: PoolingOptions) -> Self:
        """Raises TypeError, as Python does, for what is none of them."""
        for name in given:
            if name not in cls.__slots__:
                known = ", ".join(cls.__slots__)
                raise TypeError(f"got an unexpected keyword argument {name!r}; known are {known}")
        return cls(**given)

    @property
    def keep(self) -> int | None:
        """Tokens to keep of each prompt, where a call says so."""
        return read_truncation(self.truncate_prompt_tokens, self.tokenization_kwargs)


class PoolingCalls:
    """Mixed into `LLM`, which runs the requests."""

    @property
    def engine(self) -> Engine:
        """The engine itself, for one thread at a time."""
        raise NotImplementedError

    def _run_digests(
        self,
        prompts: Sequence[Prompt],
        digests: Sequence[Digest],
        use_tqdm: Progress,
        lora_request: LoRARequests,
        places: Sequence[str] = (),
    ) -> list[RequestOutput]:
        """Compute requests; their outputs in order. Errors call prompts by their places."""
        raise NotImplementedError

    @cached_property
    def _pooling(self) -> PoolingRequests:
        from quire.engine.pooling.requests import PoolingRequests

        return PoolingRequests(self.engine.plan, self.engine.tokenizer)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: Params = None,
        **options: Unpack[PoolingOptions],
    ) -> list[EmbeddingRequestOutput]:
        """Vectors of texts, in order: `outputs.embedding`.

        A text is put behind the model's default prompt, where it has one, unless
        `PoolingParams.prompt_name` names another. Raises a QuireError for a text that is too long,
        and for models that make no vectors.
        """
        check_task(pooling_params, "embed")
        outputs = self._pooled(prompts, pooling_params, "embed", _Options.of(options))
        return [
            output_of(EmbeddingRequestOutput, each, EmbeddingOutput(vectors_of(each)[0]))
            for each in outputs
        ]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: Params = None,
        **options: Unpack[PoolingOptions],
    ) -> list[ClassificationRequestOutput]:
        """Probabilities of classes, in order: `outputs.probs`."""
        check_task(pooling_params, "classify")
        outputs = self._pooled(prompts, pooling_params, "classify", _Options.of(options))
        return [
            output_of(ClassificationRequestOutput, each, ClassificationOutput(vectors_of(each)[0]))
            for each in outputs
        ]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: Params = None,
        *,
        pooling_task: PoolingTask | None = None,
        **options: Unpack[PoolingOptions],
    ) -> list[PoolingRequestOutput]:
        """What the model makes of texts, as `pooling_task` says: `outputs.data`, one vector or one
        for each token. By default what the model was made for."""
        task = pooling_task or _task_of(pooling_params) or self._pooling.default_task
        check_task(pooling_params, task)
        params = _one_each(pooling_params, len(as_prompts(prompts)))
        outputs = self._pooled(prompts, pooling_params, task, _Options.of(options))
        return [
            output_of(PoolingRequestOutput, output, self._pooling.result(output, task, each))
            for output, each in zip(outputs, params, strict=True)
        ]

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: Params = None,
        **options: Unpack[PoolingOptions],
    ) -> list[PoolingRequestOutput]:
        """What a reward model says of each token: `outputs.data`."""
        return self.encode(prompts, pooling_params, pooling_task="token_classify", **options)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        pooling_params: PoolingParams | None = None,
        instruction: str | None = None,
        max_tokens_per_query: int | None = None,
        max_tokens_per_doc: int | None = None,
        **options: Unpack[PoolingOptions],
    ) -> list[ScoringRequestOutput]:
        """How well texts go together: one with each of several, or pair by pair.

        A model that classifies (a cross-encoder) reads both texts at once, in its own template; of
        one that makes a vector for each token (ColBERT), the score is MaxSim of queries and
        documents; of any other, the cosine of their vectors. `instruction` is refused where the
        template has none. `max_tokens_per_query` and `max_tokens_per_doc` say how many tokens are
        read of each text of `data_1` and of `data_2`; 0 and None are all. A list of adapters has
        one for each pair.
        """
        first, second = _pairs(data_1, data_2)
        check_task(pooling_params, "score")
        params, given = pooling_params or PoolingParams(), _Options.of(options)
        self._pooling.check_instruction(instruction)
        first = self._beginnings(first, "data_1", max_tokens_per_query, "max_tokens_per_query")
        second = self._beginnings(second, "data_2", max_tokens_per_doc, "max_tokens_per_doc")
        if self._pooling.spec.late is not None:
            return self._late_scores(first, second, params, given)
        if self._pooling.spec.task == "embed":
            return self._cosines(first, second, params, given)
        self._pooling.check_scores()
        keep = params.truncate_prompt_tokens if given.keep is None else given.keep
        texts, digest = self._pooling.texts, self._pooling.digest(params, "score")
        pairs = list(zip(first, second, strict=True))
        places = [f"data_2[{number}]" for number in range(len(pairs))]
        prompts: list[Prompt] = _each_named(
            pairs, places, lambda pair: {"prompt_token_ids": texts.join(*pair, keep, instruction)}
        )
        outputs = self._run_digests(
            prompts, [digest] * len(prompts), given.use_tqdm, given.lora_request, places
        )
        return [
            output_of(ScoringRequestOutput, each, ScoringOutput(float(vectors_of(each)[0][0])))
            for each in outputs
        ]

    def _beginnings(
        self, texts: list[str], name: str, num_tokens: int | None, param: str
    ) -> list[str]:
        """Return so much of each text as has so many tokens; errors call the texts by `name`."""
        if num_tokens is None or not checks.integer(param, num_tokens, 0, MAX_TOKENS):
            return texts
        placed, most = _placed(**{name: texts}), num_tokens
        kept = _each_named(
            [*placed], [*placed.values()], lambda text: self._pooling.texts.beginning(text, most)
        )
        beginnings = dict(zip(placed, kept, strict=True))
        return [beginnings[text] for text in texts]

    def _cosines(
        self, first: list[str], second: list[str], params: PoolingParams, options: _Options
    ) -> list[ScoringRequestOutput]:
        if isinstance(options.lora_request, list | tuple):
            raise InvalidParameterError(
                "score() of vectors takes one adapter for all texts, or none", param="lora_request"
            )
        placed = _placed(data_1=first, data_2=second)
        distinct, places = list(placed), list(placed.values())
        outputs = self._pooled(distinct, params, "embed", options, places)
        made = dict(zip(distinct, outputs, strict=True))
        vectors = {text: vectors_of(each)[0] for text, each in made.items()}
        return [
            output_of(ScoringRequestOutput, made[b], ScoringOutput(cosine(vectors[a], vectors[b])))
            for a, b in zip(first, second, strict=True)
        ]

    def _late_scores(
        self, first: list[str], second: list[str], params: PoolingParams, options: _Options
    ) -> list[ScoringRequestOutput]:
        """MaxSim of queries and documents, each of which is computed once."""
        placed = _placed(data_1=first), _placed(data_2=second)
        texts = [*placed[0]], [*placed[1]]
        roles = [replace(params, prompt_name=role) for role in ("query", "document")]
        each_params = [role for role, group in zip(roles, texts, strict=True) for _ in group]
        places = [*placed[0].values(), *placed[1].values()]
        outputs = self._pooled([*texts[0], *texts[1]], each_params, "token_embed", options, places)
        vectors = [
            self._pooling.vectors(output, "token_embed", each.prompt_name)
            for output, each in zip(outputs, each_params, strict=True)
        ]
        num_queries, score = len(texts[0]), self._pooling.late_texts.score
        queries = dict(zip(texts[0], vectors[:num_queries], strict=True))
        documents = dict(zip(texts[1], vectors[num_queries:], strict=True))
        made = dict(zip(texts[1], outputs[num_queries:], strict=True))
        return [
            output_of(ScoringRequestOutput, made[b], ScoringOutput(score(queries[a], documents[b])))
            for a, b in zip(first, second, strict=True)
        ]

    def _pooled(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params,
        task: PoolingTask,
        options: _Options,
        places: Sequence[str] = (),
    ) -> list[RequestOutput]:
        listed = as_prompts(prompts)
        places = places or [f"prompts[{number}]" for number in range(len(listed))]
        each_params = _one_each(params, len(listed))
        prepare = self._pooling.preparer(task, options.keep)
        given = list(zip(listed, each_params, strict=True))
        prepared = _each_named(given, places, lambda each: prepare(*each))
        return self._run_digests(
            [prompt for prompt, _ in prepared],
            [digest for _, digest in prepared],
            options.use_tqdm,
            options.lora_request,
            places,
        )


def _placed(**given: Sequence[str]) -> dict[str, str]:
    """Return each text once, and where it stands first."""
    placed = dict[str, str]()
    for name, texts in given.items():
        for number, text in enumerate(texts):
            placed.setdefault(text, f"{name}[{number}]")
    return placed


def _each_named(
    items: Sequence[_T], places: Sequence[str], make: Callable[[_T], _Made]
) -> list[_Made]:
    """Make something of each; an error says of which one, where there are several."""
    made = list[_Made]()
    try:
        for each in items:
            made.append(make(each))
    except RequestError as error:
        error.place = places[len(made)] if len(items) > 1 else None
        raise
    return made


def _task_of(params: Params) -> PoolingTask | None:
    return params.task if isinstance(params, PoolingParams) else None


def _one_each(params: Params, count: int) -> list[PoolingParams]:
    if params is None or isinstance(params, PoolingParams):
        return [PoolingParams() if params is None else params.clone()] * count
    listed = list(params) if isinstance(params, list | tuple) else []
    if len(listed) != count or not all(isinstance(each, PoolingParams) for each in listed):
        raise InvalidParameterError(
            f"pooling_params must be PoolingParams, or a list of {count} of them",
            param="pooling_params",
        )
    copies = {id(each): each.clone() for each in listed}
    return [copies[id(each)] for each in listed]


def _pairs(data_1: str | Sequence[str], data_2: str | Sequence[str]) -> tuple[list[str], list[str]]:
    for name, given in (("data_1", data_1), ("data_2", data_2)):
        if not isinstance(given, Iterable) or isinstance(given, Mapping | bytes):
            raise InvalidParameterError(
                f"{name} must be a text or a list of texts, not {type(given).__name__}", param=name
            )
    first = [data_1] if isinstance(data_1, str) else list(data_1)
    second = [data_2] if isinstance(data_2, str) else list(data_2)
    if not all(isinstance(each, str) for each in (*first, *second)):
        raise InvalidParameterError("score() takes texts, or lists of texts", param="data_1")
    if len(first) == 1:
        first = first * len(second)
    if not first or len(first) != len(second):
        raise InvalidParameterError(
            f"score() takes one text and several, or as many: not {len(first)} and {len(second)}",
            param="data_2",
        )
    return first, second
