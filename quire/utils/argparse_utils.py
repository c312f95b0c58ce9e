"""`FlexibleArgumentParser`: an `ArgumentParser` to which an option's dashes
and underscores are the same."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from quire.config.command_line import known_words


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Takes `--max_model_len` for `--max-model-len`.
    Options are declared as for any `ArgumentParser`."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse as `ArgumentParser` does, whatever separates the words of an option's name, and
        keys of JSON one by one, too."""
        given = list(sys.argv[1:] if args is None else args)
        parsed: tuple[argparse.Namespace, list[str]] = super().parse_known_args(
            known_words([self._with_dashes(each) for each in given], self._option_string_actions),
            namespace,
        )
        return parsed

    def add_argument(
        self, *names: Any, deprecated: bool = False, **options: Any
    ) -> argparse.Action:
        """Declare an option; `deprecated` is accepted and has no effect."""
        return super().add_argument(*names, **options)

    @staticmethod
    def _with_dashes(argument: str) -> str:
        if not argument.startswith("--"):
            return argument
        name, equals, value = argument.partition("=")
        return name.replace("_", "-") + equals + value
