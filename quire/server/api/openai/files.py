"""/v1/files: uploads for batches, and the batches' results."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import IO

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from quire.server.api.openai.data_folder import storage_failed
from quire.server.api.openai.file_store import FileStore, Record, public
from quire.server.api.openai.listing import FileListing, list_object
from quire.server.http.body import too_large
from quire.server.http.call import call_of
from quire.server.http.errors import ApiError, bad_request, overloaded, unavailable_feature
from quire.server.http.query import query_of
from quire.server.http.responses import json_response
from quire.server.quota.ledger import Ledger
from quire.server.state import Api

KEPT = "files are kept until they are deleted"
_CHUNK_BYTES = 1 << 20
_MIN_UPLOAD_RATE = 64 << 10
"""Bytes a second that an upload must keep up with on average."""
_MAX_FIELD_BYTES = 4096
_MAX_UPLOADS_OF_ONE = 4
"""Largest files of one tenant that may be on their way at once:
each waits on the disk until it is complete."""
_MAX_UPLOADS = 16


class Files:
    """The endpoints. Without a data folder, all of them say so."""

    def __init__(self, api: Api, store: FileStore | None) -> None:
        self._api = api
        self._store = store
        self._uploads: Ledger[str, object] = Ledger()
        """On their way, by tenant."""

    @property
    def store(self) -> FileStore:
        """The folder. Raises ApiError 400 where the operator gave none."""
        if self._store is None:
            raise bad_request(
                "files and batches are off on this server; its operator can set data_folder",
                code="files_off",
            )
        return self._store

    async def post(self, request: Request) -> Response:
        """Take an upload (multipart/form-data with `file` and `purpose`)."""
        call, store = call_of(request), self.store
        content_type = request.headers.get("content-type", "").lower()
        if not content_type.startswith("multipart/form-data"):
            raise ApiError(
                415, "a file is uploaded as multipart/form-data", code="unsupported_media_type"
            )
        await asyncio.to_thread(store.check_room, call.tenant.name)
        with self._room_for_upload(request):
            return json_response(call, public(await self._take(request, store)))

    async def _take(self, request: Request, store: FileStore) -> Record:
        call, config = call_of(request), self._api.config
        timeout_s = config.body_timeout_s + config.max_file_bytes / _MIN_UPLOAD_RATE
        bounded = Request(
            request.scope, _counted(request.receive, config.max_file_bytes + (64 << 10))
        )
        try:
            async with (
                asyncio.timeout(timeout_s),
                bounded.form(max_files=1, max_fields=8, max_part_size=_MAX_FIELD_BYTES) as form,
            ):
                upload, purpose = form.get("file"), form.get("purpose")
                call.ignore([name for name in form if name not in ("file", "purpose")], KEPT)
                if not isinstance(upload, UploadFile):
                    raise bad_request("file: it is missing", param="file")
                if purpose != "batch":
                    raise unavailable_feature(
                        "purpose", "only files for batches are kept here; give purpose='batch'"
                    )
                name, source = upload.filename or "file", upload.file
                return await asyncio.to_thread(store.add_file, call.tenant.name, name, source)
        except TimeoutError:
            raise ApiError(
                408,
                "the upload took too long",
                code="body_timeout",
                headers={"connection": "close"},
            ) from None
        except HTTPException as error:
            raise bad_request(f"the form is invalid: {error.detail}", code="invalid_form") from None
        except UnicodeError:  # its `charset` may be any of Python's
            raise bad_request(
                "the form is invalid: its texts are not UTF-8", code="invalid_form"
            ) from None
        except ClientDisconnect:
            raise ApiError(499, "the client went away") from None
        except OSError as error:  # a large upload waits in a temporary file
            raise storage_failed(error) from None

    @contextmanager
    def _room_for_upload(self, request: Request) -> Iterator[None]:
        """Count what an upload says that it brings, or may bring at most. Raises ApiError 429."""
        tenant, largest, name = (
            call_of(request).tenant.name,
            self._api.config.max_file_bytes,
            object(),
        )
        declared = request.headers.get("content-length", "")
        num_bytes = (
            min(largest, int(declared)) if declared.isascii() and declared.isdigit() else largest
        )
        if (
            self._uploads.bytes_of(tenant) + num_bytes > _MAX_UPLOADS_OF_ONE * largest
            or self._uploads.num_bytes + num_bytes > _MAX_UPLOADS * largest
        ):
            raise overloaded(
                "too many uploads are on their way; try again later",
                code="too_many_uploads",
                retry_after_s=5,
            )
        self._uploads.put(tenant, name, num_bytes)
        try:
            yield
        finally:
            self._uploads.drop(tenant, name)

    async def list(self, request: Request) -> Response:
        """Return all files, newest first."""
        call, store, query = call_of(request), self.store, query_of(request, FileListing)
        records, has_more = await asyncio.to_thread(store.page, call.tenant.name, "file", query)
        return json_response(
            call, list_object([public(record) for record in records], has_more=has_more)
        )

    async def get(self, request: Request) -> Response:
        """Return a file's record."""
        call, store, file_id = call_of(request), self.store, request.path_params["file_id"]
        return json_response(
            call, public(await asyncio.to_thread(store.get, call.tenant.name, "file", file_id))
        )

    async def content(self, request: Request) -> Response:
        """Return a file's bytes."""
        call, store, file_id = call_of(request), self.store, request.path_params["file_id"]
        source = await asyncio.to_thread(store.open_file, call.tenant.name, file_id)
        return _FileResponse(source, os.fstat(source.fileno()).st_size)

    async def delete(self, request: Request) -> Response:
        """Remove a file."""
        call, store, file_id = call_of(request), self.store, request.path_params["file_id"]
        await asyncio.to_thread(store.delete, call.tenant.name, "file", file_id)
        return json_response(call, {"id": file_id, "object": "file", "deleted": True})


class _FileResponse(Response):
    """A file's bytes in pieces."""

    def __init__(self, source: IO[bytes], size: int) -> None:
        super().__init__()
        self._source = source
        self._size = size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        own = [
            (b"content-type", b"application/octet-stream"),
            (b"content-length", str(self._size).encode()),
        ]
        headers = [*(each for each in self.raw_headers if each[0] != b"content-length"), *own]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for chunk in self._chunks():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._source.close()

    async def _chunks(self) -> AsyncIterator[bytes]:
        left = self._size
        while left:
            chunk = await asyncio.to_thread(self._source.read, min(_CHUNK_BYTES, left))
            if not chunk:
                return
            left -= len(chunk)
            yield chunk


def _counted(receive: Receive, max_bytes: int) -> Receive:
    """Return the same body, up to a number of bytes."""
    num_bytes = 0

    async def receive_counted() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > max_bytes:
            raise too_large(max_bytes)
        return message

    return receive_counted
