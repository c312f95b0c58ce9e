"""Options that several commands share, and their way from the command line into `EngineConfig` and
`SamplingParams`.

The engine's options are those of `EngineConfig`, generated from its one declaration. Only what was
given is passed on, so the defaults stay where they are declared.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from quire.common.json_text import read_json
from quire.config.engine import EngineConfig
from quire.config.foreign import OTHER_VALUES
from quire.core.params import GENERATION_CONFIG_KEYS, SamplingParams
from quire.engine.arg_utils import add_foreign_options, read_length_option

DEFAULT_MAX_TOKENS = 256
"""Where neither the user nor the model's generation_config.json says how long an answer may be."""
_DICT = "Mapping[str, Any]"

_METAVARS = {"int": "N", "float": "X", "str": "NAME", _DICT: "JSON"}


def _json(text: str) -> dict[str, Any]:
    try:
        value = read_json(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} must be a JSON object")
    return value


_TYPES: Mapping[str, Callable[[str], Any]] = {"int": int, "float": float, _DICT: _json}


def _reader(item: dataclasses.Field[Any]) -> Callable[[str], Any]:
    if item.name == "max_model_len":
        return read_length_option
    if "choices" in item.metadata:  # a value may have another name in vLLM
        return lambda text: OTHER_VALUES.get(item.name, {}).get(text, text)
    return _TYPES.get(str(item.type).removesuffix(" | None"), str)


class SamplingOption(NamedTuple):
    """One sampling parameter as an option."""

    name: str
    type: Callable[[str], Any]
    help: str


SAMPLING_OPTIONS = (
    SamplingOption(
        "max_tokens",
        int,
        f"longest answer, in tokens (default: the model's, else {DEFAULT_MAX_TOKENS})",
    ),
    SamplingOption("min_tokens", int, "do not stop before that many tokens"),
    SamplingOption(
        "temperature", float, "0 always takes the most likely token (default: the model's, else 1)"
    ),
    SamplingOption(
        "top_p", float, "sample from the likeliest tokens that make up this probability"
    ),
    SamplingOption("top_k", int, "sample from that many of the likeliest tokens"),
    SamplingOption(
        "min_p", float, "drop tokens below this share of the likeliest one's probability"
    ),
    SamplingOption("presence_penalty", float, "make tokens that the answer holds less likely"),
    SamplingOption(
        "frequency_penalty", float, "as --presence-penalty, for each time that a token occurs"
    ),
    SamplingOption(
        "repetition_penalty", float, "above 1, make tokens of prompt and answer less likely"
    ),
    SamplingOption("seed", int, "the same seed gives the same answer"),
)


def add_engine_options(
    parser: argparse.ArgumentParser,
    *,
    exclude: tuple[str, ...] = (),
    is_model_needed: bool = True,
    default_model: str | None = None,
) -> None:
    """MODEL and one option per field of `EngineConfig`,
    except those that a command uses in another sense."""
    is_optional = default_model is not None or not is_model_needed
    parser.usage = f"{parser.prog} [OPTIONS] {'[MODEL]' if default_model else 'MODEL'}"
    default = f" (default: {default_model})" if default_model else ""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?" if is_optional else None,
        default=default_model,
        help=_field("model").metadata["help"] + default,
    )
    group = parser.add_argument_group("engine options")
    chosen = [
        item
        for item in dataclasses.fields(EngineConfig)
        if item.name != "model" and item.name not in exclude
    ]
    add_field_options(group, chosen)
    parser.set_defaults(
        engine_options=(*(item.name for item in chosen), *add_foreign_options(parser))
    )


def add_field_options(
    group: argparse._ArgumentGroup, items: Iterable[dataclasses.Field[Any]]
) -> None:
    """Add one option per field of a configuration record; what is not given is absent from the
    namespace."""
    for item in items:
        flag, text = f"--{item.name.replace('_', '-')}", _help_of(item)
        if str(item.type) == "bool":
            group.add_argument(flag, action=_Switch, help=text)
            continue
        if str(item.type) == "tuple[str, ...]":
            group.add_argument(
                flag,
                action=_Collect,
                nargs=item.metadata.get("nargs"),
                metavar=item.name.rpartition("_")[2].upper(),
                help=text,
            )
            continue
        kind = str(item.type).removesuffix(" | None")
        choices = item.metadata.get("choices")
        metavar = (
            f"{{{','.join(choices)}}}"
            if choices
            else "SIZE"
            if kind == "int | str"
            else _METAVARS.get(kind)
        )
        group.add_argument(
            flag,
            type=_reader(item),
            choices=choices and (*choices, *item.metadata.get("also", ())),
            default=argparse.SUPPRESS,
            metavar=metavar,
            help=text,
        )


def engine_config(args: argparse.Namespace, **overrides: Any) -> EngineConfig:
    """Return the wish that the options express. Raises ConfigError."""
    given = {name: getattr(args, name) for name in args.engine_options if hasattr(args, name)}
    return EngineConfig.from_options(args.model, {**overrides, **given})


def add_sampling_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Sampling and stopping; what is not given comes from the model's generation_config.json.
    Returns their group."""
    group = parser.add_argument_group(
        "sampling options", "what is not given is as the model's generation_config.json says"
    )
    for option in SAMPLING_OPTIONS:
        metavar = "X" if option.type is float else "N"
        flag = f"--{option.name.replace('_', '-')}"
        group.add_argument(
            flag, type=option.type, default=argparse.SUPPRESS, metavar=metavar, help=option.help
        )
    group.add_argument(
        "--stop",
        action="append",
        default=argparse.SUPPRESS,
        metavar="TEXT",
        help="end an answer before this text (repeatable)",
    )
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        default=argparse.SUPPRESS,
        help="go on after the model's end-of-text token",
    )
    return group


def sampling_params(
    args: argparse.Namespace, generation_config: Mapping[str, Any], **overrides: Any
) -> SamplingParams:
    """Return the sampling parameters of the options and the model. Raises InvalidParameterError."""
    names = [*(option.name for option in SAMPLING_OPTIONS), "stop", "ignore_eos"]
    given = {name: getattr(args, name) for name in names if hasattr(args, name)}
    defaults: dict[str, Any] = {}
    length_keys = [key for key, name in GENERATION_CONFIG_KEYS.items() if name == "max_tokens"]
    if all(generation_config.get(key) is None for key in length_keys):
        defaults["max_tokens"] = DEFAULT_MAX_TOKENS
    return SamplingParams.from_generation_config(
        generation_config, **{**defaults, **given, **overrides}
    )


class _Switch(argparse.BooleanOptionalAction):
    """--flag and --no-flag, absent from the namespace unless given."""

    def __init__(self, option_strings: list[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, default=argparse.SUPPRESS, help=help)


class _Collect(argparse._AppendAction):
    """An option that may be given several times; absent from the namespace unless given."""

    def __init__(self, option_strings: list[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, default=argparse.SUPPRESS, **options)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        given = values if isinstance(values, list) else [values]
        setattr(namespace, self.dest, (*getattr(namespace, self.dest, ()), *given))


def _field(name: str) -> dataclasses.Field[Any]:
    return next(item for item in dataclasses.fields(EngineConfig) if item.name == name)


def _help_of(item: dataclasses.Field[Any]) -> str:
    """Return the declared help and default."""
    text = str(item.metadata["help"]).replace("%", "%%")
    return (
        text
        if item.default in (None, ()) or "default" in text
        else f"{text} (default: {_shown(item.default)})"
    )


def _shown(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
