"""What /v1/files and /v1/batches keep: each tenant's records and contents, readable after a
restart.

Owns the layout, the names and the account of every byte: `<tenant>/files/<id>.json` beside
`<id>.data`, and `<tenant>/batches/<id>.json`. Ids are made here and matched against a pattern
before they touch a path, and a tenant's name has no separators, so nothing outside the folder can
be named. A tenant's share of the disk is taken before anything is written and given back where that
fails. Blocking: call it in a thread; safe in several at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec

from quire.server.api.openai.data_folder import DataFolder, storage_failed
from quire.server.api.openai.listing import FileListing, Listing
from quire.server.api.openai.record_index import RecordIndex
from quire.server.http.errors import ApiError, bad_request
from quire.server.quota.ledger import Ledger

logger = logging.getLogger(__name__)

Kind = Literal["file", "batch"]
_FOLDERS: dict[Kind, str] = {"file": "files", "batch": "batches"}
_PREFIXES: dict[Kind, str] = {"file": "file-", "batch": "batch_"}
_TAGS: dict[Kind, str] = {"file": "purpose", "batch": "status"}
"""What lists are narrowed by."""
_ID = re.compile(r"(?:file-|batch_)[0-9a-f]{24}\Z")
MAX_RECORDS = 10_000
"""Of one kind and tenant."""
MAX_RECORD_BYTES = 1 << 18
"""Of one record: what its fields may hold, several times over."""
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
"""Statuses of batches that change no more."""
RESULTS = ("output", "error")
"""Kinds of results; a record names the file of each, `_output_file_id` say,
before that is registered."""

Record = dict[str, Any]


class _RecordHead(msgspec.Struct):
    """Of a record, what the index and the account need."""

    id: str
    number: int = msgspec.field(name="_number", default=0)
    created_at: int = 0
    purpose: str = ""
    status: str = ""
    output_file_id: str = msgspec.field(name="_output_file_id", default="")
    error_file_id: str = msgspec.field(name="_error_file_id", default="")


@dataclass(slots=True)
class _TenantRecords:
    """What is known of one tenant's records."""

    indexes: dict[Kind, RecordIndex] = field(
        default_factory=lambda: {"file": RecordIndex(), "batch": RecordIndex()}
    )


class FileStore:
    """Records (JSON objects with an id) and contents of one server."""

    def __init__(self, folder: DataFolder, max_bytes: int = 1 << 62) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.RLock()
        """Of what is in memory, and of looking at a tenant's folder for the first time."""
        self._tenants: dict[str, _TenantRecords] = {}
        self.ledger: Ledger[str, str] = Ledger()
        """By tenant and file name."""

    def close(self) -> None:
        """Leave the folder to other servers."""
        self._folder.close()

    # -- records
    # ----------------------------------------------------------------------------------------------

    def add(self, tenant: str, kind: Kind, record: Record) -> Record:
        """Keep a new record; the same with its id. Raises ApiError 400 where the tenant has
        too many, or no room left."""
        return self._enter(tenant, kind, new_id(kind), record, is_bounded=True)

    def put(self, tenant: str, kind: Kind, record: Record) -> None:
        """Replace a record. This is never refused for want of a tenant's room:
        what happens is to be known."""
        index = self._index(tenant, kind)
        self._write(tenant, kind, record, is_bounded=False)
        with self._lock:
            if record["id"] in index:
                index.set_tag(record["id"], record[_TAGS[kind]])
            else:  # the folder was replaced meanwhile
                index.add(record["id"], record[_TAGS[kind]])

    def get(self, tenant: str, kind: Kind, record_id: str) -> Record:
        """Return a record. Raises ApiError 404."""
        path = self._path(tenant, kind, record_id, "json")
        record = self._read(path) if record_id in self._index(tenant, kind) else None
        if record is None:
            raise _missing(kind, record_id)
        return record

    def page(
        self, tenant: str, kind: Kind, query: Listing | FileListing
    ) -> tuple[list[Record], bool]:
        """Return a part of the records, and whether there are more; no others are read.
        Raises ApiError 400."""
        index = self._index(tenant, kind)
        tag = query.purpose if isinstance(query, FileListing) else ""
        with self._lock:
            try:
                ids, has_more = index.page(
                    query.after, query.limit, is_ascending=query.order == "asc", tag=tag
                )
            except KeyError:
                raise bad_request(
                    f"after: there is no {kind} {query.after!r}", param="after"
                ) from None
        records = (self._read(self._path(tenant, kind, record_id, "json")) for record_id in ids)
        return [record for record in records if record is not None], has_more

    def delete(self, tenant: str, kind: Kind, record_id: str) -> None:
        """Remove a record with its content: a file's, or results of a batch that are no files.
        Raises ApiError 404."""
        record, files = self.get(tenant, kind, record_id), self._index(tenant, "file")
        results = [record.get(f"_{each}_file_id") or "" for each in RESULTS]
        for file_id in (
            [record_id]
            if kind == "file"
            else [each for each in results if each and each not in files]
        ):
            self._remove(tenant, self._path(tenant, "file", file_id, "data"))
        self._remove(tenant, self._path(tenant, kind, record_id, "json"))
        with self._lock:
            self._index(tenant, kind).drop(record_id)

    def unended(self, tenant: str) -> list[str]:
        """Return ids of the batches that have not ended, oldest first."""
        return self._index(tenant, "batch").ids(without=ENDED)

    def tenants(self) -> list[str]:
        """Return whose records there are. Raises ApiError 507."""
        try:
            return sorted(path.name for path in self._folder.root.iterdir() if path.is_dir())
        except OSError as error:
            raise storage_failed(error) from error

    # -- contents
    # ----------------------------------------------------------------------------------------------

    def check_room(self, tenant: str) -> None:
        """Raise what `add_file` would raise of any file, however small."""
        self._check_number(tenant, "file")
        with self._booked(tenant, "", 1):
            pass

    def add_file(self, tenant: str, name: str, source: BinaryIO) -> Record:
        """Return a new file with the content of `source`. Raises ApiError 400 where the
        tenant has no room for it."""
        self._check_number(tenant, "file")
        file_id = new_id("file")
        path = self._path(tenant, "file", file_id, "data")
        num_bytes = source.seek(0, os.SEEK_END)
        source.seek(0)
        with self._booked(tenant, path.name, num_bytes):
            self._folder.copy(path, source)
        try:
            return self._enter(
                tenant, "file", file_id, _file_record(name, num_bytes, "batch"), is_bounded=True
            )
        except BaseException:
            with contextlib.suppress(ApiError):
                self._remove(tenant, path)
            raise

    def register_results(self, tenant: str, file_id: str, name: str) -> bool:
        """Make a file of what was appended under an id, whatever room is left;
        False where that is nothing."""
        num_bytes = self.size(tenant, file_id)
        if num_bytes and file_id not in self._index(tenant, "file"):
            self._enter(
                tenant,
                "file",
                file_id,
                _file_record(name, num_bytes, "batch_output"),
                is_bounded=False,
            )
        return num_bytes > 0

    def open_file(self, tenant: str, file_id: str) -> BinaryIO:
        """Return a file's content. Raises ApiError 404, also where only the record is left."""
        self.get(tenant, "file", file_id)
        return self.open_content(tenant, file_id)

    def open_content(self, tenant: str, file_id: str) -> BinaryIO:
        """Return what lies under an id, whether it is a file yet or not. Raises ApiError 404."""
        try:
            return self._path(tenant, "file", file_id, "data").open("rb")
        except FileNotFoundError:
            raise _missing("file", file_id) from None
        except OSError as error:
            raise storage_failed(error) from error

    def append(self, tenant: str, file_id: str, data: bytes) -> None:
        """Add to what lies under an id, all of it or nothing.
        Raises ApiError 400 where the tenant has no room."""
        path = self._path(tenant, "file", file_id, "data")
        known_size = self.size(tenant, file_id)
        with self._booked(tenant, path.name, known_size + len(data)):
            self._folder.append(path, data, known_size)

    def cut(self, tenant: str, file_id: str, num_bytes: int) -> None:
        """Drop what lies behind the first so many bytes."""
        if self.size(tenant, file_id) > num_bytes:
            path = self._path(tenant, "file", file_id, "data")
            self._folder.truncate(path, num_bytes)
            with self._lock:
                self.ledger.put(tenant, path.name, num_bytes)

    def size(self, tenant: str, file_id: str) -> int:
        """Return bytes that lie under an id."""
        self._index(tenant, "file")
        return self.ledger.size(tenant, f"{file_id}.data") or 0

    # -- inside
    # ----------------------------------------------------------------------------------------------

    def _index(self, tenant: str, kind: Kind) -> RecordIndex:
        """Return a tenant's records, which are looked for when they are first needed.
        Raises ApiError 507."""
        with self._lock:
            if self._folder.is_another():
                self._tenants.clear()
                for owner in list(self.ledger.owners()):
                    self.ledger.drop_owner(owner)
            if tenant not in self._tenants:
                try:
                    self._tenants[tenant] = self._look_into(tenant)
                except OSError as error:
                    self.ledger.drop_owner(tenant)
                    raise storage_failed(error) from error
            return self._tenants[tenant].indexes[kind]

    def _look_into(self, tenant: str) -> _TenantRecords:
        """Enter what there is, and remove what a server that broke off has left behind."""
        found = _TenantRecords()
        contents, wanted = set(), set()
        for kind, index in found.indexes.items():
            heads: list[_RecordHead] = []
            for entry in list(os.scandir(self._folder.folder(tenant, _FOLDERS[kind]))):
                if entry.name.endswith(".tmp"):
                    self._folder.remove(Path(entry.path))
                    continue
                self.ledger.put(tenant, entry.name, entry.stat().st_size)
                if entry.name.endswith(".data"):
                    contents.add(entry.name.removesuffix(".data"))
                elif (head := _head(Path(entry.path))) is not None:
                    heads.append(head)
            for head in sorted(heads, key=lambda each: (each.number, each.created_at, each.id)):
                index.add(head.id, head.purpose if kind == "file" else head.status, head.number)
                wanted |= {head.id} if kind == "file" else {head.output_file_id, head.error_file_id}
        for orphan in contents - wanted:
            self._remove(tenant, self._path(tenant, "file", orphan, "data"))
        return found

    def _check_number(self, tenant: str, kind: Kind) -> None:
        if len(self._index(tenant, kind)) >= MAX_RECORDS:
            raise bad_request(
                f"there are {MAX_RECORDS} {_FOLDERS[kind]} already; delete some",
                code="too_many_records",
            )

    def _enter(
        self, tenant: str, kind: Kind, record_id: str, record: Record, *, is_bounded: bool
    ) -> Record:
        with self._lock:
            index = self._index(tenant, kind)
            if is_bounded:
                self._check_number(tenant, kind)
            record = {
                "id": record_id,
                **record,
                "_number": index.add(record_id, record[_TAGS[kind]]),
            }
        try:
            self._write(tenant, kind, record, is_bounded=is_bounded)
        except BaseException:
            with self._lock:
                index.drop(record_id)
            raise
        return record

    def _write(self, tenant: str, kind: Kind, record: Record, *, is_bounded: bool) -> None:
        data = msgspec.json.encode(record)
        path = self._path(tenant, kind, record["id"], "json")
        with self._booked(tenant, path.name, len(data), is_bounded=is_bounded):
            self._folder.replace(path, data)

    @contextmanager
    def _booked(
        self, tenant: str, name: str, num_bytes: int, *, is_bounded: bool = True
    ) -> Iterator[None]:
        """Take room for a file that becomes so large in the block; where that fails,
        all is as before. Raises ApiError 400."""
        with self._lock:
            before = self.ledger.size(tenant, name)
            held_bytes = self.ledger.bytes_of(tenant) - (before or 0)
            if is_bounded and held_bytes + num_bytes > self._max_bytes:
                raise bad_request(
                    f"the files kept here have {held_bytes} bytes already, and at most "
                    f"{self._max_bytes} are kept; delete some",
                    param="file",
                    code="too_many_bytes",
                )
            self.ledger.put(tenant, name, num_bytes)
        try:
            yield
        except BaseException:
            with self._lock:
                if before is None:
                    self.ledger.drop(tenant, name)
                else:
                    self.ledger.put(tenant, name, before)
            raise

    def _remove(self, tenant: str, path: Path) -> None:
        self._folder.remove(path)
        with self._lock:
            self.ledger.drop(tenant, path.name)

    def _read(self, path: Path) -> Record | None:
        """Return a record, or None where it is gone or no record."""
        try:
            record = msgspec.json.decode(path.read_bytes())
        except (FileNotFoundError, msgspec.DecodeError):
            return None
        except OSError as error:
            raise storage_failed(error) from error
        return record if isinstance(record, dict) else None

    def _path(self, tenant: str, kind: Kind, record_id: str, suffix: str) -> Path:
        if not _ID.match(record_id) or not record_id.startswith(_PREFIXES[kind]):
            raise _missing(kind, record_id)
        return self._folder.folder(tenant, _FOLDERS[kind]) / f"{record_id}.{suffix}"


def new_id(kind: Kind) -> str:
    """Return an unused id."""
    return f"{_PREFIXES[kind]}{secrets.token_hex(12)}"


def public(record: Record) -> Record:
    """Return a record without what is for this server alone."""
    return {name: value for name, value in record.items() if not name.startswith("_")}


def _file_record(name: str, num_bytes: int, purpose: str) -> Record:
    return {
        "object": "file",
        "bytes": num_bytes,
        "created_at": int(time.time()),
        "filename": Path(name).name[:255] or "file",
        "purpose": purpose,
        "status": "processed",
    }


def _head(path: Path) -> _RecordHead | None:
    """Read the head of a record in the folder; None, and a line in the log, where it is none of
    ours."""
    try:
        if path.stat().st_size <= MAX_RECORD_BYTES and _ID.match(path.stem):
            head = msgspec.json.decode(path.read_bytes(), type=_RecordHead)
            if head.id == path.stem:
                return head
    except (FileNotFoundError, msgspec.DecodeError):
        pass
    logger.warning("%s in the data folder is no record, and is left out", path.name)
    return None


def _missing(kind: Kind, record_id: str) -> ApiError:
    return ApiError(404, f"there is no {kind} {record_id[:80]!r}", param="id")
