"""From what a user asked to what the scheduler serves: parameters are judged against the model, seeds are fixed.

Torch-free and without state but a counter, so that a request can be judged wherever it arrives, in the engine's process or
not. A `Request` made here holds all that its answer depends on: made again from the same wire form, it gives the same tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from quire.common.seeds import mix64
from quire.core.beam import BeamDecoder, BeamSettings
from quire.core.decoding import SamplingDecoder
from quire.core.kvcache.prefix import Namespace
from quire.core.params import BeamSearchParams, SamplingParams, ThinkingMarks
from quire.core.plan import ThinkingBudget
from quire.core.request import Request
from quire.engine.planning import EnginePlan
from quire.engine.prompts import ParsedPrompt
from quire.engine.spelling import spell_marks
from quire.errors import InvalidParameterError
from quire.text.reasoning import ReasoningFormat, is_thinking, reasoning_of_template
from quire.text.tokenizer import Tokenizer

_TAIL = 64
"""Tokens at a prompt's end among which a mark that begins thoughts is looked for."""


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
        self._num_unseeded = 0

    def sampling(self, request_id: str, prompt: ParsedPrompt, params: SamplingParams) -> Request:
        """A request for samples, without its logits processors, which only an executor can name. Raises a RequestError."""
        self._check(params)
        prompt = self._truncated(prompt, params.truncate_prompt_tokens)
        sampling = params.to_row_sampling(
            seed=self._seed(params), eos_token_ids=self.eos_token_ids, bad_words=self._bad_words(params)
        )
        sampling = sampling._replace(thinking=self._thinking(params, prompt))
        if params.num_sequences > params.n and sampling.num_logprobs is None:
            sampling = sampling._replace(num_logprobs=0)  # best_of ranks by log-probability
        eos = frozenset() if params.ignore_eos else self.eos_token_ids
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt.token_ids,
            sampling=sampling,
            decoder=SamplingDecoder(params.num_sequences),
            max_tokens=params.max_tokens or self._plan.limits.max_model_len,
            stop_token_ids=eos | frozenset(params.stop_token_ids or ()),
            repetition=None if params.repetition_detection is None else params.repetition_detection.rule,
            namespace=_namespace(prompt),
            reads_cache=not params.skip_reading_prefix_cache,
        )
        request.metrics.arrival_s = self._clock()
        return request

    def _truncated(self, prompt: ParsedPrompt, keep: int | None) -> ParsedPrompt:
        if keep is None:
            return prompt
        keep = self._plan.limits.max_model_len - 1 if keep < 0 else keep
        return prompt._replace(token_ids=prompt.token_ids[-keep:]) if keep else prompt

    def beam(self, request_id: str, prompt: ParsedPrompt, params: BeamSearchParams) -> Request:
        """A beam search. Raises a RequestError."""
        params.check_vocabulary(self._plan.spec.vocab_size)
        max_tokens = min(params.max_tokens, self._plan.limits.max_model_len - len(prompt.token_ids))
        eos = frozenset() if params.ignore_eos else self.eos_token_ids
        settings = BeamSettings(
            beam_width=params.beam_width,
            max_tokens=max_tokens,
            eos_token_ids=eos | frozenset(params.stop_token_ids),
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
        )
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt.token_ids,
            sampling=params.to_row_sampling(),
            decoder=BeamDecoder(settings),
            max_tokens=max_tokens,
            namespace=_namespace(prompt),
        )
        request.metrics.arrival_s = self._clock()
        return request

    def _check(self, params: SamplingParams) -> None:
        vocab_size, limit = self._plan.spec.vocab_size, self._plan.config.max_logprobs
        params.check_vocabulary(vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and 0 <= limit < (vocab_size if value < 0 else value):
                raise InvalidParameterError(
                    f"{name}={value} exceeds this engine's max_logprobs={limit}; lower it, or raise max_logprobs", param=name
                )
        if params.detokenize and params.stop and self._tokenizer is None:
            raise InvalidParameterError("stop strings need a tokenizer, and this engine has none", param="stop")
        if params.structured_outputs is not None and (self._tokenizer is None or not self.eos_token_ids):
            raise InvalidParameterError(
                "structured_outputs need a tokenizer and an end-of-sequence token, and this engine has not both",
                param="structured_outputs",
            )

    def _seed(self, params: SamplingParams) -> int:
        if params.seed is not None:
            return params.seed
        self._num_unseeded += 1
        return mix64(self._plan.config.seed ^ mix64(self._num_unseeded))

    def _thinking(self, params: SamplingParams, prompt: ParsedPrompt) -> ThinkingBudget | None:
        """The budget for thoughts, with the marks as this model's tokens spell them."""
        if params.thinking_token_budget is None:
            return None
        tokenizer, marks = self._tokenizer, params.thinking_marks
        if marks is None and tokenizer is not None:
            form = reasoning_of_template(tokenizer.chat_template or "")
            marks = None if form is None else ThinkingMarks(form.begin, form.end)
        if tokenizer is None or marks is None:
            raise InvalidParameterError(
                f"thinking_token_budget={params.thinking_token_budget}: what this model thinks is not told apart from its "
                "answers (its chat template has no marks such as <think>), so it cannot be counted; leave the budget out",
                param="thinking_token_budget",
            )
        is_open = marks.is_open
        if is_open is None:
            tail = tokenizer.decode(prompt.token_ids[-_TAIL:], skip_special_tokens=False)
            is_open = is_thinking(ReasoningFormat("", marks.begin, marks.end), tail)
        spelling = spell_marks(tokenizer, (marks.begin, marks.end), self._plan.spec.vocab_size)
        return ThinkingBudget(params.thinking_token_budget, is_open, spelling)

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Each bad word as it is tokenized at the start of a text and after a space."""
        if not params.bad_words:
            return []
        if self._tokenizer is None:
            raise InvalidParameterError("bad_words need a tokenizer, and this engine has none", param="bad_words")
        spellings = [spelling for word in params.bad_words for spelling in (word, f" {word.lstrip()}")]
        encoded = [self._tokenizer.encode(spelling, add_special_tokens=False) for spelling in spellings]
        return [token_ids for token_ids in encoded if token_ids]


def _namespace(prompt: ParsedPrompt) -> Namespace:
    return () if prompt.cache_salt is None else ("salt", prompt.cache_salt)
