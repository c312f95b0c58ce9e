"""Requests for vectors, classes and scores: what is asked, judged against what the model does.

The one place where `PoolingParams` become the plan's terms, for programs and for a server alike. A
pooling request is a request that generates nothing, so everything else about it is as for any
other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from quire.core.params import RequestOutputKind, SamplingParams
from quire.core.plan import RowSampling
from quire.core.pooling import OF_TOKENS, Pool, PoolingParams, PoolingTask
from quire.core.request_spec import RequestSpec
from quire.engine.front.digest import Digest
from quire.engine.front.outputs import RequestOutput
from quire.engine.front.prompts import Prompt
from quire.engine.plan.engine_plan import EnginePlan
from quire.engine.pooling.late_interaction import LateTexts
from quire.engine.pooling.outputs import PoolingOutput, vectors_of
from quire.engine.pooling.texts import PoolingTexts
from quire.errors import InvalidParameterError, NotAvailableError
from quire.models.pooling import OF_WHOLE, PoolingSpec
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MAKES = {"embed": "vectors of texts", "classify": "classes of texts"}


class PoolingRequests:
    """What one model makes of texts."""

    def __init__(self, plan: EnginePlan, tokenizer: Tokenizer | None) -> None:
        self._plan = plan
        self._tokenizer = tokenizer

    @property
    def spec(self) -> PoolingSpec:
        """How the model pools. NotAvailableError where it does not."""
        if self._plan.pooling is None:
            raise NotAvailableError(
                f"{self._plan.spec.architecture} was loaded to generate text; load it with "
                "runner='pooling' (or convert='embed' beside its answers) for vectors"
            )
        return self._plan.pooling

    @property
    def num_outputs(self) -> int:
        """Elements of a vector, or classes."""
        return self.spec.num_outputs(self._plan.spec.hidden_size)

    @property
    def default_task(self) -> PoolingTask:
        """What the model was made for."""
        spec = self.spec
        if not spec.is_per_token:
            return spec.task
        return "token_embed" if spec.task == "embed" else "token_classify"

    @property
    def advice(self) -> str:
        """Which calls and paths to use in place of those that generate text."""
        if self.spec.is_per_token:
            return "use encode(), over HTTP /pooling"
        if self.spec.task == "embed":
            return "use embed() or score(), over HTTP /v1/embeddings, /score or /rerank"
        return "use classify() or score(), over HTTP /classify, /score or /rerank"

    def check_scores(self) -> None:
        """Raises InvalidParameterError for a model that reads pairs and has not just one class."""
        if self.num_outputs != 1:
            raise InvalidParameterError(
                f"a score needs a model with one class, and this one has {self.num_outputs}; use "
                "classify(), over HTTP /classify",
                param="model",
            )

    def check_instruction(self, instruction: str | None) -> None:
        """Raises InvalidParameterError for one that this model's template has no place for."""
        if instruction and not self.spec.is_difference:
            raise InvalidParameterError(
                "instruction: this model reads none beside the texts; leave it out, or put it into "
                "the texts",
                param="instruction",
            )

    @cached_property
    def texts(self) -> PoolingTexts:
        """How texts are encoded. InvalidParameterError where there is no tokenizer."""
        if self._tokenizer is None:
            raise InvalidParameterError(
                "this engine has no tokenizer, so it takes token ids alone", param="prompt"
            )
        spec = self._plan.spec
        vocab_size = spec.embedding.shape[0]
        return PoolingTexts(
            self._tokenizer,
            self.spec,
            self._plan.limits.max_model_len,
            spec.vocab_size // vocab_size,
            vocab_size,
        )

    def digest(self, params: PoolingParams, task: PoolingTask, num_skipped: int = 0) -> Digest:
        """What parameters come to for a task, for any number of prompts whose first `num_skipped`
        tokens are not pooled. Raises a QuireError for what this model does not do."""
        pool = self.pool(params, task, num_skipped)
        sampling = SamplingParams(
            max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        reads_cache = not pool.is_whole and not params.skip_reading_prefix_cache
        spec = RequestSpec(sampling=RowSampling(), pool=pool, reads_cache=reads_cache)
        return Digest(params=sampling, spec=spec)

    def preparer(
        self, task: PoolingTask, keep: int | None = None
    ) -> Callable[[Prompt, PoolingParams], tuple[Prompt, Digest]]:
        """What encodes prompts for a task, and reads each object of parameters once; `keep` goes
        before the `truncate_prompt_tokens` of those."""
        known: dict[tuple[int, int], Digest] = {}

        def prepare(prompt: Prompt, params: PoolingParams) -> tuple[Prompt, Digest]:
            cut = params.truncate_prompt_tokens if keep is None else keep
            encoded, num_skipped = self._encoded(prompt, params, cut, task)
            key = (id(params), num_skipped)
            if key not in known:
                known[key] = self.digest(params, task, num_skipped)
            return encoded, self.of_role(known[key], encoded, params.prompt_name)

        return prepare

    def of_role(self, digest: Digest, prompt: Prompt, role: str | None) -> Digest:
        """Return a digest for one prompt, which fills up a query where the role says so."""
        if self.spec.late is None or role != "query" or self._tokenizer is None:
            return digest
        ids: Any = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
        num_unseen = self.late_texts.num_unseen(ids or ())
        if not num_unseen:
            return digest
        sampling = digest.spec.sampling._replace(num_unseen=num_unseen)
        return replace(digest, spec=replace(digest.spec, sampling=sampling))

    def _encoded(
        self, prompt: Prompt, params: PoolingParams, keep: int | None, task: PoolingTask
    ) -> tuple[Prompt, int]:
        """A prompt as token ids, and how many of them are not pooled."""
        text: object = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
        # what else there is is kept, or refused by name where prompts are read
        rest: Any = prompt if isinstance(prompt, Mapping) else {}
        if ids is None and isinstance(text, str):
            token_ids, skipped = self.encode(text, params.prompt_name, keep, task)
            made: Any = {**rest, "prompt_token_ids": token_ids, "prompt": text}
            return made, skipped
        if keep is None:
            return prompt, 0
        listed: Any = prompt if ids is None else ids
        made = {**rest, "prompt_token_ids": self.cut(list(listed), keep)}
        return made, 0

    def encode(
        self, text: str, prompt_name: str | None, keep: int | None, task: PoolingTask
    ) -> tuple[list[int], int]:
        """A text's token ids behind its prompt, and how many of them are not pooled."""
        if "embed" not in task:
            return self.texts.encode(text, keep), 0
        before = self.prompt_of(prompt_name)
        if self.spec.late is not None:
            is_query = prompt_name == "query"
            return self.late_texts.encode(text, before, keep, is_query=is_query), 0
        return self.texts.encode(text, keep, before), self.texts.num_prompt_tokens(before)

    @cached_property
    def late_texts(self) -> LateTexts:
        """Queries and documents of a model that makes a vector for each token."""
        assert self.spec.late is not None
        return LateTexts(self.texts, self.spec.late)

    def vectors(
        self, output: RequestOutput, task: PoolingTask, prompt_name: str | None = None
    ) -> NDArray[np.float32]:
        """What came of a request, float32 [vectors, elements]: of late interaction, those that
        count. RequestError where it failed."""
        vectors = vectors_of(output)
        if self.spec.late is None or task != "token_embed" or self._tokenizer is None:
            return vectors
        is_query = prompt_name == "query"
        return vectors[self.late_texts.counts(output.prompt_token_ids, is_query=is_query)]

    def result(
        self, output: RequestOutput, task: PoolingTask, params: PoolingParams
    ) -> PoolingOutput:
        """What `encode` gives: a vector, or one for each token that counts."""
        vectors = self.vectors(output, task, params.prompt_name)
        return PoolingOutput(vectors if task in OF_TOKENS else vectors[0])

    def pool(self, params: PoolingParams, task: PoolingTask, num_skipped: int = 0) -> Pool:
        """The task of the worker."""
        spec, wanted = self.spec, "classify" if "classify" in task else "embed"
        if task != "score" and spec.task != wanted:
            raise NotAvailableError(
                f"{task!r} asks for {_MAKES[wanted]}, and this model makes {_MAKES[spec.task]}"
            )
        if spec.is_per_token and task not in OF_TOKENS:
            raise NotAvailableError(
                f"{task!r} asks for one result of a text, and this model makes one of each token; "
                "use encode(), over HTTP /pooling"
            )
        if params.dimensions is not None:
            self._check_dimensions(params.dimensions)
        is_per_token = task in OF_TOKENS
        is_whole = is_per_token or spec.kind in OF_WHOLE or num_skipped > 0
        return Pool(
            is_whole=is_whole,
            is_per_token=is_per_token,
            dimensions=params.dimensions,
            num_skipped=num_skipped,
            is_activated=params.use_activation is not False,
        )

    def prompt_of(self, name: str | None) -> str:
        """What is put before texts: the prompt of that name, or the model's default; or nothing."""
        spec = self.spec
        default = spec.default_prompt if spec.late is None else "document"
        name = default if name is None else name
        if name is None or (spec.late is not None and name not in spec.prompts):
            return ""
        if name not in spec.prompts:
            known = ", ".join(spec.prompts) or "none"
            raise InvalidParameterError(
                f"prompt_name={name[:100]!r} is not one of this model's: {known}",
                param="prompt_name",
            )
        return spec.prompts[name]

    def cut(self, token_ids: Sequence[int], keep: int | None) -> list[int]:
        """A prompt of token ids, as `truncate_prompt_tokens` says."""
        if keep is None:
            return list(token_ids)
        most = self._plan.limits.max_model_len
        if keep > most:
            raise InvalidParameterError(
                f"truncate_prompt_tokens={keep} is beyond the {most} tokens that the model takes",
                param="truncate_prompt_tokens",
            )
        return list(token_ids[: most if keep < 0 else keep])

    def _check_dimensions(self, dimensions: int) -> None:
        spec, most = self.spec, self.num_outputs
        if spec.task != "embed" or not spec.matryoshka:
            raise InvalidParameterError(
                f"dimensions={dimensions}: this model was not trained so that a vector's first "
                "elements are one (no is_matryoshka in its config); leave it out",
                param="dimensions",
            )
        lengths = spec.matryoshka if isinstance(spec.matryoshka, tuple) else ()
        if dimensions > most or (lengths and dimensions not in lengths):
            allowed = ", ".join(map(str, lengths)) or f"1 to {most}"
            raise InvalidParameterError(
                f"dimensions={dimensions} is not one of this model's: {allowed}", param="dimensions"
            )
