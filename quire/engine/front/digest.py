"""A request's parameters, read once: judged against the model and brought into the plan's terms,
for all prompts they are for.

What costs time and memory in parameters is what they list: tokens that may or may not come, words,
strings that end the answer, a grammar. A digest holds all of that in the form in which it is used,
and every request made with it, and every sequence of it, refers to these very objects. A request of
many prompts makes one digest. Making one is safe in any thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from quire.core.params import MAX_BAD_WORD_TOKENS, SamplingParams, ThinkTags
from quire.core.plan import RowSampling, ThinkTagTokens
from quire.core.request_spec import BeamSettings, RequestSpec
from quire.engine.front.think_tags import tokens_of_tags
from quire.engine.plan.engine_plan import EnginePlan
from quire.errors import InvalidParameterError
from quire.text.stop import StopStrings
from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class Digest:
    """What one object of parameters comes to."""

    params: SamplingParams
    """Not to be changed any more."""
    spec: RequestSpec
    """For any prompt: without a seed, and without a budget for reasoning,
    which depends on how the prompt ends."""
    stop_strings: StopStrings = field(default_factory=StopStrings)
    marks: tuple[ThinkTags, ThinkTagTokens] | None = None
    """The think tags where reasoning has a budget, and their tokens."""

    def of(self, params: SamplingParams) -> Digest:
        """Return the same for parameters that differ from those that were read in
        `max_tokens` and `output_kind` alone."""
        assert params.lists_the_same(self.params), "the digest of other parameters"
        return self if params is self.params else replace(self, params=params)

    @property
    def sampling(self) -> RowSampling:
        """The sampler's part of `spec`."""
        return self.spec.sampling

    @property
    def num_ids(self) -> int:
        """Token ids that it lists, those of grammars and strings not included."""
        row = self.sampling
        num_words = len(row.bad_words) + sum(map(len, row.bad_words))
        return (
            len(row.allowed_token_ids or ())
            + len(row.logit_bias)
            + len(self.spec.stop_token_ids)
            + num_words
        )


class Digester:
    """Makes digests for one model. Has no state."""

    def __init__(self, plan: EnginePlan, tokenizer: Tokenizer | None) -> None:
        self._plan = plan
        self._tokenizer = tokenizer

    def digest(self, params: SamplingParams, eos_token_ids: frozenset[int]) -> Digest:
        """Read parameters, which must not be changed afterwards; `eos_token_ids` are the model's.

        Raises a RequestError for what this model cannot do.
        """
        self._check(params, eos_token_ids)
        eos = frozenset() if params.ignore_eos else eos_token_ids
        sampling = params.to_row_sampling(
            seed=0, eos_token_ids=eos_token_ids, bad_words=self._bad_words(params)
        )
        if params.num_sequences > params.n and sampling.num_logprobs is None:
            sampling = sampling._replace(num_logprobs=0)  # best_of ranks by log-probability
        rules = params.beam_search
        spec = RequestSpec(
            sampling=sampling,
            num_sequences=params.num_sequences if rules is None else 1,
            beam=None if rules is None else BeamSettings(params.n, *rules),
            stop_token_ids=eos.union(params.stop_token_ids or ()),
            repetition=None
            if params.repetition_detection is None
            else params.repetition_detection.rule,
            reads_cache=not params.skip_reading_prefix_cache,
        )
        return Digest(
            params=params,
            spec=spec,
            stop_strings=StopStrings(
                tuple(params.stop or ()), include_stop_str=params.include_stop_str_in_output
            ),
            marks=self._marks(params),
        )

    def _check(self, params: SamplingParams, eos_token_ids: frozenset[int]) -> None:
        vocab_size, limit = self._plan.spec.vocab_size, self._plan.config.max_logprobs
        params.check_vocabulary(vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and 0 <= limit < (vocab_size if value < 0 else value):
                raise InvalidParameterError(
                    f"{name}={value} exceeds this engine's max_logprobs={limit}; lower it, "
                    "or raise max_logprobs",
                    param=name,
                )
        if params.detokenize and params.stop and self._tokenizer is None:
            raise InvalidParameterError(
                "stop strings need a tokenizer, and this engine has none", param="stop"
            )
        if params.structured_outputs is not None and (self._tokenizer is None or not eos_token_ids):
            raise InvalidParameterError(
                "structured_outputs need a tokenizer and an end-of-sequence token, and this "
                "engine has not both",
                param="structured_outputs",
            )

    def _bad_words(self, params: SamplingParams) -> list[tuple[int, ...]]:
        """Return each bad word as it is tokenized at the start of a text and after a space,
        once where both are the same."""
        if not params.bad_words:
            return []
        if self._tokenizer is None:
            raise InvalidParameterError(
                "bad_words need a tokenizer, and this engine has none", param="bad_words"
            )
        spellings: dict[tuple[int, ...], None] = {}
        num_tokens = 0
        for word in dict.fromkeys(params.bad_words):
            for text in (word, f" {word.lstrip()}"):
                token_ids = tuple(self._tokenizer.encode(text, add_special_tokens=False))
                num_tokens += len(token_ids)
                if num_tokens > MAX_BAD_WORD_TOKENS:
                    raise InvalidParameterError(
                        f"bad_words: their spellings have more than {MAX_BAD_WORD_TOKENS} "
                        "tokens together; give fewer words, "
                        "or shorter ones",
                        param="bad_words",
                    )
                # the model cannot write the others anyway
                if token_ids and max(token_ids) < self._plan.spec.vocab_size:
                    spellings[token_ids] = None
        return list(spellings)

    def _marks(self, params: SamplingParams) -> tuple[ThinkTags, ThinkTagTokens] | None:
        """Return the think tags of parameters with a reasoning budget."""
        if params.thinking_token_budget is None:
            return None
        tokenizer, marks = self._tokenizer, params.thinking_marks
        if marks is None and tokenizer is not None:
            from quire.text.reasoning import reasoning_of_template

            form = reasoning_of_template(tokenizer.chat_template or "")
            is_known = form is not None and form.is_countable
            marks = ThinkTags(form.begin, form.end) if form is not None and is_known else None
        if tokenizer is None or marks is None:
            raise InvalidParameterError(
                f"thinking_token_budget={params.thinking_token_budget}: what this model "
                "thinks is not told apart from its "
                "answers (its chat template has no marks such as <think>), so it cannot be "
                "counted; leave the budget out",
                param="thinking_token_budget",
            )
        return marks, tokens_of_tags(
            tokenizer, (marks.begin, marks.end), self._plan.spec.vocab_size
        )
