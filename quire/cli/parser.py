"""Argument parsing that refuses as everything else here does: by an exception with one clear line,
and a suggestion."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import takewhile
from typing import Any, NoReturn

from quire.cli.option_file import read_options, words_for
from quire.config.command_line import known_words
from quire.errors import ConfigError

_UNDERSCORED = re.compile(r"--[a-z0-9]+(?:_[a-z0-9]+)+(?==|\Z)")
"""An option as keyword arguments spell it, which vLLM takes as well: --max_model_len=8192."""


CONFIG = "config"
"""The option that names a file of options, of commands that have it."""


class _Default(str):
    """What a word without an option is where it is left out."""


class UsageError(ConfigError):
    """The command line itself is wrong."""


class Once(argparse.Action):
    """An option of one value that is refused where it comes again; absent unless given."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if hasattr(namespace, self.dest):
            parser.error(f"{option_string} is given twice; give it once")
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` for one command. Abbreviated options are not accepted:
    scripts outlive new options."""

    def __init__(self, prog: str, description: str, *, is_overview: bool = False) -> None:
        super().__init__(
            prog=prog,
            usage=f"{prog} COMMAND ..." if is_overview else f"{prog} [OPTIONS]",
            description=description
            if is_overview
            else f"{description[0].upper()}{description[1:]}.",
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
        )

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse; UsageError names an unknown option and what it may have meant.
        SystemExit after --help."""
        argv = [_UNDERSCORED.sub(lambda flag: flag[0].replace("_", "-"), word) for word in argv]
        args = self._parse_words(argv)
        path = getattr(args, CONFIG, None)
        if path is not None:
            return self._with_file(path, argv)
        self._refuse_taken_model(argv)
        return args

    def _refuse_taken_model(self, argv: Sequence[str]) -> None:
        """Refuse a line without a model, where an option of several words may have taken it for one
        of its own: another model than the one that was meant would be loaded."""
        several = {
            name: action
            for name, action in self._option_string_actions.items()
            if action.nargs == "+" and isinstance(action, argparse._AppendAction)
        }
        for place, word in enumerate(argv):
            taken = list(takewhile(lambda each: not each.startswith("-"), argv[place + 1 :]))
            if word not in several or len(taken) < 2 or "=" in taken[-1]:
                continue
            if any(each.dest == "model" for each in self._actions) and not self._said_model(argv):
                self.error(
                    f"{word} takes all words behind it, {taken[-1]!r} among them, and no MODEL is "
                    f"left; give it first: {self.prog} MODEL {word} {' '.join(taken)}"
                )

    def _with_file(self, path: str, argv: Sequence[str]) -> argparse.Namespace:
        """Parse again, with what the file says where the command line says nothing."""
        said = self._said(argv)
        known, words, places = self._option_string_actions, list[str](), set[str]()
        for key, value in read_options(path).items():
            try:
                found = known_words(list(words_for(key, value, known)), known)
            except ConfigError as error:
                self.error(f"config={path!r}: {key!r}: {error}")
            name = found[0].split("=")[0] if found else f"--{key.replace('_', '-')}"
            is_model = name == "--model" and any(each.dest == "model" for each in self._actions)
            if name == f"--{CONFIG}" or (name not in known and not is_model):
                self.error(f"config={path!r}: {key!r} is no option of it{self._hint([name])}")
            place = "model" if is_model else known[name].dest
            if place in places:
                self.error(f"config={path!r}: {key!r} comes twice, in another spelling")
            places.add(place)
            words += found
        if "model" not in places:
            self._refuse_taken_model(argv)
        return argparse.Namespace(**vars(self._parse_words(words)) | said)

    def _said(self, argv: Sequence[str]) -> dict[str, Any]:
        """Return what the command line says, without what is so where it says nothing."""
        optional = [
            action
            for action in self._actions
            if not action.option_strings and isinstance(action.default, str)
        ]
        try:
            for action in optional:
                action.default = _Default(action.default)
            found = vars(self._parse_words(argv))
        finally:
            for action in optional:
                action.default = str(action.default)
        return {name: each for name, each in found.items() if not isinstance(each, _Default)}

    def _print_message(self, message: str, file: Any = None) -> None:
        """Write, and let a failure be known: argparse ignores it, and without a buffer
        (PYTHONUNBUFFERED) nothing else would notice."""
        (file or sys.stderr).write(message)

    def _said_model(self, argv: Sequence[str]) -> bool:
        return "model" in self._said(argv)

    def _parse_words(self, argv: Sequence[str]) -> argparse.Namespace:
        argv = self._with_model(known_words(argv, self._option_string_actions))
        args, unknown = self.parse_known_args(argv)
        if unknown and not any(word.startswith("-") for word in unknown):
            # argparse takes a list of files as empty once an option stands before them
            args, unknown = self.parse_known_intermixed_args(argv)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._hint(unknown)}")
        return args

    def _with_model(self, argv: list[str]) -> list[str]:
        """Take `--model NAME` where the model is a word without an option."""
        is_word = any(each.dest == "model" and not each.option_strings for each in self._actions)
        for place, word in enumerate(argv if is_word else ()):
            if word == "--model" and argv[place + 1 :]:
                return [argv[place + 1], *argv[:place], *argv[place + 2 :]]
            if word.startswith("--model="):
                return [word.removeprefix("--model="), *argv[:place], *argv[place + 1 :]]
        return argv

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")

    def _hint(self, unknown: Sequence[str]) -> str:
        known = [text for action in self._actions for text in action.option_strings]
        for word in unknown:
            close = get_close_matches(word.split("=")[0], known, 1) if word.startswith("-") else []
            if close:
                return f"; did you mean {close[0]}?"
        return ""


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)
