"""`EngineArgs`: an engine's options as one record that a command line fills in, with the names that
vLLM gives them.

Made from the declaration of `EngineConfig` and the table of foreign options, so that it has every
option of both, once. What an option means and which values it may have is said there; nothing is
judged here but the form.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, make_dataclass
from typing import TYPE_CHECKING, Any, Self

from quire.common.json_text import RepeatedKeyError, read_json
from quire.config.engine import EngineConfig
from quire.config.foreign import FOREIGN_OPTIONS, ForeignOption, read_length
from quire.errors import ConfigError

DEFAULT_MODEL = "quire-storyteller"
"""What vLLM's record has a default for as well: the model that ships with the package."""

_THEIRS = {
    each.text: each
    for each in FOREIGN_OPTIONS.values()
    if each.kind == "renamed" and not each.values
}
"""Options that go by vLLM's name here, by ours; but for those whose values are called otherwise,
which go by both."""


class _Args:
    """What all such records can do."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add one option per field to a parser, each with its default; returns the parser."""
        group = parser.add_argument_group("engine options")
        for item in fields(EngineArgs):
            _add_option(group, item)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Return the record of parsed arguments; those of other parts of a program are left
        alone."""
        names = [item.name for item in fields(cls) if hasattr(args, item.name)]  # type: ignore[arg-type]
        return cls(**{name: getattr(args, name) for name in names})

    def options(self) -> dict[str, Any]:
        """Return what differs from the defaults, and the model: the arguments of `LLM`."""
        given = {item.name: getattr(self, item.name) for item in fields(self)}  # type: ignore[arg-type]
        defaults = {item.name: item.default for item in fields(self)}  # type: ignore[arg-type]
        return {
            name: value
            for name, value in given.items()
            if name == "model" or value != defaults[name]
        }

    def create_engine_config(self, usage_context: object = None) -> EngineConfig:
        """Return the options, judged. Raises ConfigError."""
        options = self.options()
        return EngineConfig.from_options(options.pop("model"), options)


def _own_fields() -> list[tuple[str, Any, Any]]:
    made: list[tuple[str, Any, Any]] = []
    for item in fields(EngineConfig):
        theirs = _THEIRS.get(item.name)
        if theirs is not None:
            metadata = {**item.metadata, "also_named": item.name}
            made.append((theirs.name, item.type, field(default=item.default, metadata=metadata)))
        elif item.name == "model":
            made.append(
                (item.name, item.type, field(default=DEFAULT_MODEL, metadata=item.metadata))
            )
        else:
            made.append((item.name, item.type, field(default=item.default, metadata=item.metadata)))
    return made


def _foreign_fields() -> list[tuple[str, Any, Any]]:
    options = [each for each in FOREIGN_OPTIONS.values() if each.text not in _THEIRS]
    return [
        (each.name, Any, field(default=each.default, metadata={"foreign": each}))
        for each in options
    ]


if TYPE_CHECKING:

    @dataclass(init=False)
    class EngineArgs(_Args):
        """An engine's options, by the names that vLLM gives them."""

        model: str = DEFAULT_MODEL

        def __init__(self, model: str = DEFAULT_MODEL, **options: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    @dataclass(init=False)
    class AsyncEngineArgs(EngineArgs):
        """The same, for `AsyncLLM`."""

else:
    EngineArgs = make_dataclass(
        "EngineArgs",
        [*_own_fields(), *_foreign_fields()],
        bases=(_Args,),
        namespace={"__module__": __name__},
    )
    AsyncEngineArgs = make_dataclass(
        "AsyncEngineArgs", [], bases=(EngineArgs,), namespace={"__module__": __name__}
    )


def _add_option(group: argparse._ArgumentGroup, item: Field[Any]) -> None:
    flags = [
        f"--{name.replace('_', '-')}"
        for name in (item.name, item.metadata.get("also_named"))
        if name
    ]
    foreign: ForeignOption | None = item.metadata.get("foreign")
    text = (
        argparse.SUPPRESS if foreign is not None else str(item.metadata["help"]).replace("%", "%%")
    )
    default = None if item.default is MISSING else item.default
    if isinstance(default, bool) or (foreign is not None and foreign.is_switch):
        group.add_argument(
            *flags,
            dest=item.name,
            default=default,
            help=text,
            action=argparse.BooleanOptionalAction,
        )
    else:
        bare: dict[str, Any] = {} if foreign is None else {"nargs": "?", "const": True}
        group.add_argument(
            *flags, dest=item.name, default=default, help=text, type=_reader(item), **bare
        )


def add_foreign_options(
    parser: argparse.ArgumentParser, table: Mapping[str, ForeignOption] = FOREIGN_OPTIONS
) -> list[str]:
    """Add vLLM's options that a parser lacks, of the engine or of another table, unlisted in its
    help; returns their names. Absent unless they are given."""
    known = {option for action in parser._actions for option in action.option_strings}
    lacking = [each for each in table.values() if f"--{each.name.replace('_', '-')}" not in known]
    for each in lacking:
        flag, hidden = f"--{each.name.replace('_', '-')}", argparse.SUPPRESS
        if each.is_switch:
            parser.add_argument(
                flag, action=argparse.BooleanOptionalAction, default=hidden, help=hidden
            )
        elif each.takes_text:
            parser.add_argument(flag, action="extend", nargs="+", default=hidden, help=hidden)
        else:
            parser.add_argument(
                flag,
                nargs="?",
                const=True,
                type=_value,
                default=hidden,
                help=hidden,
                dest=each.name,
            )
    return [each.name for each in lacking]


def _reader(item: Field[Any]) -> Callable[[str], Any]:
    kind = str(item.type).removesuffix(" | None")
    if item.name == "max_model_len":
        return read_length_option
    known: Mapping[str, Callable[[str], Any]] = {
        "int": int,
        "float": float,
        "str": str,
        "int | str": str,
    }
    return known.get(kind, _value)


def read_length_option(text: str) -> int | str:
    """Return a length in any of its spellings; -1 and auto are translated with the other
    options."""
    try:
        return text if text == "auto" else read_length(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _value(text: str) -> Any:
    """JSON where it is JSON, else text."""
    try:
        return read_json(text)
    except RepeatedKeyError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None
    except ValueError:
        return text
