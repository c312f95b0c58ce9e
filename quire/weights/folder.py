"""From the name of a model to its folder, and from a folder to its JSON files.

Imports neither torch nor, until a hub name must be looked up, anything from outside the standard
library: the command line fails on a wrong name before it has loaded anything heavy. Never executes
anything that a folder holds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quire.common.small_files import exists, is_file, is_folder, read_object, read_optional_object
from quire.config.paths import is_possible
from quire.errors import ModelNotFoundError

logger = logging.getLogger(__name__)

SHIPPED_MODELS = ("quire-storyteller", "quire-embedder", "quire-viewer")
_ASSETS = Path(__file__).parent.parent / "assets"
_MAX_JSON_BYTES = 16 << 20
MODULES_NAME = "modules.json"
_MAX_SHOWN_CHARS = 80
_PROBE_TIMEOUT_S = 1.0
_HUB_NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}(/[A-Za-z0-9_][\w.-]{0,95})?", re.ASCII)
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "vocab.txt", "merges.txt"]


def resolve_model(
    name: str, *, revision: str | None = None, download_dir: str | None = None
) -> Path:
    """Return the folder of a model: a local folder, a model that ships in the package, or a hub
    name (downloaded if need be).

    `revision` (a branch, tag or commit) and `download_dir` are for hub names; a folder is taken as
    it is.

    Raises ModelNotFoundError, without a network within two seconds.
    """
    path = local_path(name)
    if revision is not None and (is_folder(path) or name in SHIPPED_MODELS):
        logger.warning(
            "revision=%r has no effect: model=%r is a folder, which has one state", revision, name
        )
    if is_folder(path):
        return path
    if is_file(path):
        raise ModelNotFoundError(
            f"model={name!r} is a file; give the folder that holds config.json and the weights"
        )
    if name in SHIPPED_MODELS:
        if not (_ASSETS / name).is_dir():
            raise ModelNotFoundError(
                f"model={name!r} ships with Quire, but {_ASSETS / name} is missing"
            )
        return _ASSETS / name
    if not _HUB_NAME.fullmatch(name) or ".." in name or "--" in name:
        raise ModelNotFoundError(
            f"model={name!r}: no such folder, and not a hub name either; {_CHOICES}"
        )
    return _resolve_hub_name(name, revision, download_dir)


def local_path(name: str) -> Path:
    """Return the path that a model's name would be. Raises ModelNotFoundError for what can be
    none."""
    if not name or not is_possible(name):
        raise ModelNotFoundError(
            f"model={name[:_MAX_SHOWN_CHARS]!r}: no file has such a name, or so long a one; "
            f"{_CHOICES}"
        )
    try:
        return Path(name).expanduser()
    except RuntimeError:  # of a user whose home is not known
        return Path(name)


def has_modules(folder: Path) -> bool:
    """Return whether a folder has the layout of sentence-transformers."""
    return exists(folder / MODULES_NAME)


def read_model_config(folder: Path) -> dict[str, object]:
    """Return the parsed `config.json` of a folder (or a config file itself).

    Raises ModelNotFoundError without one, CheckpointError if it is malformed.
    """
    path = folder if folder.suffix == ".json" and is_file(folder) else folder / "config.json"
    if not is_file(path):
        raise ModelNotFoundError(
            f"{folder} has no config.json; a model folder holds one, and .safetensors files"
        )
    return read_object(path, _MAX_JSON_BYTES)


def read_generation_config(folder: Path) -> dict[str, object]:
    """Return the parsed `generation_config.json`, or an empty dict where there is none."""
    return read_optional_object(folder / "generation_config.json", _MAX_JSON_BYTES)


def read_preprocessor_config(folder: Path) -> dict[str, object] | None:
    """Return the settings of the model's image processor: those of `preprocessor_config.json`, in
    newer folders a section of `processor_config.json`. None where there are none."""
    path = folder / "preprocessor_config.json"
    if exists(path):
        return read_object(path, _MAX_JSON_BYTES)
    path = folder / "processor_config.json"
    found = read_optional_object(path, _MAX_JSON_BYTES).get("image_processor")
    return found if isinstance(found, dict) else None


_CHOICES = (
    f"give a model folder, a Hugging Face name (owner/name), or {' or '.join(SHIPPED_MODELS)}"
)


def _resolve_hub_name(name: str, revision: str | None, download_dir: str | None) -> Path:
    """Return a download, or what the local cache has where the hub is not reachable."""
    wanted: dict[str, Any] = {
        "revision": revision,
        "cache_dir": download_dir,
        "allow_patterns": _HUB_FILES,
    }
    probe = _HubProbe()  # first, so that it waits while the library is imported
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise ModelNotFoundError(
            f"model={name!r}: no such folder (and huggingface_hub is not installed)"
        ) from error
    cached = None
    with contextlib.suppress(LocalEntryNotFoundError, OSError, ValueError):
        cached = Path(snapshot_download(name, local_files_only=True, **wanted))
    if not probe.is_reachable():
        if cached is not None:
            return cached
        raise ModelNotFoundError(
            f"model={name!r}: no such folder, not in the cache, and the hub is not reachable"
        )
    try:
        return Path(snapshot_download(name, ignore_patterns=["*/*"], etag_timeout=2, **wanted))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        if cached is not None:
            return cached
        reason = str(error).strip().splitlines()[0]
        raise ModelNotFoundError(
            f"model={name!r}: no such folder, and the hub does not give it: {reason}"
        ) from error


class _HubProbe:
    """Whether a connection to the hub (or to the proxy before it)
    opens within `_PROBE_TIMEOUT_S` of construction."""

    def __init__(self) -> None:
        self._opened = threading.Event()
        self._deadline = time.monotonic() + _PROBE_TIMEOUT_S
        # A thread, because resolving a host name takes no timeout.
        self._thread = threading.Thread(target=self._connect, daemon=True)
        self._thread.start()

    def is_reachable(self) -> bool:
        """Wait for the answer, at most until the deadline."""
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        return self._opened.is_set()

    def _connect(self) -> None:
        if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
            return
        hub = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
        with contextlib.suppress(OSError, ValueError):
            url = urlsplit(os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy") or hub)
            address = (url.hostname or "", url.port or (80 if url.scheme == "http" else 443))
            socket.create_connection(address, timeout=_PROBE_TIMEOUT_S).close()
            self._opened.set()
