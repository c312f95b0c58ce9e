"""From what a user asked to what the scheduler serves: parameters are judged against the model,
seeds are fixed.

Torch-free and without state but a counter, so that a request can be judged wherever it arrives, in
the engine's process or not. Owns the making of `RequestSpec`s: what would make an engine refuse a
request is found out here, once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from quire.common.seeds import mix64
from quire.core import checks
from quire.core.adapters import Adapter
from quire.core.content import Content, content_ids
from quire.core.images import contents_of
from quire.core.kvcache.prefix import Namespace
from quire.core.params import SamplingParams
from quire.core.plan import ThinkingBudget
from quire.core.request_spec import RequestSpec, fit
from quire.engine.front.digest import Digest, Digester
from quire.engine.front.prompts import ParsedPrompt
from quire.engine.front.transfers import read_transfer, transfer_params
from quire.engine.plan.engine_plan import EnginePlan
from quire.errors import InvalidParameterError
from quire.text.tokenizer import Tokenizer

MAX_PRIORITY = 2**63 - 1
"""On either side of zero: what a message holds."""
_TAIL = 64
"""Tokens at a prompt's end among which an opening think tag is searched for."""


class PreparedRequest(NamedTuple):
    """A request that can be served: what travels to the scheduler,
    and what its sender wants to see of it."""

    spec: RequestSpec
    digest: Digest
    prompt: str | None
    """The prompt's text, where it is known; only handed back."""
    transfer_params: dict[str, Any] | None = None
    """What its answer says of where its prompt's keys and values are, if it is to."""

    @property
    def params(self) -> SamplingParams:
        """Its parameters, as they were given."""
        return self.digest.params


class RequestBuilder:
    """Builds the requests of one model."""

    def __init__(
        self,
        plan: EnginePlan,
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan = plan
        self._tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self._clock = clock
        self._digester = Digester(plan, tokenizer)
        self._num_unseeded = 0

    def digest(self, params: SamplingParams) -> Digest:
        """Parameters, read once for all requests that `sampling` makes with them.
        Safe in any thread. Raises a RequestError."""
        return self._digester.digest(params, self.eos_token_ids)

    def sampling(
        self,
        request_id: str,
        prompt: ParsedPrompt,
        digest: Digest,
        *,
        processors: tuple[str, ...] = (),
        adapter: Adapter | None = None,
        priority: int = 0,
        **standing: Any,
    ) -> PreparedRequest:
        """Return a request for samples. Raises a RequestError.

        `processors` are the names of its logits processors, which only an executor can give;
        `adapter` is what it is answered with besides the model;
        `priority` and `standing` are fields of the spec that say how it is served beside others
        (`tenant`, `weight`).
        """
        params = digest.params
        if digest.spec.pool is None:
            self._check_generates()
        prompt = self._truncated(prompt, params.truncate_prompt_tokens)
        self._check_places(prompt)
        contents, start = _contents(prompt, adapter)
        transfer = read_transfer(params, self._plan)
        spec = replace(
            digest.spec,
            request_id=request_id,
            prompt_token_ids=tuple(prompt.token_ids),
            contents=contents,
            undivided=self._undivided(prompt),
            sampling=digest.sampling._replace(
                seed=self._seed(params),
                thinking=self._thinking(digest, prompt),
                processors=processors,
                adapter=adapter,
                adapter_start=start,
                images=prompt.images,
            ),
            max_tokens=params.max_tokens or self._plan.limits.max_model_len,
            namespace=_namespace(prompt, adapter),
            transfer=transfer,
            arrival_s=self._clock(),
            priority=checks.integer("priority", priority, -MAX_PRIORITY, MAX_PRIORITY),
            **standing,
        )
        spec = fit(spec, self._plan.limits)
        self._check_vectors(spec)
        given_back = transfer_params(transfer, self._plan, len(prompt.token_ids))
        return PreparedRequest(spec, digest, prompt.text, given_back)

    def _check_vectors(self, spec: RequestSpec) -> None:
        """Refuse a text whose tokens' vectors no message could carry."""
        if spec.pool is not None and self._plan.pooling is not None:
            num_outputs = self._plan.pooling.num_outputs(self._plan.spec.hidden_size)
            spec.pool.check_size(len(spec.prompt_token_ids), num_outputs)

    def _check_generates(self) -> None:
        if not self._plan.generates:
            raise InvalidParameterError(
                f"{self._plan.spec.architecture} makes vectors or classes of texts here, and no "
                "text; use embed(), classify() or score(), over HTTP /v1/embeddings, /classify or "
                "/score",
                param="model",
            )

    def _check_places(self, prompt: ParsedPrompt) -> None:
        """Refuse places for images that no image has: nothing would stand there."""
        vision = self._plan.spec.vision
        if vision is None:
            return
        count = prompt.token_ids.count(vision.placeholder)
        if count != sum(image.num_tokens for _, image in prompt.images):
            raise InvalidParameterError(
                f"the prompt has {count} places for images (token {vision.placeholder}) without "
                "images; leave them out, or give the images: multi_modal_data, over HTTP a chat",
                param="prompt",
            )

    def _undivided(self, prompt: ParsedPrompt) -> tuple[tuple[int, int], ...]:
        """Return the places of images that see one another both ways."""
        vision = self._plan.spec.vision
        if vision is None or not vision.sees_whole:
            return ()
        return tuple((image.first, image.end) for image in prompt.images)

    def _truncated(self, prompt: ParsedPrompt, keep: int | None) -> ParsedPrompt:
        if keep is None:
            return prompt
        if prompt.images:
            raise InvalidParameterError(
                "truncate_prompt_tokens: a prompt with images cannot be cut; shorten its text",
                param="truncate_prompt_tokens",
            )
        keep = self._plan.limits.max_model_len - 1 if keep < 0 else keep
        return prompt._replace(token_ids=prompt.token_ids[-keep:]) if keep else prompt

    def _seed(self, params: SamplingParams) -> int:
        if params.seed is not None:
            return params.seed
        self._num_unseeded += 1
        return mix64(self._plan.config.seed ^ mix64(self._num_unseeded))

    def _thinking(self, digest: Digest, prompt: ParsedPrompt) -> ThinkingBudget | None:
        """Return the budget for reasoning, where there is one, behind this prompt."""
        budget = digest.params.thinking_token_budget
        if digest.marks is None or budget is None:
            return None
        marks, spelling = digest.marks
        is_open = marks.is_open
        if is_open is None:
            from quire.text.reasoning import ReasoningFormat, is_thinking

            assert self._tokenizer is not None
            tail = self._tokenizer.decode(prompt.token_ids[-_TAIL:], skip_special_tokens=False)
            is_open = is_thinking(ReasoningFormat("", marks.begin, marks.end), tail)
        return ThinkingBudget(budget, is_open, spelling)


def _contents(prompt: ParsedPrompt, adapter: Adapter | None) -> tuple[tuple[Content, ...], int]:
    """Return what stands in place of tokens, and the position from which on the adapter is used.
    Raises InvalidParameterError where it is not invoked."""
    found = contents_of(prompt.images)
    if adapter is None or not adapter.invocation:
        return found, 0
    start = adapter.start_in(prompt.token_ids)
    if start is None:
        raise InvalidParameterError(
            f"the prompt lacks the tokens that activate its adapter, {list(adapter.invocation)}; "
            "end it with them, or take the model itself",
            param="prompt",
        )
    ids = content_ids(prompt.token_ids, found) or prompt.token_ids
    return (*found, adapter.content_at(start, ids[start])), start


def _namespace(prompt: ParsedPrompt, adapter: Adapter | None) -> Namespace:
    """What an activated adapter computes is told apart by the contents, so that what stands
    before its invocation is shared with the model."""
    given = prompt.cache_salt
    salt = () if given is None else ("salt", checks.text("cache_salt", given))
    if adapter is None or adapter.invocation:
        return salt
    return (*salt, "adapter", adapter.digest)
