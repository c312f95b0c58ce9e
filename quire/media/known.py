"""Images by the names that requests give them (`multi_modal_uuids`), so that one need not be sent
again.

A name is no identity: what is encoded and cached is known by the digest of its pixels alone. Here a
name leads to the image that was last read under it, for those of the same scope (a tenant, a
`cache_salt`) and the same settings of the processor; no tenant reaches another's images. Bounded:
what was used least recently is forgotten first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

from quire.core.images import Image
from quire.errors import InvalidParameterError

MAX_BYTES = 128 << 20
"""Of pixels, of all images that are known by name."""
MAX_NAMES = 4096
"""Each with a name of at most `MAX_NAME_LEN` characters."""
MAX_NAME_LEN = 256


class ImageName(NamedTuple):
    """What an image is found again by."""

    scope: str
    uuid: str
    settings: str

    @classmethod
    def of(cls, scope: str, uuid: str, settings: Mapping[str, Any] | None) -> ImageName:
        """Return the name of an image that is read with these settings."""
        given = sorted((settings or {}).items(), key=lambda item: str(item[0]))
        return cls(scope, uuid, repr(given))


def check_uuid(given: object, param: str) -> str | None:
    """Return the uuid of a request; None where there is none. Raises InvalidParameterError."""
    if given is None:
        return None
    if not isinstance(given, str) or not 1 <= len(given) <= MAX_NAME_LEN:
        raise InvalidParameterError(
            f"{param}: a uuid is text of 1 to {MAX_NAME_LEN} characters, not {repr(given)[:80]}",
            param=param,
        )
    return given


class KnownImages:
    """For any thread."""

    def __init__(self, max_bytes: int = MAX_BYTES, max_names: int = MAX_NAMES) -> None:
        self._max_bytes, self._max_names = max_bytes, max_names
        self._images: OrderedDict[ImageName, tuple[Image, ...]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def find(self, name: ImageName) -> tuple[Image, ...] | None:
        """Return the image that was last read under the name, and its crops; None where it is not
        known, or not any more."""
        with self._lock:
            found = self._images.get(name)
            if found is not None:
                self._images.move_to_end(name)
            return found

    def keep(self, name: ImageName, images: tuple[Image, ...]) -> None:
        """Know an image by this name from now on, in place of what it stood for."""
        with self._lock:
            self._forget(name)
            self._images[name] = images
            self._num_bytes += _num_bytes(images)
            while self._num_bytes > self._max_bytes or len(self._images) > self._max_names:
                self._forget(next(iter(self._images)))

    def _forget(self, name: ImageName) -> None:
        self._num_bytes -= _num_bytes(self._images.pop(name, ()))


def _num_bytes(images: tuple[Image, ...]) -> int:
    return sum(len(image.pixels) for image in images)
