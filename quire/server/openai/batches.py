"""/v1/batches: the requests of a file, run in the background, their answers written to another file.

A batch's record and results lie in the data folder, and each answer is appended as it comes, so a server that starts again
goes on where it was: lines whose `custom_id` has an answer are not run again. Batches yield to everyone else: a line is sent
only while few requests wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.common.failures import log_failure
from quire.server.body import decode, read_json
from quire.server.call import Call, call_of
from quire.server.errors import ApiError, bad_request, from_exception
from quire.server.openai.file_store import FileStore
from quire.server.openai.files import Files, page
from quire.server.responses import json_response
from quire.server.state import Api
from quire.server.tenants import Tenant

logger = logging.getLogger(__name__)

MAX_LINES = 50_000
"""As OpenAI's."""
MAX_PARALLEL = 32
"""Lines of one batch in flight."""
_MAX_WAITING = 8
"""While more requests than that wait, no line is sent."""
_PAUSE_S = 0.05
_LIFE_S = 24 * 3600
_TERMINAL = frozenset({"completed", "failed", "expired", "cancelled"})

Runner = Callable[[Call, bytes], Awaitable[dict[str, Any]]]
"""An endpoint without HTTP: a body to its answer."""


class BatchRequest(msgspec.Struct, kw_only=True):
    """The body."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None
    output_expires_after: Any = None


class BatchLine(msgspec.Struct, kw_only=True):
    """One request of the input file."""

    custom_id: str
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class Batches:
    """The endpoints, and the tasks that run the batches."""

    def __init__(self, api: Api, files: Files, runners: Mapping[str, Runner]) -> None:
        self._api = api
        self._files = files
        self._runners = runners
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def post(self, request: Request) -> Response:
        """Begin a batch."""
        call, store = call_of(request), self._files.store
        body = await read_json(request, BatchRequest, is_strict=self._api.config.strict_fields)
        if body.endpoint not in self._runners:
            raise bad_request(f"endpoint: batches can use {', '.join(sorted(self._runners))}", param="endpoint")
        await asyncio.to_thread(store.get, call.tenant.name, "file", body.input_file_id)
        now = int(time.time())
        record = {
            "id": await asyncio.to_thread(store.new_id, call.tenant.name, "batch"),
            "object": "batch",
            "endpoint": body.endpoint,
            "input_file_id": body.input_file_id,
            "completion_window": body.completion_window,
            "status": "validating",
            "created_at": now,
            "expires_at": now + _LIFE_S,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": body.metadata,
        }
        await asyncio.to_thread(store.put, call.tenant.name, "batch", record)
        self._run(call.tenant, dict(record))
        return json_response(call, _public(record))

    async def list(self, request: Request) -> Response:
        """All batches, newest first."""
        call, store = call_of(request), self._files.store
        records = await asyncio.to_thread(store.records, call.tenant.name, "batch")
        return json_response(call, page(request, [_public(record) for record in records]))

    async def get(self, request: Request) -> Response:
        """A batch as it is now."""
        call, store, batch_id = call_of(request), self._files.store, request.path_params["batch_id"]
        return json_response(call, _public(await asyncio.to_thread(store.get, call.tenant.name, "batch", batch_id)))

    async def cancel(self, request: Request) -> Response:
        """End a batch; what was answered so far stays."""
        call, store, batch_id = call_of(request), self._files.store, request.path_params["batch_id"]
        record = await asyncio.to_thread(store.get, call.tenant.name, "batch", batch_id)
        if record["status"] not in _TERMINAL:
            record |= {"status": "cancelling", "cancelling_at": int(time.time())}
            await asyncio.to_thread(store.put, call.tenant.name, "batch", record)
            task = self._tasks.get(batch_id)
            if task is not None:
                task.cancel()
        return json_response(call, _public(record))

    async def resume(self) -> None:
        """Go on with what an earlier server left unfinished. Batches of tenants that are gone stay as they are."""
        store = self._files.store
        for name in await asyncio.to_thread(store.tenants):
            tenant = self._api.admission.tenants.get(name)
            if tenant is None:
                continue
            for record in await asyncio.to_thread(store.records, name, "batch"):
                if record["status"] not in _TERMINAL:
                    self._run(tenant, record)

    async def close(self) -> None:
        """Stop; unfinished batches are left for the next server."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _run(self, tenant: Tenant, record: dict[str, Any]) -> None:
        job = _BatchJob(self._api, self._files.store, tenant, record)
        task = asyncio.get_running_loop().create_task(self._supervise(job, record["id"]))
        self._tasks[record["id"]] = task

    async def _supervise(self, job: _BatchJob, batch_id: str) -> None:
        try:
            await job.run(self._runners)
        except asyncio.CancelledError:
            if batch_id in self._tasks:  # cancelled by its owner, and not because the server ends
                await job.finish("cancelled")
        except Exception as error:
            log_failure(logger, f"batch {batch_id} failed", error)
            with contextlib.suppress(ApiError):  # a disk that is full cannot hold that news either
                await job.fail("internal_error", "the server had an error while it ran this batch", None)
        finally:
            await job.settle()
            self._tasks.pop(batch_id, None)


class _BatchJob:
    """One batch on its way through its states."""

    def __init__(self, api: Api, store: FileStore, tenant: Tenant, record: dict[str, Any]) -> None:
        self._api = api
        self._store = store
        self._tenant = tenant
        self._record = record
        self._writing = asyncio.Lock()
        """Held while a file is written: in order, and to the end even where the one who wanted it was cancelled."""
        self._paths = {kind: self._result_path(kind) for kind in ("output", "error")}

    async def run(self, runners: Mapping[str, Runner]) -> None:
        """Validate, run what has no answer yet, and write the results."""
        if self._record["status"] == "cancelling":
            await self.finish("cancelled")
            return
        try:
            lines = await asyncio.to_thread(self._read_lines)
        except ApiError as error:
            await self.fail(error.code or "invalid_input", error.message, error.param)
            return
        done = await asyncio.to_thread(self._read_done)
        self._record["request_counts"]["total"] = len(lines)
        await self._update("in_progress", in_progress_at=self._record.get("in_progress_at") or int(time.time()))
        runner = runners[self._record["endpoint"]]
        waiting = [line for line in lines if line.custom_id not in done]
        waiting.reverse()
        is_expired = await self._run_lines(waiting, runner)
        await self.finish("expired" if is_expired else "completed")

    async def _run_lines(self, waiting: list[BatchLine], runner: Runner) -> bool:
        """Run them, a few at a time; True if time ran out."""
        running: set[asyncio.Task[None]] = set()
        try:
            while waiting or running:
                if waiting and time.time() > self._record["expires_at"]:
                    return True
                is_room = len(running) < MAX_PARALLEL and self._api.admission.queue()[0] <= _MAX_WAITING
                if waiting and is_room:
                    running.add(asyncio.create_task(self._run_line(waiting.pop(), runner)))
                    continue
                done, running = await asyncio.wait(running, timeout=_PAUSE_S) if running else (set(), running)
                for task in done:
                    task.result()
                if not running:
                    await asyncio.sleep(0 if done else _PAUSE_S)
            return False
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _run_line(self, line: BatchLine, runner: Runner) -> None:
        call = Call(f"batch_req_{secrets.token_hex(12)}", self._tenant)
        while True:
            status, body = await _attempt(runner, call, bytes(line.body))
            if status not in (429, 503):
                break
            await asyncio.sleep(1.0)
        answer = {"status_code": status, "request_id": call.request_id, "body": body}
        entry = {"id": call.request_id, "custom_id": line.custom_id, "response": answer, "error": None}
        await asyncio.shield(asyncio.create_task(self._keep_answer(entry, is_good=status == 200)))

    async def _keep_answer(self, entry: dict[str, Any], *, is_good: bool) -> None:
        async with self._writing:
            await asyncio.to_thread(_append, self._paths["output" if is_good else "error"], entry)
            self._record["request_counts"]["completed" if is_good else "failed"] += 1
            await asyncio.to_thread(self._store.put, self._tenant.name, "batch", dict(self._record))

    async def finish(self, status: str) -> None:
        """Register the results as files and close the record."""
        now = int(time.time())
        for kind, path in self._paths.items():
            if await asyncio.to_thread(_is_filled, path):
                file_id = path.stem
                name = f"{self._record['id']}_{kind}.jsonl"
                await asyncio.to_thread(self._store.register_file, self._tenant.name, file_id, name, "batch_output")
                self._record[f"{kind}_file_id"] = file_id
        await self._update(status, **{f"{status}_at": now})

    async def fail(self, code: str, message: str, line: str | None) -> None:
        """End a batch that cannot be run."""
        error = {"code": code, "message": message, "param": None, "line": int(line) if line else None}
        await self._update("failed", failed_at=int(time.time()), errors={"object": "list", "data": [error]})

    async def _update(self, status: str, **fields: Any) -> None:
        self._record |= {"status": status, **fields}
        await asyncio.shield(asyncio.create_task(self._write_record()))

    async def _write_record(self) -> None:
        async with self._writing:
            await asyncio.to_thread(self._store.put, self._tenant.name, "batch", dict(self._record))

    async def settle(self) -> None:
        """Wait until nothing is being written."""
        async with self._writing:
            pass

    def _result_path(self, kind: str) -> Path:
        """Where results of a kind are gathered: the content of a file that is registered at the end."""
        key = f"_{kind}_file_id"
        if key not in self._record:
            self._record[key] = self._store.new_id(self._tenant.name, "file")
        return self._store.content_path(self._tenant.name, self._record[key])

    def _read_lines(self) -> list[BatchLine]:
        """The input, checked. Raises ApiError whose `param` is the number of the line that is wrong."""
        lines: list[BatchLine] = []
        seen: set[str] = set()
        max_len = self._api.config.max_body_bytes
        self._store.get(self._tenant.name, "file", self._record["input_file_id"])
        for number, raw in enumerate(self._store.lines(self._tenant.name, self._record["input_file_id"], max_len), start=1):
            if len(raw) > max_len or number > MAX_LINES:
                raise bad_request(
                    f"line {number}: too long, or more than {MAX_LINES} lines", param=str(number), code="too_large"
                )
            try:
                line, _ = decode(raw, BatchLine)
            except ApiError as error:
                raise bad_request(f"line {number}: {error.message}", param=str(number), code="invalid_json_line") from None
            if line.url != self._record["endpoint"]:
                raise bad_request(
                    f"line {number}: its url is not the batch's endpoint", param=str(number), code="mismatched_url"
                )
            if line.custom_id in seen:
                raise bad_request(f"line {number}: its custom_id is used twice", param=str(number), code="duplicate_custom_id")
            seen.add(line.custom_id)
            lines.append(BatchLine(custom_id=line.custom_id, method="POST", url=line.url, body=msgspec.Raw(bytes(line.body))))
        if not lines:
            raise bad_request("the input file has no requests", code="empty_file")
        return lines

    def _read_done(self) -> set[str]:
        """What has an answer already. A last line that was not written to its end is cut off, and its request runs again."""
        counts = {kind: 0 for kind in self._paths}
        done: set[str] = set()
        for kind, path in self._paths.items():
            if not path.exists():
                continue
            good = 0
            with path.open("rb+") as results:
                for raw in results:
                    try:
                        custom_id = msgspec.json.decode(raw)["custom_id"] if raw.endswith(b"\n") else None
                    except (msgspec.DecodeError, KeyError, TypeError):
                        custom_id = None
                    if custom_id is None:
                        break
                    done.add(custom_id)
                    counts[kind] += 1
                    good += len(raw)
                results.truncate(good)
        self._record["request_counts"] |= {"completed": counts["output"], "failed": counts["error"]}
        return done


def _public(record: dict[str, Any]) -> dict[str, Any]:
    """A record without what is for this server alone."""
    return {name: value for name, value in record.items() if not name.startswith("_")}


async def _attempt(runner: Runner, call: Call, body: bytes) -> tuple[int, dict[str, Any]]:
    try:
        return 200, await runner(call, body)
    except Exception as error:
        answer = from_exception(error)
        if answer.status >= 500 and not isinstance(error, ApiError):
            log_failure(logger, f"request {call.request_id} of a batch failed", error)
        return answer.status, answer.body()


def _is_filled(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _append(path: Path, entry: dict[str, Any]) -> None:
    with path.open("ab") as results:
        results.write(msgspec.json.encode(entry) + b"\n")
