"""One batch on its way through its states: it waits, is judged, sends its lines, and ends, once.

Holds a line at a time of its input and no answer that has been written. What it writes survives its
being cancelled; while the disk takes nothing, it keeps what it has, sends nothing new, and goes on
when there is room again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

from quire.common.failures import log_failure
from quire.server.api.openai.batch_input import BatchInput, PlacedLine
from quire.server.api.openai.batch_lines import BatchLines, LineResult
from quire.server.api.openai.batch_results import CANCELLED, EXPIRED, BatchResults
from quire.server.api.openai.data_folder import STORAGE_FAILED
from quire.server.api.openai.file_store import ENDED, RESULTS, FileStore, Record, new_id
from quire.server.http.errors import ApiError
from quire.server.quota.tenants import Tenant
from quire.server.quota.turns import Lease, Turns

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 15.0
_LAST_WRITES_S = 60.0
"""How long a batch whose time is up tries to say so to a disk that takes nothing."""

_T = TypeVar("_T")


class Surroundings(NamedTuple):
    """What all batches of a server share."""

    store: FileStore
    lines: BatchLines
    places: Turns
    """At running."""
    judging: asyncio.Lock
    """One input is judged at a time: that takes processor time, and memory for its `custom_id`s."""
    max_line_len: int


class BatchJob:
    """One batch that has not ended. `left_s`: how long it has."""

    def __init__(self, shared: Surroundings, tenant: Tenant, batch_id: str, left_s: float) -> None:
        self.tenant = tenant
        self.batch_id = batch_id
        self._shared = shared
        self._store = shared.store
        self._deadline_s = time.monotonic() + left_s
        """On the monotonic clock."""
        self._record: Record = {}
        """Empty until it is needed."""
        self._task: asyncio.Task[None] | None = None
        self._is_cancelled = False
        self._closing = asyncio.Event()
        self._writing = asyncio.Lock()
        self._writes: set[asyncio.Task[Any]] = set()
        self._lines: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._results: BatchResults | None = None
        self._done: set[bytes] = set()
        self._offset = 0
        """Of what has not been read of the input."""
        self._again: list[int] = []
        """Offsets of lines that are to be sent again."""
        self._has_read_all = False

    @property
    def record(self) -> Record | None:
        """The record as it is now, which may be ahead of the disk's;
        None where the disk's is right."""
        if not self._record:
            return None
        counts = self._record["request_counts"]
        if self._results is not None:
            counts = counts | {"completed": self._results.num_good, "failed": self._results.num_bad}
        return self._record | {"request_counts": counts}

    def start(self, on_end: Callable[[], None]) -> None:
        """Begin, in a task of its own; `on_end` is told when that is over."""
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(lambda _: on_end())

    async def cancel(self) -> Record:
        """End it, with what was answered so far; the record as it is now."""
        await self._load()
        if not self._is_cancelled and self._record["status"] not in ENDED:
            self._is_cancelled = True
            self._record |= {"status": "cancelling", "cancelling_at": int(time.time())}
            if self._task is not None:
                self._task.cancel()
        record = self.record
        assert record is not None
        return record

    async def is_over(self, timeout_s: float) -> bool:
        """Return whether nothing of it is left to be done. One that shows an end may have that to
        write yet, which is waited for."""
        if self._task is None or self._record.get("status") not in ENDED:
            return False
        return bool((await asyncio.wait([self._task], timeout=timeout_s))[0])

    async def close(self) -> None:
        """Stop where it is, for the next server to go on."""
        self._closing.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._stop_lines()
        if self._results is not None and self._record["status"] not in ENDED:
            with contextlib.suppress(ApiError):  # the results are there in any case
                await self._update(self._record["status"])

    # -- from state to state
    # -----------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            await self._attempt(self._run_in_turn)
        except asyncio.CancelledError:
            if not self._is_cancelled or self._closing.is_set():
                raise
            await self._attempt(self._end_cancelled)

    async def _attempt(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do it; where it fails the batch fails."""
        try:
            await work()
        except ApiError as error:
            await self._give_up(error)
        except Exception as error:
            log_failure(logger, f"batch {self.batch_id} failed", error)
            await self._give_up(
                ApiError(
                    500, "the server had an error while it ran this batch", code="internal_error"
                )
            )

    async def _run_in_turn(self) -> None:
        place = await self._shared.places.enter(self.tenant, self._left_s) if self._left_s else None
        if place is None:
            await self._end("expired")
            return
        with place:
            await self._run_in_place()

    async def _end_cancelled(self) -> None:
        """End as cancelled. That is written down first, since lines in flight take their time to
        stop, and a server that is started meanwhile is not to go on."""
        if self._record["status"] not in ENDED:
            await self._update("cancelling")
        await self._end("cancelled")

    async def _run_in_place(self) -> None:
        await self._load()
        if self._record["status"] == "cancelling":  # when an earlier server ended
            await self._end("cancelled")
            return
        source = self._source()
        async with self._shared.judging:
            total = await self._on_disk(lambda: source.check(self._is_wanted))
        self._results = BatchResults(self._store, self.tenant.name, self._record)
        self._done = await self._on_disk(self._results.recount)
        self._record["request_counts"] = {"total": total, "completed": 0, "failed": 0}
        await self._update(
            "in_progress", in_progress_at=self._record.get("in_progress_at") or int(time.time())
        )
        await self._end("completed" if await self._send_lines(source) else "expired")

    def _source(self) -> BatchInput:
        return BatchInput(
            partial(self._store.open_file, self.tenant.name, self._record["input_file_id"]),
            self._record["endpoint"],
            self._shared.max_line_len,
        )

    async def _give_up(self, error: ApiError) -> None:
        """Say why the batch cannot go on, if the disk takes that."""
        if error.code == STORAGE_FAILED:
            logger.error(
                "batch %s ends: the data folder could not be used for too long", self.batch_id
            )
        try:
            line = int(error.param) if error.param is not None and error.param.isdigit() else None
            problem = {
                "code": error.code or "invalid_input",
                "message": error.message,
                "param": None,
                "line": line,
            }
            await self._end("failed", errors={"object": "list", "data": [problem]})
        except ApiError:
            logger.error(
                "the end of batch %s could not be written: the next server will take it up again",
                self.batch_id,
            )

    async def _end(self, status: str, **fields: Any) -> None:
        """Register what was answered and close the record, unless that has been done."""
        await self._load()
        if self._record["status"] in ENDED:
            return
        await self._stop_lines()
        if self._results is None:
            self._results = BatchResults(self._store, self.tenant.name, self._record)
            await self._on_disk(self._results.recount)
        code = {"expired": EXPIRED, "cancelled": CANCELLED}.get(status)
        if code is not None and self._record.get("in_progress_at"):
            await self._on_disk(partial(self._name_unanswered, self._results, code))
        files = await self._on_disk(self._results.register)
        await self._update(status, **files, **fields, **{f"{status}_at": int(time.time())})

    def _name_unanswered(self, results: BatchResults, code: str) -> None:
        """Have every line that was not answered stand among the errors, if that can be."""
        try:
            results.leave(self._source().unanswered(results.recount()), code)
        except ApiError as error:
            if error.code == STORAGE_FAILED:
                raise
            logger.warning("batch %s: not all of its lines are named: %s", self.batch_id, error)

    # -- lines
    # ----------------------------------------------------------------------------------------------

    async def _send_lines(self, source: BatchInput) -> bool:
        """Have every line answered that has no answer yet; False where time ran out."""
        while await self._has_more():
            turn = await self._shared.lines.enter(self.tenant, self._left_s)
            if turn is None:
                break
            try:
                line = await self._next_line(source)
            except BaseException:
                turn.release()
                raise
            if line is None:
                turn.release()
            else:
                turn.weigh(len(line.body))
                self._add_line(line, turn)
        if self._lines:
            await asyncio.wait(self._lines, timeout=self._left_s)
        self._check()
        return self._has_read_all and not self._again and not self._lines

    async def _has_more(self) -> bool:
        """Return whether a line is left to be sent, and time for it; waits for those in flight
        where that may yet turn out, and for the disk.
        """
        while self._has_read_all and not self._again and self._lines and self._left_s:
            await asyncio.wait(
                self._lines, timeout=self._left_s, return_when=asyncio.FIRST_COMPLETED
            )
            self._check()
        async with self._writing:
            self._check()
        return self._left_s > 0 and (not self._has_read_all or bool(self._again))

    async def _next_line(self, source: BatchInput) -> PlacedLine | None:
        if self._again:
            return await self._on_disk(partial(source.line, self._again.pop(), self._done))
        line = await self._on_disk(partial(source.line, self._offset, self._done))
        if line is None:
            self._has_read_all = True
        else:
            self._offset = line.end
        return line

    def _add_line(self, line: PlacedLine, turn: Lease) -> None:
        task = asyncio.create_task(self._run_line(line, turn))
        self._lines.add(task)
        task.add_done_callback(self._line_ended)
        # also where it was cancelled before it began
        task.add_done_callback(lambda _: turn.release())

    async def _run_line(self, line: PlacedLine, turn: Lease) -> None:
        answer = await self._shared.lines.run(turn, self._record["endpoint"], line.body)
        if answer is None:
            self._again.append(line.offset)
        else:
            await self._on_disk(partial(self._keep, line.custom_id, answer))

    def _line_ended(self, task: asyncio.Task[None]) -> None:
        self._lines.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error

    def _keep(self, custom_id: str, answer: LineResult) -> None:
        assert self._results is not None
        response: dict[str, Any] = {
            "status_code": answer.status,
            "request_id": answer.request_id,
            "body": answer.body,
        }
        if answer.ignored_fields is not None:
            response["ignored_fields"] = answer.ignored_fields
        entry = {
            "id": answer.request_id,
            "custom_id": custom_id,
            "response": response,
            "error": None,
        }
        self._results.append(entry, is_good=answer.status == 200)

    async def _stop_lines(self) -> None:
        """Give up what is in flight, except for what is being written."""
        for task in self._lines:
            task.cancel()
        for tasks in (self._lines, self._writes):
            if tasks:
                await asyncio.wait(tasks)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    # -- the record and the disk
    # ---------------------------------------------------------------------------------------

    @property
    def _left_s(self) -> float:
        return max(0.0, self._deadline_s - time.monotonic())

    async def _load(self) -> None:
        if not self._record:
            record = await self._on_disk(
                partial(self._store.get, self.tenant.name, "batch", self.batch_id)
            )
            if not self._record:
                self._record = {f"_{kind}_file_id": new_id("file") for kind in RESULTS} | record

    async def _update(self, status: str, **fields: Any) -> None:
        self._record |= {"status": status, **fields}
        record = self.record
        assert record is not None
        await self._on_disk(partial(self._store.put, self.tenant.name, "batch", record))

    def _is_wanted(self) -> bool:
        return not (self._closing.is_set() or self._is_cancelled)

    async def _on_disk(self, operate: Callable[[], _T]) -> _T:
        """Do it after what is being done, and to its end even where the one
        who wanted it is cancelled."""
        task = asyncio.create_task(self._operate(operate))
        self._writes.add(task)
        task.add_done_callback(self._written)
        return await asyncio.shield(task)

    def _written(self, task: asyncio.Task[Any]) -> None:
        self._writes.discard(task)
        if not task.cancelled():
            task.exception()  # the coroutine that awaited it may be gone

    async def _operate(self, operate: Callable[[], _T]) -> _T:
        """Run `work` in a thread; where the disk fails, again and again, until it does not."""
        pause_s, give_up_s = (
            _FIRST_PAUSE_S,
            max(self._deadline_s, time.monotonic() + _LAST_WRITES_S),
        )
        async with self._writing:
            while True:
                try:
                    value = await asyncio.to_thread(operate)
                    break
                except ApiError as error:
                    if (
                        error.code != STORAGE_FAILED
                        or self._closing.is_set()
                        or time.monotonic() > give_up_s
                    ):
                        raise
                    if pause_s == _FIRST_PAUSE_S:
                        logger.warning(
                            "batch %s waits until the data folder can be written again",
                            self.batch_id,
                        )
                try:
                    async with asyncio.timeout(pause_s):
                        await self._closing.wait()
                except TimeoutError:
                    pause_s = min(_MAX_PAUSE_S, 2 * pause_s)
            if pause_s != _FIRST_PAUSE_S:
                logger.warning(
                    "batch %s goes on: the data folder can be written again", self.batch_id
                )
        return value
