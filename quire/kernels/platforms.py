"""Platforms: devices whose kernels come from other packages, found by the entry point group
`quire.platforms`.

A package names an object (or a class without arguments) that implements `Platform`. It is loaded
only where an engine names it (`platform="NAME"`), and whatever is wrong with it is an error: no
engine computes elsewhere because a platform is missing. The version of the protocol is compared
first, so that a package made for another one is told from one that is broken.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol, cast

from quire.common.platforms import find_platform
from quire.errors import ConfigError
from quire.kernels.interface import Kernels

PROTOCOL_VERSION = 1
"""Of `Platform` and `Kernels` together: raised whenever a package would have to change."""


class Platform(Protocol):
    """One device, as a package describes it."""

    protocol_version: int
    """The `PROTOCOL_VERSION` that the package was made for."""

    def reasons_against(self) -> Sequence[str]:
        """Say why it cannot compute here (no device, no driver); empty where it can."""
        ...

    def kernels(self) -> Kernels:
        """Return its kernels. Called once for each engine."""
        ...


def load_platform(name: str) -> Platform:
    """Return a platform that can compute here. Raises ConfigError, with what its package said."""
    found = find_platform(name)
    where = found.label
    try:
        loaded = found.entry_point.load()
        platform: Any = loaded() if inspect.isclass(loaded) else loaded
    except Exception as error:
        raise ConfigError(f"{where} could not be loaded: {_said(error)}") from error
    version = getattr(platform, "protocol_version", None)
    if version != PROTOCOL_VERSION:
        raise ConfigError(
            f"{where} is made for version {version!r} of the platform protocol, and this is "
            f"{PROTOCOL_VERSION}; install the version of {found.package} for it"
        )
    for method in ("reasons_against", "kernels"):
        if not callable(getattr(platform, method, None)):
            raise ConfigError(f"{where} has no method {method}()")
    try:
        reasons = list(platform.reasons_against())
    except Exception as error:
        raise ConfigError(f"{where} could not look at this machine: {_said(error)}") from error
    if reasons:
        raise ConfigError(f"{where} cannot compute here: {'; '.join(map(str, reasons))}")
    return cast("Platform", platform)


def platform_kernels(name: str) -> Kernels:
    """Return the kernels of a platform. Raises ConfigError."""
    platform, found = load_platform(name), find_platform(name)
    where = found.label
    try:
        kernels = platform.kernels()
    except Exception as error:
        raise ConfigError(f"{where} could not make its kernels: {_said(error)}") from error
    missing = [each for each in required_names() if not hasattr(kernels, each)]
    if missing:
        raise ConfigError(f"{where}: its kernels have no {', '.join(missing)}")
    return kernels


def required_names() -> list[str]:
    """Return what kernels must have: the members of `Kernels`."""
    members = {*Kernels.__annotations__, *vars(Kernels)}
    return sorted(each for each in members if not each.startswith("_"))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
