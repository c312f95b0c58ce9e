"""What names an image in a request, and what such names may reach. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


class ImageSource(NamedTuple):
    """One image as a request brings it."""

    content: Any
    """A URL, or what `quire.media.decoding.from_object` takes."""
    param: str
    """Where in the request, for errors."""
    settings: Mapping[str, Any] | None = None
    """Of the processor, to replace for this image."""
    uuid: str | None = None
    """By which the image may be named again; with no `content`, the one that was."""


@dataclass(frozen=True, slots=True)
class MediaAccess:
    """What URLs of images may name."""

    domains: Sequence[str] = ()
    """Hosts, or host:port; without a port, the usual ones."""
    folder: Path | None = None
    """Whose files `file:` URLs may name."""

    @classmethod
    def of_options(cls, domains: Sequence[str], folder: str) -> MediaAccess:
        """Return what an operator's options allow."""
        return cls(domains, Path(folder).expanduser() if folder else None)
