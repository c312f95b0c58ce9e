"""Fields that chat and legacy completions share: OpenAI's, and those that vLLM adds, each with its
range.

Three kinds. Most mean something here and become `SamplingParams`. Those of `UNAVAILABLE` are
refused by name, with the reason, whenever they have an effect. Those of `HINTS` may be ignored
without changing an answer. Any other field is unknown, and is named in a response header or
refused, as the operator wishes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.core.params import BeamRules, LogprobsMode, SamplingParams
from quire.engine.front.model_info import ModelInfo
from quire.server.api.retention import Retention
from quire.server.http.errors import bad_request, unavailable_feature

MAX_STOPS = 4
MAX_STOP_LEN = 1024
MAX_LOGIT_BIASES = 2048
MAX_LIST = 4096
MAX_BEAM_STOPS = 16
MAX_LOGIT_BIAS = 100.0
MAX_NAMED = 32
"""Of several wrong keys, how many a message names."""
_MIN_TOP_P = 1e-9
"""What 0 means: the most likely token alone."""
_TOKEN_ID = re.compile(r"[0-9]{1,10}\Z")

Penalty = Annotated[float, Meta(ge=-2, le=2)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_LIST)]
Count = Annotated[int, Meta(ge=1, lt=1 << 31)]
Budget = Annotated[int, Meta(ge=-1, lt=1 << 31)]
"""-1 is no limit."""
TopLogprobs = Annotated[int, Meta(ge=-1, le=1 << 20)]
"""-1 is the whole vocabulary. How many are allowed is for the operator to say:
see `check_num_logprobs`."""

_MetadataKey = Annotated[str, Meta(max_length=64)]
_MetadataValue = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[_MetadataKey, _MetadataValue], Meta(max_length=16)]
"""What a client wants to find again beside an answer or a batch. Kept, so bounded,
as OpenAI bounds it."""
UserMetadata = Annotated[dict[_MetadataKey, _MetadataValue | None], Meta(max_length=16)]
"""Anthropic's, within the same bounds: `user_id` may be null."""

UNAVAILABLE: Mapping[str, str] = {
    "functions": "function calling is not available on this server",
    "function_call": "function calling is not available on this server",
    "audio": "this model has no audio",
    "web_search_options": "this server fetches nothing",
    "documents": "documents are for chats; put their text into the prompt",
    "chat_template": "a template is never taken from a request; the operator sets it",
    "prompt_embeds": "prompts of embeddings are not available",
    "mm_processor_kwargs": "it is the operator's: --mm-processor-kwargs",
    "ec_transfer_params": "encoder transfer is not available",
    "vllm_xargs": "custom processors are not available",
    "watermarking": "watermarks are not available: no detector would know this server's",
    "return_token_offsets": (
        "offsets come with log-probabilities (text_offset); /tokenize shows a prompt's tokens"
    ),
    "return_weight_versions": (
        "every answer names its weights (x-quire-weight-version; timings where they changed)"
    ),
    "logits_processors": "code is never taken from a request",
}
NO_EFFECT = "this has no effect here"
_BEAM_RULES = ("length_penalty", "early_stopping")
HINTS = ("store", "prediction", "verbosity", *_BEAM_RULES, "session_id")
"""Ignored, and named in a response header; `user`,
`metadata` and similar fields have no effect and are not."""


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream should have besides its chunks."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class CommonFields(msgspec.Struct, kw_only=True):
    """What every request for tokens in OpenAI's style may say of them: its names and vLLM's."""

    model: Annotated[str, Meta(max_length=256)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None

    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=1e-4, le=1e4)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=1 << 18)] | None = (
        None
    )
    bad_words: (
        Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=256)]
        | None
    ) = None
    skip_reading_prefix_cache: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)] | None = None
    request_id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{1,128}$")] | None = None
    timings: bool | None = None


class SamplingFields(CommonFields, kw_only=True):
    """What both kinds of completion have."""

    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stream_options: StreamOptions | None = None
    logprob_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    logprobs_mode: LogprobsMode | None = None
    prompt_logprobs: Annotated[int, Meta(ge=-1, le=1 << 20)] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    echo: bool | None = None
    thinking_token_budget: Budget | None = None
    repetition_detection: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    tools: Any = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    web_search_options: Any = None
    documents: Any = None
    chat_template: Any = None
    prompt_embeds: Any = None
    mm_processor_kwargs: Any = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: Any = None
    vllm_xargs: Any = None
    watermarking: Any = None
    return_token_offsets: Any = None
    return_weight_versions: Any = None
    logits_processors: Any = None

    user: Any = None
    metadata: Metadata | None = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Retention | None = None
    prediction: Any = None
    store: bool | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    parallel_tool_calls: bool | None = None
    session_id: Any = None
    verbosity: Any = None
    use_beam_search: bool | None = None
    """The `n` best beams in place of samples; the next two are for them."""
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] | None = None
    early_stopping: bool | Literal["never"] | None = None


def check_fields(request: SamplingFields, *, exempt: frozenset[str] = frozenset()) -> None:
    """Refuse by name what cannot be honoured, and combinations that make no sense."""
    for name, reason in UNAVAILABLE.items():
        if name not in exempt and asks_for_something(getattr(request, name)):
            raise unavailable_feature(name, reason)
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options: only with stream=true", param="stream_options")
    if request.stream and (request.kv_transfer_params or {}).get("do_remote_decode"):
        raise bad_request(
            "kv_transfer_params: do_remote_decode is answered in one piece; leave stream out",
            param="kv_transfer_params",
        )
    if request.use_beam_search:
        _check_beams(request)
    check_common(request)


def check_common(request: CommonFields) -> None:
    """Refuse by name what is out of bounds and cannot be said in a type."""
    _check_stops(request.stop)
    if request.logit_bias is not None:
        _check_logit_bias(request.logit_bias)


def _check_beams(request: SamplingFields) -> None:
    if request.stream:
        raise bad_request(
            "use_beam_search: beams are known at the end only; not with stream=true",
            param="use_beam_search",
        )
    num_stops = len(request.stop_token_ids or ())
    if num_stops > MAX_BEAM_STOPS:  # for each, a step looks at as many more candidates
        raise bad_request(
            f"stop_token_ids: {num_stops} are given, and at most {MAX_BEAM_STOPS} are allowed with "
            "use_beam_search",
            param="stop_token_ids",
        )


def asks_for_something(value: object) -> bool:
    """Return whether the value of an optional field is more than a way of leaving it out."""
    return value is not False and value not in (None, "", [], {})


def ignored_hints(request: SamplingFields) -> list[str]:
    """Hints that the request gives and that have no effect here, for `Call.ignore`."""
    used = _BEAM_RULES if request.use_beam_search else ()
    return [
        name for name in HINTS if name not in used and asks_for_something(getattr(request, name))
    ]


def _check_stops(stop: str | list[str] | None) -> None:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOPS:
        raise bad_request(
            f"stop: {len(stops)} stop strings are given, and at most {MAX_STOPS} are allowed",
            param="stop",
        )
    for each in stops:
        if not 1 <= len(each) <= MAX_STOP_LEN:
            raise bad_request(
                f"stop: a stop string must have 1 to {MAX_STOP_LEN} characters", param="stop"
            )


def check_num_logprobs(param: str, wanted: int | None, model: ModelInfo) -> None:
    """Refuse more alternatives than the operator allows; -1, as a wish and as a limit,
    is the whole vocabulary."""
    most = model.max_logprobs
    if wanted is None or most < 0 or (model.vocab_size if wanted < 0 else wanted) <= most:
        return
    what = "-1, the whole vocabulary," if wanted < 0 else str(wanted)
    raise bad_request(
        f"{param}: {what} is more than the {most} alternatives that this server gives "
        "(--max-logprobs)",
        param=param,
    )


def _check_logit_bias(biases: Mapping[str, float]) -> None:
    if len(biases) > MAX_LOGIT_BIASES:
        message = (
            f"logit_bias: {len(biases)} entries are given, and at most {MAX_LOGIT_BIASES} are "
            "allowed"
        )
        raise bad_request(message, param="logit_bias")
    _refuse_keys([key for key in biases if not _TOKEN_ID.match(key)], "not token ids")
    beyond = [key for key, bias in biases.items() if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS]
    _refuse_keys(beyond, f"keys whose bias is not from {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}")


def _refuse_keys(keys: Sequence[str], what: str) -> None:
    """Name all wrong keys at once, so that they need not be found one request at a time."""
    if keys:
        more = f" and {len(keys) - MAX_NAMED} more" if len(keys) > MAX_NAMED else ""
        named = ", ".join(repr(key[:40]) for key in keys[:MAX_NAMED])
        raise bad_request(f"logit_bias: {named}{more}: {what}", param="logit_bias")


def sampling_params(
    request: CommonFields, defaults: Mapping[str, Any], **given: Any
) -> SamplingParams:
    """Return the engine's parameters: what the request says, else what the model's
    `generation_config.json` says, else the default.

    `given` are parameters that the kinds of request name differently; they win. Beams are ranked by
    the model's own probabilities, so that defaults, which are for samples, do not concern them.
    """
    values = {name: value for name, value in defaults.items() if name != "max_tokens"}
    if getattr(request, "use_beam_search", None):
        rules = {name: getattr(request, name) for name in _BEAM_RULES}
        set_rules = {name: value for name, value in rules.items() if value is not None}
        values = {"beam_search": BeamRules(**set_rules)}
    for name in _PASSED_ON:
        value = getattr(request, name, None)
        if value is not None:
            values[name] = value
    if values.get("top_p") == 0:
        values["top_p"] = _MIN_TOP_P
    if transfer := getattr(request, "kv_transfer_params", None):
        values["extra_args"] = {"kv_transfer_params": transfer}
    if request.logit_bias:
        values["logit_bias"] = {int(key): bias for key, bias in request.logit_bias.items()}
    return SamplingParams(**{**values, **given})


_PASSED_ON = (
    "n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop", "top_k",
    "min_p",
    "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos",
    "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens",
    "allowed_token_ids", "bad_words", "logprob_token_ids", "logprobs_mode", "prompt_logprobs",
    "skip_reading_prefix_cache", "repetition_detection",
)  # fmt: skip
