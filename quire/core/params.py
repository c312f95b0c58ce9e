"""What a request asks of the sampler: the public parameters, checked once, and their translation
into plan records.

Owns the names, defaults and ranges that users meet, and nothing else: how a parameter acts on
logits is the business of `quire.sampling`, when a sequence stops the scheduler's, what a token id
or a stop string means the tokenizer's.

A parameter object is an ordinary mutable record, checked when it is made. The engine works on a
`clone()`, which checks again, so a field that was assigned afterwards cannot slip through.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, Literal, NamedTuple, Self

from quire.core import checks
from quire.core.checks import MAX_TOKEN_ID
from quire.core.plan import RowSampling
from quire.core.repetition import RepetitionDetectionParams
from quire.core.structure import StructuredOutputsParams
from quire.errors import InvalidParameterError

MAX_SEQUENCES = 128
"""Largest `n` and `best_of`."""
MAX_BEAM_WIDTH = 128
MAX_TOKENS = 2**31 - 1
"""Largest `max_tokens`; the context length is the real limit."""
MAX_TEMPERATURE = 1e4
MIN_TEMPERATURE = 1e-5
"""Temperatures below this are greedy: the quotient `logit / temperature` would
leave the range of float32."""
MAX_REPETITION_PENALTY = 1e4
MAX_PENALTY = 2.0
MAX_LOGIT_BIAS = 100.0
MAX_TOP_K = 2**31 - 1
MAX_LOGPROBS = 1 << 20
MAX_LOGPROB_TOKEN_IDS = 128
MAX_STOP_STRINGS = 256
MAX_STOP_STRING_LEN = 4096
MAX_STOP_TOKEN_IDS = 4096
MAX_LOGIT_BIASES = 1 << 16
MAX_ALLOWED_TOKEN_IDS = 1 << 20
MAX_BAD_WORDS = 4096
MAX_BAD_WORD_LEN = 1024
MAX_BAD_WORD_TOKENS = 1 << 18
"""Of all spellings of all bad words: what a sampler looks through takes some 100 bytes for each."""
MAX_PROCESSORS = 64

LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]

LogitsProcessor = Callable[..., Any]
"""`(output_token_ids, logits) -> logits` or
`(prompt_token_ids, output_token_ids, logits) -> logits`, float32 [V]."""

GENERATION_CONFIG_KEYS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Keys of a model's `generation_config.json` that give defaults,
and the parameter that each one sets."""


class RequestOutputKind(Enum):
    """What an output that is delivered before the end of its request holds."""

    CUMULATIVE = "cumulative"
    """All that has been generated so far."""
    DELTA = "delta"
    """What is new since the last output."""
    FINAL_ONLY = "final_only"
    """Nothing: only the finished output is delivered."""


class ThinkTags(NamedTuple):
    """The think tags: what a model writes around its reasoning."""

    begin: str
    end: str
    is_open: bool | None = None
    """Whether the prompt has begun the reasoning; None leaves it to the prompt's end."""


class BeamRules(NamedTuple):
    """How beams are ranked, and when a search ends."""

    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False


_NOT_OF_BEAMS = (
    "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty", "top_p", "top_k",
    "min_p", "stop", "min_tokens", "logprobs", "prompt_logprobs", "logprob_token_ids", "logit_bias",
    "bad_words", "logits_processors", "structured_outputs", "thinking_token_budget",
    "repetition_detection",
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """How to choose a request's tokens and when to stop. Names and defaults are vLLM's.

    Raises `InvalidParameterError` (with `param` set) for a value out of its range.
    """

    n: int = 1
    """Sequences to return."""
    best_of: int | None = None
    """Sequences to generate, of which the `n` with the best cumulative log-probability
    are returned; None means `n`."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that the output holds."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time the token occurs in the output."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the output."""
    temperature: float = 1.0
    """0, and anything below `MIN_TEMPERATURE`, is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1 keeps all."""
    min_p: float = 0.0
    """Keeps tokens at least this probable relative to the most probable one."""
    seed: int | None = None
    """None (or -1) lets the engine choose."""
    stop: str | list[str] | None = None
    """After construction always a list."""
    stop_token_ids: list[int] | None = None
    """After construction always a list."""
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """None means the rest of the context."""
    min_tokens: int = 0
    """Until that many tokens were generated, end-of-sequence and
    `stop_token_ids` cannot be chosen."""
    logprobs: int | None = None
    """Alternatives to report for each output token: 0 the chosen one alone,
    -1 the whole vocabulary."""
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    """Tokens whose log-probability is reported with every output token,
    in place of the `logprobs` best."""
    logprobs_mode: LogprobsMode = "raw_logprobs"
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logits_processors: list[LogitsProcessor] | None = None
    """Called for each token with (output ids, logits) or (prompt ids, output ids, logits);
    see `LogitsProcessor`."""
    structured_outputs: StructuredOutputsParams | None = None
    """The form that the output must have. A mapping of its fields is accepted, too."""
    thinking_token_budget: int | None = None
    """Tokens that a model may generate between the tags around its reasoning; then the closing tag
    is written for it. -1 is
    None: no limit.
    """
    thinking_marks: ThinkTags | None = None
    """None leaves them to the model's chat template."""
    repetition_detection: RepetitionDetectionParams | None = None
    """When an answer that repeats itself is ended. A mapping of its fields is accepted, too."""
    skip_reading_prefix_cache: bool | None = None
    """None leaves it to the engine."""
    beam_search: BeamRules | None = None
    """In place of samples: the `n` best beams, ranked by the model's own probabilities and shown at
    the end. `LLM.beam_search` gives their scores, too."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    truncate_prompt_tokens: int | None = None
    """Keeps that many tokens at the prompt's end;
    -1 what the context holds beside one token of output."""
    flat_logprobs: bool = False
    """Report log-probabilities as `FlatLogprobs`, which is a few lists in place of many dicts."""
    extra_args: dict[str, Any] | None = None
    """For custom logits processors, which read it; nothing else does."""
    guided_decoding: StructuredOutputsParams | None = None
    """An older name of `structured_outputs`; always None after construction."""
    stream_interval: int | None = None
    """Accepted for its name's sake: every token is streamed when it is there."""
    skip_clone: bool = False
    """Accepted for its name's sake: parameters are always copied."""
    prompt_logprob_token_ids: list[int] | None = None
    """Not available, as the rest."""
    prompt_logprob_start: int | None = None
    trace_decode_token_ids: list[int] | None = None
    routed_experts_prompt_start: int = 0
    watermarking: bool | None = None

    def __post_init__(self) -> None:
        self._check_foreign()
        self._check_counts()
        self._check_distribution()
        self._check_stops()
        self._check_logprobs()
        self._check_restrictions()
        self._check_flags()
        if self.beam_search is not None:
            self._check_beams(self.beam_search)

    def _check_counts(self) -> None:
        self.n = checks.integer("n", self.n, 1, MAX_SEQUENCES)
        if self.best_of is not None:
            self.best_of = checks.integer("best_of", self.best_of, 1, MAX_SEQUENCES)
            if self.best_of < self.n:
                checks.refuse(
                    "best_of", self.best_of, f"an integer from n={self.n} to {MAX_SEQUENCES}"
                )
        if self.max_tokens is not None:
            self.max_tokens = checks.integer("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        self.min_tokens = checks.integer("min_tokens", self.min_tokens, 0, MAX_TOKENS)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            checks.refuse(
                "min_tokens", self.min_tokens, f"an integer from 0 to max_tokens={self.max_tokens}"
            )
        if self.thinking_token_budget is not None:
            budget = checks.integer(
                "thinking_token_budget", self.thinking_token_budget, -1, MAX_TOKENS
            )
            self.thinking_token_budget = None if budget == -1 else budget
        if not isinstance(self.thinking_marks, ThinkTags | None):
            checks.refuse("thinking_marks", self.thinking_marks, "ThinkTags, or None")
        if self.truncate_prompt_tokens is not None:
            self.truncate_prompt_tokens = checks.integer(
                "truncate_prompt_tokens", self.truncate_prompt_tokens, -1, MAX_TOKENS
            )
            if self.truncate_prompt_tokens == 0:
                checks.refuse(
                    "truncate_prompt_tokens", 0, "at least 1, or -1 for what the context holds"
                )

    def _check_foreign(self) -> None:
        """Take older names, and refuse what there is not by its name."""
        for name, advice in _ABSENT.items():
            if getattr(self, name):
                raise InvalidParameterError(
                    f"{name}={checks.shown(getattr(self, name))} is not available in this version; "
                    f"{advice}",
                    param=name,
                )
        if self.guided_decoding is not None:
            if self.structured_outputs is not None:
                raise InvalidParameterError(
                    "guided_decoding and structured_outputs are the same; give one of them",
                    param="guided_decoding",
                )
            self.structured_outputs, self.guided_decoding = self.guided_decoding, None
        if self.extra_args is not None and not isinstance(self.extra_args, dict):
            checks.refuse("extra_args", self.extra_args, "a dict")

    def _check_distribution(self) -> None:
        self.temperature = checks.number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        self.top_p = checks.number("top_p", self.top_p, 0.0, 1.0, above_low=True)
        self.min_p = checks.number("min_p", self.min_p, 0.0, 1.0)
        self.top_k = max(0, checks.integer("top_k", self.top_k, -1, MAX_TOP_K))
        self.presence_penalty = checks.number(
            "presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY
        )
        self.frequency_penalty = checks.number(
            "frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY
        )
        self.repetition_penalty = checks.number(
            "repetition_penalty",
            self.repetition_penalty,
            0.0,
            MAX_REPETITION_PENALTY,
            above_low=True,
        )
        if self.seed is not None:
            seed = checks.integer("seed", self.seed, -(2**63), 2**64 - 1)
            self.seed = None if seed == -1 else seed

    def _check_stops(self) -> None:
        self.stop = checks.strings("stop", self.stop, (MAX_STOP_STRINGS, MAX_STOP_STRING_LEN))
        self.stop_token_ids = checks.token_ids(
            "stop_token_ids",
            () if self.stop_token_ids is None else self.stop_token_ids,
            MAX_STOP_TOKEN_IDS,
        )
        if self.stop and not self.detokenize:
            raise InvalidParameterError(
                f"stop={checks.shown(self.stop)} needs detokenize=True: stop strings are searched "
                "in the text; "
                "use stop_token_ids, or leave detokenize on",
                param="stop",
            )
        loops = self.repetition_detection
        if loops is not None and not isinstance(loops, RepetitionDetectionParams):
            self.repetition_detection = RepetitionDetectionParams.from_mapping(loops)

    def _check_logprobs(self) -> None:
        if self.logprobs is not None:
            self.logprobs = checks.integer("logprobs", self.logprobs, -1, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = checks.integer(
                "prompt_logprobs", self.prompt_logprobs, -1, MAX_LOGPROBS
            )
        if self.logprob_token_ids is not None:
            self.logprob_token_ids = checks.token_ids(
                "logprob_token_ids", self.logprob_token_ids, MAX_LOGPROB_TOKEN_IDS
            )
        if self.logprobs_mode not in LOGPROBS_MODES:
            checks.refuse(
                "logprobs_mode", self.logprobs_mode, "one of " + ", ".join(LOGPROBS_MODES)
            )

    def _check_restrictions(self) -> None:
        if self.logit_bias is not None:
            self.logit_bias = _logit_bias(self.logit_bias)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = checks.token_ids(
                "allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS
            )
            if not self.allowed_token_ids:
                checks.refuse(
                    "allowed_token_ids", [], "at least one token id, or None to allow all"
                )
        if self.bad_words is not None:
            self.bad_words = checks.strings(
                "bad_words", self.bad_words, (MAX_BAD_WORDS, MAX_BAD_WORD_LEN)
            )
        if self.logits_processors is not None:
            self.logits_processors = _processors(self.logits_processors)
        if self.structured_outputs is not None:
            self._check_structure()

    def _check_structure(self) -> None:
        if not isinstance(self.structured_outputs, StructuredOutputsParams):
            self.structured_outputs = StructuredOutputsParams.from_mapping(self.structured_outputs)
        for name in ("ignore_eos", "min_tokens"):
            if getattr(self, name):
                raise InvalidParameterError(
                    f"{name}={checks.shown(getattr(self, name))} contradicts structured_outputs, "
                    "which ends the output where its "
                    "form is complete; leave one of them out",
                    param=name,
                )

    def _check_flags(self) -> None:
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                checks.refuse(name, getattr(self, name), "True or False")
        if not isinstance(self.skip_reading_prefix_cache, bool | None):
            checks.refuse(
                "skip_reading_prefix_cache", self.skip_reading_prefix_cache, "True, False or None"
            )
        try:
            self.output_kind = RequestOutputKind(self.output_kind)
        except ValueError:
            checks.refuse(
                "output_kind",
                self.output_kind,
                "one of " + ", ".join(kind.value for kind in RequestOutputKind),
            )

    def _check_beams(self, rules: BeamRules) -> None:
        if not isinstance(rules, BeamRules):
            checks.refuse("beam_search", rules, "BeamRules, or None for samples")
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name in _NOT_OF_BEAMS and value not in (item.default, [], {}):
                raise InvalidParameterError(
                    f"{item.name}={checks.shown(value)} is not available with beam search, which "
                    "ranks by the model's own probabilities; leave it out",
                    param=item.name,
                )
        self.n = checks.integer("n", self.n, 1, MAX_BEAM_WIDTH)
        self.beam_search = _checked_rules(*rules)
        self.output_kind = RequestOutputKind.FINAL_ONLY

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any], **overrides: Any) -> Self:
        """Return parameters whose defaults are a model's `generation_config.json`; `overrides` win.

        A value that the file sets badly is refused like a user's, with the parameter's name.
        """
        return cls(**{**generation_defaults(config), **overrides})

    @classmethod
    def from_optional(cls, **options: Any) -> Self:
        """Return parameters of which None stands for the default."""
        return cls(**{name: value for name, value in options.items() if value is not None})

    def clone(self) -> Self:
        """Return an independent copy, checked anew. Containers are copied;
        the processors themselves are shared."""
        copied = replace(self)
        for item in fields(self):
            value = getattr(copied, item.name)
            if isinstance(value, list | dict):
                setattr(copied, item.name, value.copy())
        return copied

    def limited(self, max_tokens: int) -> Self:
        """Return the same for a prompt that leaves room for `max_tokens` alone;
        what these parameters list is shared, not copied."""
        if max_tokens == self.max_tokens:
            return self
        if self.min_tokens > max_tokens:
            checks.refuse(
                "min_tokens", self.min_tokens, f"an integer from 0 to max_tokens={max_tokens}"
            )
        copied = copy(self)
        copied.max_tokens = max_tokens
        return copied

    def lists_the_same(self, other: SamplingParams) -> bool:
        """Return whether both hold the very same lists, so that what was made of
        one's holds for the other."""
        return all(getattr(self, name) is getattr(other, name) for name in _LISTS)

    @property
    def num_listed(self) -> int:
        """About how much there is to be read in its lists, counted in token ids; a word to be
        tokenized counts as eight for each of its characters.
        """
        ids = (self.stop_token_ids, self.logit_bias, self.allowed_token_ids, self.logprob_token_ids)
        words = self.bad_words or ()
        return sum(len(each) for each in ids if each) + 8 * (len(words) + sum(map(len, words)))

    @property
    def num_sequences(self) -> int:
        """Sequences to generate."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, without drawing."""
        return self.temperature < MIN_TEMPERATURE

    @property
    def num_logprobs(self) -> int | None:
        """The best alternatives that the sampler must report: `logprobs`,
        or 0 where `logprob_token_ids` names others."""
        return 0 if self.logprob_token_ids else self.logprobs

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids that a model with `vocab_size` tokens does not have."""
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias"):
            checks.check_vocabulary(name, getattr(self, name), vocab_size)

    def to_row_sampling(
        self,
        *,
        seed: int,
        eos_token_ids: Iterable[int] = (),
        bad_words: Iterable[Sequence[int]] = (),
        processors: Sequence[str] = (),
    ) -> RowSampling:
        """Return the sampler's view of this request for a row whose 64-bit key is `seed`.

        `eos_token_ids` are the model's; `bad_words` the token sequences of `self.bad_words`;
        `processors` the names under which `self.logits_processors` are registered with the
        executor.
        """
        greedy = self.is_greedy
        return RowSampling(
            seed=seed & (2**64 - 1),
            temperature=0.0 if greedy else self.temperature,
            top_k=0 if greedy else self.top_k,
            top_p=1.0 if greedy else self.top_p,
            min_p=0.0 if greedy else self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            min_tokens=self.min_tokens,
            stop_token_ids=self._unsampled_stops(eos_token_ids),
            logit_bias=tuple(sorted((self.logit_bias or {}).items())),
            allowed_token_ids=None
            if self.allowed_token_ids is None
            else tuple(sorted(set(self.allowed_token_ids))),
            bad_words=tuple(tuple(word) for word in bad_words),
            num_logprobs=self.num_logprobs,
            logprob_token_ids=tuple(self.logprob_token_ids or ()),
            num_prompt_logprobs=self.prompt_logprobs,
            logprobs_mode=self.logprobs_mode,
            processors=tuple(processors),
            grammar=None if self.structured_outputs is None else self.structured_outputs.wire,
        )

    def _unsampled_stops(self, eos_token_ids: Iterable[int]) -> tuple[int, ...]:
        """Return tokens that `min_tokens` keeps from being sampled: what would end the sequence."""
        stops = set(self.stop_token_ids or ())
        if not self.ignore_eos:
            stops.update(eos_token_ids)
        return tuple(sorted(stops))


def _checked_rules(length_penalty: object, early_stopping: object) -> BeamRules:
    """Return how beams are ranked. Raises InvalidParameterError."""
    if early_stopping != "never" and not isinstance(early_stopping, bool):
        checks.refuse("early_stopping", early_stopping, 'True, False or "never"')
    penalty = checks.number("length_penalty", length_penalty, -10.0, 10.0)
    return BeamRules(penalty, early_stopping)


def generation_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters that a `generation_config.json` sets, by parameter name.

    Its keys are exactly what is used of the file; see `GENERATION_CONFIG_KEYS`. Null values count
    as absent, and an explicit `"do_sample": false` gives `temperature=0.0`.
    """
    defaults = {
        param: config[key]
        for key, param in GENERATION_CONFIG_KEYS.items()
        if config.get(key) is not None
    }
    if config.get("do_sample") is False:
        defaults["temperature"] = 0.0
    return defaults


_LISTS = (
    "stop",
    "stop_token_ids",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "logprob_token_ids",
    "structured_outputs",
)
_DIGITS = re.compile(r"[0-9]{1,10}\Z")
_FLAGS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "flat_logprobs",
)
_ABSENT = {
    "prompt_logprob_token_ids": (
        "ask for prompt_logprobs, which has as many alternatives as max_logprobs allows"
    ),
    "prompt_logprob_start": "take the part of prompt_logprobs that is of interest",
    "trace_decode_token_ids": (
        "give the tokens as the end of the prompt, and ask for prompt_logprobs"
    ),
    "routed_experts_prompt_start": "leave it out",
    "watermarking": "leave it out",
}
"""Parameters of vLLM's that there are not, with what to do instead."""


def _logit_bias(biases: object) -> dict[int, float]:
    if not isinstance(biases, Mapping):
        checks.refuse("logit_bias", biases, "a mapping from token id to bias")
    if len(biases) > MAX_LOGIT_BIASES:
        raise InvalidParameterError(
            f"logit_bias holds {len(biases)} entries; give at most {MAX_LOGIT_BIASES}",
            param="logit_bias",
        )
    checked: dict[int, float] = {}
    for key, bias in biases.items():
        # JSON has no integer keys, so "42" is accepted for 42.
        token_id = int(key) if isinstance(key, str) and _DIGITS.match(key) else key
        token_id = checks.integer("logit_bias", token_id, 0, MAX_TOKEN_ID)
        checked[token_id] = checks.number("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    return checked


def _processors(values: object) -> list[LogitsProcessor]:
    entries = checks.entries_of("logits_processors", values, MAX_PROCESSORS)
    for entry in entries:
        if not callable(entry):
            checks.refuse("logits_processors", entry, "callables of (output_token_ids, logits)")
    return entries
