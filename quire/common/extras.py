"""Packages that only some uses need: the extras of the distribution, and what is said where one is
missing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from quire.errors import ConfigError


@contextlib.contextmanager
def needs_extra(what: str, extra: str) -> Iterator[None]:
    """Report a package that is missing within the block as ConfigError, with the extra to install.

    A missing module of Quire itself is a bug, and passes as it is.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package == "quire":
            raise
        raise ConfigError(
            f"{what} needs the package {package}, which is not installed: "
            f"pip install 'quire-llm[{extra}]'"
        ) from error
