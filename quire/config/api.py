"""What the operator wishes of the HTTP API: one frozen record; one declaration per option,
as in `EngineConfig`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Any

from quire.config.paths import expanded_path
from quire.errors import ConfigError

TOOL_PARSERS = ("hermes", "mistral", "llama3_json", "harmony")
REASONING_PARSERS = ("think", "mistral", "harmony")
METRICS_PREFIXES = ("quire", "vllm")
_PATHS = ("api_keys_file", "chat_template", "lora_folder", "weights_folder", "data_folder")


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?\Z")


def _option(default: Any, text: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": text, **metadata})


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiConfig:
    """Options of the HTTP API. Sizes in bytes, times in seconds."""

    served_model_name: tuple[str, ...] = _option(
        (),
        "name under which the model is served (several, repeatable, or separated by commas)",
        nargs="+",
    )
    api_keys_file: str | None = _option(None, "TOML file of tenants and their API keys")
    api_keys: str | None = _option(
        None, "API keys, separated by commas; better in QUIRE_API_KEYS or a file than here"
    )
    root_path: str = _option("", "path prefix that a proxy strips")
    chat_template: str | None = _option(
        None, "file with the chat template to use in place of the model's own"
    )
    tool_parser: str = _option(
        "auto",
        "notation of the model's tool calls; auto reads it off the chat template",
        choices=("auto", *TOOL_PARSERS),
    )
    reasoning_parser: str = _option(
        "auto",
        (
            "how the model marks what it thinks before it answers; auto reads it off the chat "
            "template, none tells nothing apart"
        ),
        choices=("auto", "none", *REASONING_PARSERS),
    )
    metrics_prefix: str = _option(
        "quire", "first part of all metric names", choices=METRICS_PREFIXES
    )
    lora_modules: tuple[str, ...] = _option(
        (),
        (
            'adapter to serve under a name of its own: name=path, or {"name": ..., "path": ...} '
            "(several, or repeatable)"
        ),
        nargs="+",
    )
    lora_folder: str | None = _option(
        None, "folder below which admin keys may load adapters while the server runs"
    )
    weights_folder: str | None = _option(
        None, "folder below which admin keys may take the model's next weights from"
    )
    allow_origin: tuple[str, ...] = _option(
        (),
        (
            "origin whose pages may use this server from a browser, such as https://example.com, "
            "or * for all (repeatable)"
        ),
    )
    strict_fields: bool = _option(
        False, "refuse request fields that are unknown or have no effect, instead of naming them"
    )
    json_logs: bool = _option(
        False, "write logs as one JSON object a line, with a line for each request"
    )
    data_folder: str | None = _option(
        None, "folder of uploaded files and batches; without it both are off"
    )
    max_body_bytes: int = _option(8 << 20, "largest request body")
    max_file_bytes: int = _option(200 << 20, "largest uploaded file")
    max_stored_file_bytes: int = _option(
        20 << 30, "all uploaded files and results of one tenant together"
    )
    max_running_batches: int = _option(16, "batches that run at once; others wait as `validating`")
    max_batch_lines: int = _option(
        32, "requests of batches in flight at once, of all batches together"
    )
    max_connections: int = _option(16384, "connections held at once")
    header_timeout_s: float = _option(10.0, "time for a request's headers to arrive")
    body_timeout_s: float = _option(60.0, "time for a request's body to arrive")
    write_timeout_s: float = _option(60.0, "time for a client to take what was sent to it")
    keep_alive_s: float = _option(
        15.0, "pause in a stream after which a comment is sent to keep it open"
    )
    request_timeout_s: float = _option(3600.0, "longest time that one request may take")
    queue_timeout_s: float = _option(
        600.0, "longest time that one request may wait for its first token"
    )
    max_queued_requests: int = _option(2048, "requests that may wait for their first token at once")
    max_queued_tokens: int = _option(
        4_000_000, "prompt tokens of the requests that may wait at once"
    )
    max_prompts: int = _option(512, "prompts in one completion request")
    max_sequences: int = _option(
        1024, "sequences that one HTTP request may generate (prompts times n)"
    )
    max_logprob_entries: int = _option(
        1 << 17, "log-probabilities in one answer (tokens times alternatives times sequences)"
    )
    max_list_entries: int = _option(
        1 << 22,
        "entries of logit_bias and stop_token_ids that one request may have, times its sequences",
    )
    max_repeated: int = _option(
        16 << 20, "characters and token ids of prompts that one answer may repeat, times n"
    )
    max_vector_numbers: int = _option(
        1 << 22,
        "numbers in the vectors of one request (elements times texts, or times tokens where each "
        "has a vector)",
    )
    max_stored_responses: int = _option(
        1024, "answers of /v1/responses that are kept in memory to be continued"
    )
    max_stored_bytes: int = _option(64 << 20, "memory for them")

    def __post_init__(self) -> None:
        for name in _PATHS:
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, expanded_path(name, given))
        for item in fields(self):
            value = getattr(self, item.name)
            choices = item.metadata.get("choices")
            if choices is not None and value not in choices:
                raise ConfigError(
                    f"{item.name}={value!r} is not available; choose "
                    f"{' or '.join(map(repr, choices))}"
                )
            if isinstance(item.default, int | float) and not isinstance(item.default, bool):
                check_number(item.name, value, is_whole=isinstance(item.default, int))
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(
                f"root_path={self.root_path!r} must begin with a slash and not end with one"
            )
        for origin in self.allow_origin:
            _check_origin(origin)
        object.__setattr__(self, "served_model_name", _as_names(self.served_model_name))
        if self.served_model_name and not self.served_names:
            raise ConfigError("served_model_name is empty; give at least one name, or leave it out")

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names of the served model; empty where none was given."""
        given = (name.strip() for each in self.served_model_name for name in each.split(","))
        return tuple(filter(None, given))


def _as_names(given: object) -> tuple[str, ...]:
    """Names as a program gives them: one text, several, or none."""
    listed = (given,) if isinstance(given, str) else given or ()
    if not isinstance(listed, list | tuple) or not all(isinstance(each, str) for each in listed):
        raise ConfigError(f"served_model_name={given!r} must be a name, or a list of names")
    return tuple(listed)


def _check_origin(origin: str) -> None:
    default_port = {"http": ":80", "https": ":443"}.get(origin.partition(":")[0])
    if origin == "*" or (
        _ORIGIN.match(origin) and not (default_port and origin.endswith(default_port))
    ):
        return
    raise ConfigError(
        f"allow_origin={origin!r} is not an origin as browsers send it: a scheme, a host, "
        "and a port unless it is the scheme's "
        "own, in lower case and without a path, such as https://example.com or "
        "http://localhost:3000; or * for all, which "
        "alone covers pages from files"
    )


def check_number(name: str, value: object, *, is_whole: bool, may_be_0: bool = False) -> None:
    """Raise ConfigError for what is no size, count or time: nan, one without an end, a text."""
    kinds: tuple[type, ...] = (int,) if is_whole else (int, float)
    is_number = isinstance(value, kinds) and not isinstance(value, bool)
    if is_number and (0 < value < 2**53 or (may_be_0 and value == 0)):  # type: ignore[operator]
        return
    least = "of at least 0" if may_be_0 else "above 0"
    raise ConfigError(
        f"{name}={value!r} must be {'an integer' if is_whole else 'a number'} {least}"
    )
