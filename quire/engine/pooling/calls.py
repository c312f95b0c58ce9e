"""`LLM.embed`, `encode`, `classify`, `score` and `reward`: the calls of pooling models, with vLLM's
names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from quire.core.pooling import PoolingParams, PoolingTask
from quire.engine.front.digest import Digest
from quire.engine.front.outputs import RequestOutput
from quire.engine.front.prompts import Prompt, as_prompts
from quire.engine.pooling.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from quire.engine.pooling.requests import PoolingRequests
from quire.errors import InvalidParameterError, RequestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quire.engine.loop.engine import Engine

Progress = bool | Callable[..., Any]
Params = PoolingParams | Sequence[PoolingParams] | None


class PoolingCalls:
    """Mixed into `LLM`, which runs the requests."""

    @property
    def engine(self) -> Engine:
        """The engine itself, for one thread at a time."""
        raise NotImplementedError

    def _run_digests(
        self, prompts: Sequence[Prompt], digests: Sequence[Digest], use_tqdm: Progress
    ) -> list[RequestOutput]:
        """Compute requests; their outputs in order."""
        raise NotImplementedError

    @cached_property
    def _pooling(self) -> PoolingRequests:
        return PoolingRequests(self.engine.plan, self.engine.tokenizer)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: Params = None,
        *,
        use_tqdm: Progress = True,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Vectors of texts, in order: `outputs.embedding`.

        A text is put behind the model's default prompt, where it has one, unless
        `PoolingParams.prompt_name` names another. Raises a QuireError for a text that is too long,
        and for models that make no vectors.
        """
        keep = _truncation(truncate_prompt_tokens, tokenization_kwargs)
        outputs = self._pooled(prompts, pooling_params, "embed", use_tqdm, keep)
        return [
            _made(EmbeddingRequestOutput, each, EmbeddingOutput(self._vectors(each)[0]))
            for each in outputs
        ]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: Params = None,
        *,
        use_tqdm: Progress = True,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Probabilities of classes, in order: `outputs.probs`."""
        keep = _truncation(None, tokenization_kwargs)
        outputs = self._pooled(prompts, pooling_params, "classify", use_tqdm, keep)
        return [
            _made(ClassificationRequestOutput, each, ClassificationOutput(self._vectors(each)[0]))
            for each in outputs
        ]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: Params = None,
        *,
        use_tqdm: Progress = True,
        truncate_prompt_tokens: int | None = None,
        pooling_task: PoolingTask | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput]:
        """What the model makes of texts, as `pooling_task` says: `outputs.data`, one vector or one
        for each token. By default one, of the kind that the model makes."""
        task = pooling_task or _task_of(pooling_params) or self._pooling.spec.task
        keep = _truncation(truncate_prompt_tokens, tokenization_kwargs)
        outputs = self._pooled(prompts, pooling_params, task, use_tqdm, keep)
        found = []
        for each in outputs:
            vectors = self._vectors(each)
            data = vectors if task.startswith("token_") else vectors[0]
            found.append(_made(PoolingRequestOutput, each, PoolingOutput(data)))
        return found

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: Params = None,
        *,
        use_tqdm: Progress = True,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput]:
        """What a reward model says of each token: `outputs.data`."""
        return self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            truncate_prompt_tokens=truncate_prompt_tokens,
            pooling_task="token_classify",
            tokenization_kwargs=tokenization_kwargs,
        )

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: Progress = True,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        instruction: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well texts go together: one with each of several, or pair by pair.

        A model that classifies (a cross-encoder) reads both texts at once, in its own template; of
        any other, the score is the cosine of their vectors. `instruction` is for templates that
        have one.
        """
        first, second = _pairs(data_1, data_2)
        params = pooling_params or PoolingParams()
        keep = _truncation(truncate_prompt_tokens, tokenization_kwargs)
        keep = params.truncate_prompt_tokens if keep is None else keep
        if self._pooling.spec.task == "embed":
            return self._cosines(first, second, params, use_tqdm, keep)
        if self._pooling.num_outputs != 1:
            raise InvalidParameterError(
                "score() needs a model with one class, and this one has "
                f"{self._pooling.num_outputs}"
            )
        texts = self._pooling.texts
        ids = [texts.join(*pair, keep, instruction) for pair in zip(first, second, strict=True)]
        digest = self._pooling.digest(params, "score")
        outputs = self._run_digests(
            [{"prompt_token_ids": each} for each in ids], [digest] * len(ids), use_tqdm
        )
        return [
            _made(ScoringRequestOutput, each, ScoringOutput(float(self._vectors(each)[0][0])))
            for each in outputs
        ]

    def _cosines(
        self,
        first: list[str],
        second: list[str],
        params: PoolingParams,
        use_tqdm: Progress,
        keep: int | None,
    ) -> list[ScoringRequestOutput]:
        distinct = list(dict.fromkeys([*first, *second]))
        made = self._pooled(distinct, params, "embed", use_tqdm, keep)
        vectors = {text: self._vectors(each)[0] for text, each in zip(distinct, made, strict=True)}
        by_text = dict(zip(distinct, made, strict=True))
        return [
            _made(ScoringRequestOutput, by_text[b], ScoringOutput(cosine(vectors[a], vectors[b])))
            for a, b in zip(first, second, strict=True)
        ]

    def _pooled(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params,
        task: PoolingTask,
        use_tqdm: Progress,
        keep: int | None,
    ) -> list[RequestOutput]:
        listed = as_prompts(prompts)
        each_params = _one_each(params, len(listed))
        made, digests = [], []
        known: dict[tuple[int, int], Digest] = {}
        for prompt, given in zip(listed, each_params, strict=True):
            cut = given.truncate_prompt_tokens if keep is None else keep
            encoded, num_skipped = self._encoded(prompt, given, cut, task)
            key = (id(given), num_skipped)
            if key not in known:
                known[key] = self._pooling.digest(given, task, num_skipped)
            made.append(encoded)
            digests.append(known[key])
        return self._run_digests(made, digests, use_tqdm)

    def _encoded(
        self, prompt: Prompt, params: PoolingParams, keep: int | None, task: PoolingTask
    ) -> tuple[Prompt, int]:
        """A prompt as token ids, and how many of them are not pooled."""
        text: object = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
        if ids is None and isinstance(text, str):
            before = self._pooling.prompt_of(params.prompt_name) if "embed" in task else ""
            texts = self._pooling.texts
            token_ids = texts.encode(text, keep, before)
            return (
                {"prompt_token_ids": token_ids, "prompt": text},
                texts.num_prompt_tokens(before),
            )
        if keep is None:
            return prompt, 0
        listed: Any = prompt if ids is None else ids
        return {"prompt_token_ids": self._pooling.cut(list(listed), keep)}, 0

    def _vectors(self, output: RequestOutput) -> NDArray[np.float32]:
        """What came of a request, float32 [vectors, elements]. RequestError where it failed."""
        if output.error is not None:
            raise RequestError(f"request {output.request_id} failed: {output.error}")
        return vectors_of(output)


def vectors_of(output: RequestOutput) -> NDArray[np.float32]:
    """The vectors of an output that has not failed, float32 [vectors, elements]: one, or one a
    token.
    """
    import numpy as np

    assert output.pooled is not None
    flat = np.frombuffer(output.pooled, "<f4")
    return flat.reshape(output.num_vectors, -1)


def cosine(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """The cosine of the angle between two vectors; 0 where one of them is zero."""
    import numpy as np

    x, y = a.astype(np.float64), b.astype(np.float64)
    lengths = float(np.sqrt(np.sum(x * x)) * np.sqrt(np.sum(y * y)))
    return float(np.sum(x * y)) / lengths if lengths else 0.0


def _made(kind: type[Any], output: RequestOutput, outputs: object) -> Any:
    return kind(
        request_id=output.request_id,
        outputs=outputs,
        prompt_token_ids=output.prompt_token_ids,
        num_cached_tokens=output.num_cached_tokens,
        metrics=output.metrics,
    )


def _truncation(keep: int | None, tokenization_kwargs: Mapping[str, Any] | None) -> int | None:
    given = {
        name: value for name, value in (tokenization_kwargs or {}).items() if value is not None
    }
    named = given.pop("truncate_prompt_tokens", None)
    if given:
        raise InvalidParameterError(
            f"tokenization_kwargs has {', '.join(map(repr, sorted(given)))}; only "
            "'truncate_prompt_tokens' is known",
            param="tokenization_kwargs",
        )
    keep = named if keep is None else keep
    return PoolingParams(truncate_prompt_tokens=keep).truncate_prompt_tokens


def _task_of(params: Params) -> PoolingTask | None:
    return params.task if isinstance(params, PoolingParams) else None


def _one_each(params: Params, count: int) -> list[PoolingParams]:
    if params is None or isinstance(params, PoolingParams):
        return [PoolingParams() if params is None else params.clone()] * count
    listed = list(params)
    if len(listed) != count or not all(isinstance(each, PoolingParams) for each in listed):
        raise InvalidParameterError(
            f"pooling_params must be PoolingParams, or a list of {count} of them",
            param="pooling_params",
        )
    return [each.clone() for each in listed]


def _pairs(data_1: str | Sequence[str], data_2: str | Sequence[str]) -> tuple[list[str], list[str]]:
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
