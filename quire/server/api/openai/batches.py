"""/v1/batches: the requests of a file, run in the background, their answers written to another
file.

A batch's record and results lie in the data folder, and each answer is appended as it comes, so a
server that starts again goes on where it was: lines whose `custom_id` has an answer are not run
again. So many batches run at once, the others wait; `batch_job.py` has what becomes of one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.common.failures import log_failure
from quire.server.api.openai.batch_job import BatchJob, Surroundings
from quire.server.api.openai.batch_lines import BatchLines, Runner
from quire.server.api.openai.data_folder import STORAGE_FAILED
from quire.server.api.openai.fields import Metadata, asks_for_something
from quire.server.api.openai.file_store import RESULTS, FileStore, Record, new_id, public
from quire.server.api.openai.files import KEPT, Files
from quire.server.api.openai.listing import Listing, list_object
from quire.server.http.body import read_json
from quire.server.http.call import Call, call_of
from quire.server.http.errors import ApiError, bad_request, overloaded
from quire.server.http.query import query_of
from quire.server.http.responses import json_response
from quire.server.quota.tenants import Tenant
from quire.server.quota.turns import Turns
from quire.server.state import Api

logger = logging.getLogger(__name__)

MAX_UNENDED = 1000
"""Batches of one tenant that run or wait."""
_LIFE_S = 24 * 3600
_LAST_WRITE_S = 5.0
"""How long deleting a batch that has ended waits until that is on the disk."""


class BatchRequest(msgspec.Struct, kw_only=True):
    """The body."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: Any = None


class Batches:
    """The endpoints, and those batches that have not ended."""

    def __init__(self, api: Api, files: Files, runners: Mapping[str, Runner]) -> None:
        self._api = api
        self._files = files
        self._lines = BatchLines(api, runners)
        self._places = Turns(api.config.max_running_batches)
        self._judging = asyncio.Lock()
        self._jobs: dict[str, BatchJob] = {}
        self._resuming: asyncio.Task[None] | None = None

    async def post(self, request: Request) -> Response:
        """Begin a batch."""
        call, store = call_of(request), self._files.store
        body = await read_json(request, BatchRequest, is_strict=self._api.config.strict_fields)
        if body.endpoint not in self._lines.endpoints:
            raise bad_request(
                f"endpoint: batches can use {', '.join(self._lines.endpoints)}", param="endpoint"
            )
        if asks_for_something(body.output_expires_after):
            call.ignore(["output_expires_after"], KEPT)
        self._check_number(call.tenant)
        await self._check_input(store, call.tenant, body.input_file_id)
        now = int(time.time())
        record: Record = {
            "object": "batch",
            "endpoint": body.endpoint,
            "input_file_id": body.input_file_id,
            "completion_window": body.completion_window,
            "status": "validating",
            "created_at": now,
            "expires_at": now + _LIFE_S,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": body.metadata,
            **{f"_{kind}_file_id": new_id("file") for kind in RESULTS},
        }
        record = await asyncio.to_thread(store.add, call.tenant.name, "batch", record)
        self._begin(call.tenant, record["id"], _LIFE_S)
        return json_response(call, public(record))

    async def list(self, request: Request) -> Response:
        """Batches, newest first."""
        call, store, query = call_of(request), self._files.store, query_of(request, Listing)
        records, has_more = await asyncio.to_thread(store.page, call.tenant.name, "batch", query)
        shown = [self._current(record) for record in records]
        return json_response(
            call, list_object([public(record) for record in shown], has_more=has_more)
        )

    async def get(self, request: Request) -> Response:
        """Return a batch as it is now."""
        call = call_of(request)
        return json_response(call, public(await self._find(call, request.path_params["batch_id"])))

    async def cancel(self, request: Request) -> Response:
        """End a batch; what was answered so far stays."""
        call, batch_id = call_of(request), request.path_params["batch_id"]
        record = await self._find(call, batch_id)
        job = self._jobs.get(batch_id)
        return json_response(call, public(record if job is None else await job.cancel()))

    async def delete(self, request: Request) -> Response:
        """Remove the record of a batch that has ended; the files of its results stay."""
        call, batch_id = call_of(request), request.path_params["batch_id"]
        record, job = await self._find(call, batch_id), self._jobs.get(batch_id)
        if job is not None and not await job.is_over(_LAST_WRITE_S):
            message = f"the batch has not ended (it is {record['status']}); cancel it first"
            raise ApiError(409, message, param="batch_id", code="batch_not_ended")
        await asyncio.to_thread(self._files.store.delete, call.tenant.name, "batch", batch_id)
        return json_response(call, {"id": batch_id, "object": "batch", "deleted": True})

    def resume(self) -> None:
        """Go on with what an earlier server left unfinished.
        Batches of tenants that are gone stay as they are."""
        self._resuming = asyncio.get_running_loop().create_task(self._resume())

    async def close(self) -> None:
        """Stop; unfinished batches are left for the next server."""
        if self._resuming is not None:
            self._resuming.cancel()
            await asyncio.wait([self._resuming])
        await asyncio.gather(*(job.close() for job in list(self._jobs.values())))

    async def _resume(self) -> None:
        store = self._files.store
        try:
            for name in await asyncio.to_thread(store.tenants):
                tenant = self._api.admission.tenants.get(name)
                if tenant is not None:
                    await self._resume_tenant(store, tenant)
        except ApiError as error:
            log_failure(logger, "batches of an earlier server cannot be resumed", error)

    async def _resume_tenant(self, store: FileStore, tenant: Tenant) -> None:
        for batch_id in await asyncio.to_thread(store.unended, tenant.name):
            try:
                record = await asyncio.to_thread(store.get, tenant.name, "batch", batch_id)
            except ApiError as error:
                if error.code == STORAGE_FAILED:
                    raise
                continue  # deleted meanwhile, which is nothing to those behind it
            if batch_id not in self._jobs:
                # The clock may have been set meanwhile, in either direction.
                self._begin(
                    tenant,
                    batch_id,
                    min(_LIFE_S, max(0.0, record.get("expires_at", 0) - time.time())),
                )

    def _begin(self, tenant: Tenant, batch_id: str, left_s: float) -> None:
        shared = Surroundings(
            self._files.store,
            self._lines,
            self._places,
            self._judging,
            self._api.config.max_body_bytes,
        )
        job = self._jobs[batch_id] = BatchJob(shared, tenant, batch_id, left_s)
        job.start(lambda: self._forget(batch_id))

    def _forget(self, batch_id: str) -> None:
        self._jobs.pop(batch_id, None)

    def _check_number(self, tenant: Tenant) -> None:
        if sum(job.tenant.name == tenant.name for job in self._jobs.values()) >= MAX_UNENDED:
            message = f"{MAX_UNENDED} batches of this key have not ended yet; cancel some, or wait"
            raise overloaded(message, code="too_many_batches", retry_after_s=60)

    @staticmethod
    async def _check_input(store: FileStore, tenant: Tenant, file_id: str) -> None:
        try:
            await asyncio.to_thread(store.get, tenant.name, "file", file_id)
        except ApiError as error:
            if error.status != 404:
                raise
            raise ApiError(404, f"input_file_id: {error.message}", param="input_file_id") from None

    async def _find(self, call: Call, batch_id: str) -> Record:
        """Return a batch of the asking tenant. Raises ApiError 404."""
        store, job = self._files.store, self._jobs.get(batch_id)
        if (
            job is not None
            and job.tenant.name == call.tenant.name
            and (record := job.record) is not None
        ):
            return record  # which may not be on the disk yet, or any more
        return self._current(
            await asyncio.to_thread(store.get, call.tenant.name, "batch", batch_id)
        )

    def _current(self, record: Record) -> Record:
        """Return a stored record, or what has become of it since."""
        job = self._jobs.get(record["id"])
        return (None if job is None else job.record) or record
