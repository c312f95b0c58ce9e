"""Which packages on this machine offer a platform (`quire.kernels.platforms`), by their metadata:
nothing of them is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from quire.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "quire.platforms"


class FoundPlatform(NamedTuple):
    """A platform that a package offers."""

    name: str
    package: str
    version: str
    entry_point: EntryPoint

    @property
    def label(self) -> str:
        """For messages."""
        return f"platform={self.name!r} of {self.package} {self.version}"


def find_platforms() -> list[FoundPlatform]:
    """Return what packages offer, in the order of their names."""
    from importlib import metadata  # imports a twentieth of what `import quire` does

    found = dict[tuple[str, str, str], FoundPlatform]()
    for each in metadata.entry_points(group=GROUP):
        package = "?" if each.dist is None else each.dist.name
        version = "?" if each.dist is None else each.dist.version
        platform = FoundPlatform(each.name, package, version, each)
        found.setdefault((each.name, package, each.value), platform)
    return [found[key] for key in sorted(found)]


def find_platform(name: str) -> FoundPlatform:
    """Return the platform of a name. Raises ConfigError for none, and for several."""
    found = find_platforms()
    named = [each for each in found if each.name == name]
    if not named:
        known = ", ".join(dict.fromkeys(each.name for each in found)) or "none"
        raise ConfigError(
            f"platform={name!r} is not installed; installed are: {known}. Install the package that "
            f"offers it (entry point group {GROUP})"
        )
    if len(named) > 1:
        packages = " and ".join(each.package for each in named)
        raise ConfigError(f"platform={name!r} is offered by {packages}; uninstall all but one")
    return named[0]
