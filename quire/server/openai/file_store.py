"""The folder behind /v1/files and /v1/batches: each tenant's records and contents, readable after a restart.

Owns the layout and the names: `<tenant>/files/<id>.json` beside `<id>.data`, `<tenant>/batches/<id>.json`. Ids are made here
and matched against a pattern before they touch a path, and a tenant's name has no separators, so nothing outside the folder
can be named. Records are replaced whole, by a rename. Blocking: call it in a thread.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec

from quire.errors import ConfigError
from quire.server.errors import ApiError, bad_request, useless_to_retry

logger = logging.getLogger(__name__)

Kind = Literal["file", "batch"]
_FOLDERS: dict[Kind, str] = {"file": "files", "batch": "batches"}
_PREFIXES: dict[Kind, str] = {"file": "file-", "batch": "batch_"}
_ID = re.compile(r"(?:file-|batch_)[0-9a-f]{24}\Z")
MAX_RECORDS = 10_000
"""Of one kind and tenant."""


class FileStore:
    """Records (JSON objects with an id) and contents of one server."""

    def __init__(self, root: str | Path, max_bytes: int = 1 << 62) -> None:
        self._root = Path(root)
        self._max_bytes = max_bytes
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"data_folder: it cannot be made: {error.strerror}") from None
        if not os.access(self._root, os.R_OK | os.W_OK | os.X_OK):
            raise ConfigError("data_folder: it cannot be written; choose another")

    def new_id(self, tenant: str, kind: Kind) -> str:
        """An unused id. Raises ApiError 400 where the tenant has too many."""
        if sum(1 for _ in self._folder(tenant, kind).glob("*.json")) >= MAX_RECORDS:
            raise bad_request(f"there are {MAX_RECORDS} {_FOLDERS[kind]} already; delete some", code="too_many_records")
        return f"{_PREFIXES[kind]}{secrets.token_hex(12)}"

    def put(self, tenant: str, kind: Kind, record: dict[str, Any]) -> None:
        """Write a record, or replace it."""
        path = self._path(tenant, kind, record["id"], "json")
        temporary = path.with_suffix(f".{secrets.token_hex(4)}.tmp")
        with _all_or_nothing(temporary):
            temporary.write_bytes(msgspec.json.encode(record))
            temporary.replace(path)

    def get(self, tenant: str, kind: Kind, record_id: str) -> dict[str, Any]:
        """A record. Raises ApiError 404."""
        try:
            record = msgspec.json.decode(self._path(tenant, kind, record_id, "json").read_bytes())
        except (OSError, msgspec.DecodeError):
            record = None
        if not isinstance(record, dict):
            raise _missing(kind, record_id)
        return record

    def records(self, tenant: str, kind: Kind) -> list[dict[str, Any]]:
        """All records, newest first; unreadable ones are left out."""
        records = []
        for path in self._folder(tenant, kind).glob("*.json"):
            try:
                records.append(self.get(tenant, kind, path.stem))
            except ApiError:
                continue
        return sorted(records, key=lambda record: (record.get("created_at", 0), record["id"]), reverse=True)

    def tenants(self) -> list[str]:
        """Whose records there are."""
        return sorted(path.name for path in self._root.iterdir() if path.is_dir())

    def add_file(self, tenant: str, name: str, source: BinaryIO | None = None) -> dict[str, Any]:
        """A new file with the content of `source`; without one it is written later, through `content_path`."""
        self._check_room(tenant, source)
        file_id = self.new_id(tenant, "file")
        path = self.content_path(tenant, file_id)
        with _all_or_nothing(path):
            with path.open("wb") as target:
                if source is not None:
                    shutil.copyfileobj(source, target, 1 << 20)
            return self.register_file(tenant, file_id, name)

    def open_file(self, tenant: str, file_id: str) -> BinaryIO:
        """A file's content. Raises ApiError 404, also where only the record is left."""
        self.get(tenant, "file", file_id)
        try:
            return self.content_path(tenant, file_id).open("rb")
        except OSError:
            raise _missing("file", file_id) from None

    def register_file(self, tenant: str, file_id: str, name: str, purpose: str = "batch") -> dict[str, Any]:
        """The record of a file whose content is there."""
        record = {
            "id": file_id,
            "object": "file",
            "bytes": self.content_path(tenant, file_id).stat().st_size,
            "created_at": int(time.time()),
            "filename": Path(name).name[:255] or "file",
            "purpose": purpose,
            "status": "processed",
        }
        self.put(tenant, "file", record)
        return record

    def content_path(self, tenant: str, file_id: str) -> Path:
        """Where a file's content lies."""
        return self._path(tenant, "file", file_id, "data")

    def delete_file(self, tenant: str, file_id: str) -> None:
        """Remove a file. Raises ApiError 404."""
        self.get(tenant, "file", file_id)
        self._path(tenant, "file", file_id, "json").unlink(missing_ok=True)
        self.content_path(tenant, file_id).unlink(missing_ok=True)

    def lines(self, tenant: str, file_id: str, max_len: int) -> Iterator[bytes]:
        """A file's lines that are not blank, each cut after `max_len` bytes (and then too long to be valid)."""
        with self.content_path(tenant, file_id).open("rb") as source:
            while line := source.readline(max_len + 1):
                if line.strip():
                    yield line

    def _check_room(self, tenant: str, source: BinaryIO | None) -> None:
        """Refuse what would take a tenant beyond its share of the disk."""
        new_bytes = 0 if source is None else source.seek(0, os.SEEK_END)
        if source is not None:
            source.seek(0)
        held_bytes = sum(path.stat().st_size for path in self._folder(tenant, "file").glob("*.data"))
        if held_bytes + new_bytes > self._max_bytes:
            raise bad_request(
                f"the files kept here have {held_bytes} bytes already, and at most {self._max_bytes} are kept; delete some",
                param="file",
                code="too_many_bytes",
            )

    def _folder(self, tenant: str, kind: Kind) -> Path:
        folder = self._root
        for part in (tenant, _FOLDERS[kind]):
            folder = folder / part
            with _all_or_nothing(None):
                folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def _path(self, tenant: str, kind: Kind, record_id: str, suffix: str) -> Path:
        if not _ID.match(record_id) or not record_id.startswith(_PREFIXES[kind]):
            raise _missing(kind, record_id)
        return self._folder(tenant, kind) / f"{record_id}.{suffix}"


@contextmanager
def _all_or_nothing(path: Path | None) -> Iterator[None]:
    """What writes a file, whole or not at all. Raises ApiError 507 where the disk takes nothing."""
    try:
        yield
    except BaseException as error:
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise storage_failed(error) from error
        raise


def storage_failed(error: OSError) -> ApiError:
    """507 for a disk that is full or may not be written: the operator's affair, and useless to repeat at once."""
    logger.error("the data folder cannot be written: %s", errno.errorcode.get(error.errno or 0, type(error).__name__))
    return useless_to_retry(
        ApiError(507, "the server cannot store this now: its disk is full or read-only", code="storage_failed")
    )


def _missing(kind: Kind, record_id: str) -> ApiError:
    return ApiError(404, f"there is no {kind} {record_id[:80]!r}", param="id")
