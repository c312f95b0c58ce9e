"""Running a request: admission, the engine's streams, deadlines, a client that leaves or reads too
slowly, and the accounting.

A `GenerationRun` is one HTTP request's generations (several for a list of prompts), merged into one
sequence of outputs. However it ends, `close` leaves nothing behind: engine requests are aborted,
the ticket is returned, the counts are booked.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from quire.core.images import PlacedImage
from quire.core.params import RequestOutputKind, SamplingParams
from quire.core.plan import NO_TOKEN_LEFT, NOT_FINITE
from quire.core.request import RequestMetrics
from quire.core.request_spec import Keep
from quire.engine.front.client import Client
from quire.engine.front.digest import Digest
from quire.engine.front.outputs import RequestOutput
from quire.engine.front.prompts import ParsedPrompt
from quire.engine.front.streams import Stream
from quire.engine.process.supervisor import CONVICTED
from quire.errors import RequestError
from quire.server.http.call import Call
from quire.server.http.errors import (
    ApiError,
    bad_request,
    from_exception,
    of_prompt,
    overloaded,
    useless_to_retry,
)
from quire.server.http.off_loop import off_loop
from quire.server.ops.metrics import NOT_FINITE_CODE, Metrics
from quire.server.quota.admission import AdmissionControl, Ticket
from quire.server.quota.cost import Bounds, Piece

DEADLINE_EXCEEDED = "deadline_exceeded"
MAX_BUFFERED_OUTPUTS = 4096
"""Outputs that a stream's reader may be behind; beyond,
its request is aborted (each is one step's tokens)."""

_TOKENS_AT_ONCE = 1 << 14
"""Of prompts that are given to the engine in one turn of the event loop: a millisecond or two."""
_TOKENS_OF_PROMPT = 1024
"""What a prompt costs beside its tokens, counted in tokens."""

Item = tuple[int, RequestOutput]
"""(index of the job, output)."""
PassOn = Callable[[int, RequestOutput], bool]
"""Takes an output in the call that brings it, or says that it must wait."""


@dataclass(slots=True)
class GenerationJob:
    """One prompt to go on from."""

    prompt_token_ids: Sequence[int]
    params: SamplingParams
    """All jobs of one run have the same, but for `max_tokens` (`SamplingParams.limited`):
    they are read once."""
    prompt: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    """None: that of the tenant's class."""
    num_shown: int = 1
    num_repeated: int = 0
    """See `Piece`."""
    digest: Digest | None = None
    """What the parameters come to, where they were read already."""
    images: tuple[PlacedImage, ...] = ()
    """Whose places the prompt has."""
    keep: tuple[Keep, ...] = ()
    """What of the prompt is to stay in the prefix cache for how long, if it can."""
    where: str = "prompt"
    """Where in the body the prompt stands."""

    @property
    def num_image_tokens(self) -> int:
        """Places of images in the prompt."""
        return sum(image.num_tokens for _, image in self.images)


@dataclass(slots=True)
class Usage:
    """Token counts of a run so far."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_cache_write_tokens: int = 0
    """Of the prompts, computed and in the cache since."""
    num_output_tokens: int = 0
    num_accepted_tokens: int = 0
    """Of ended jobs: output tokens that were drafted, as the next."""
    num_rejected_tokens: int = 0
    num_image_tokens: int = 0
    """Of the prompt tokens, places of images."""


@dataclass(frozen=True, slots=True)
class Finished:
    """One job at its end, for a tracer."""

    call: Call
    params: SamplingParams
    metrics: RequestMetrics | None
    """None where nothing was heard of it."""
    usage: Usage
    reasons: tuple[str, ...]
    """Why its sequences ended."""
    error: str | None
    """One of our codes, or None where it went well."""


class Tracer(Protocol):
    """Who is told of every job's end."""

    def finished(self, job: Finished) -> None:
        """Never raises, never waits."""
        ...


@dataclass(slots=True)
class _JobProgress:
    """What is known of one job's generation."""

    stream: Stream
    metrics: RequestMetrics | None = None
    num_tokens: dict[int, int] = field(default_factory=dict)
    """Output tokens by sequence."""
    reasons: dict[int, str] = field(default_factory=dict)
    """Why sequences ended, which every later output of the others repeats."""
    is_finished: bool = False
    last_output_s: float | None = None


class Generator:
    """Starts runs on one engine."""

    def __init__(
        self, client: Client, admission: AdmissionControl, metrics: Metrics, bounds: Bounds
    ) -> None:
        self.client = client
        self.admission = admission
        self.metrics = metrics
        self.tracer: Tracer | None = None
        self.adapted: set[GenerationRun] = set()
        """Runs of requests that use an adapter."""
        self._bounds = bounds

    async def answer(
        self, call: Call, jobs: Sequence[GenerationJob], receive: Receive | None
    ) -> tuple[list[RequestOutput], Usage]:
        """Run jobs to their end: every job's output, in order. Ends early if the client leaves,
        where there is one."""
        run = await self.start(call, jobs, is_stream=False)
        if receive is not None:
            run.watch(receive)
        try:
            return await run.collect(), run.usage
        finally:
            await run.close()

    async def start(
        self, call: Call, jobs: Sequence[GenerationJob], *, is_stream: bool
    ) -> GenerationRun:
        """Admit and submit. Raises ApiError or a QuireError, with nothing left running."""
        self._bounds.check(
            [
                Piece(len(job.prompt_token_ids), job.params, job.num_shown, job.num_repeated)
                for job in jobs
            ]
        )
        self._check_priorities(call, jobs)
        for job in jobs:
            job.params.output_kind = (
                RequestOutputKind.DELTA if is_stream else RequestOutputKind.FINAL_ONLY
            )
        params, digest = jobs[0].params, jobs[0].digest
        if digest is None:
            digest = await off_loop(params.num_listed, lambda: self.client.digest(params))
        ticket = self.admission.admit(
            call.tenant,
            num_sequences=sum(job.params.num_sequences for job in jobs),
            num_prompt_tokens=sum(len(job.prompt_token_ids) for job in jobs),
            num_listed=digest.num_ids,
        )
        call.is_admitted = True
        run = GenerationRun(self, call, jobs, ticket)
        if call.adapter is not None:
            self.adapted.add(run)
        try:
            num_tokens = 0
            for number, job in enumerate(jobs):
                # others have their turn between a body's prompts, too
                if num_tokens > _TOKENS_AT_ONCE:
                    num_tokens = await asyncio.sleep(0, 0)
                num_tokens += _TOKENS_OF_PROMPT + len(job.prompt_token_ids)
                try:
                    await run.submit(number, job, digest)
                except RequestError as error:
                    raise of_prompt(error, job.where) from None
        except BaseException:
            await run.close()
            raise
        return run

    def _check_priorities(self, call: Call, jobs: Sequence[GenerationJob]) -> None:
        """Refuse requests of a class that is before their tenant's."""
        for priority in {job.priority for job in jobs if job.priority is not None}:
            if not call.tenant.may_ask_for(priority):
                raise bad_request(
                    f"priority: {priority} is before the class of this key, "
                    f"{call.tenant.priority}; the smaller comes first: "
                    "ask for that or more",
                    param="priority",
                )
            if priority and self.client.model.policy == "fcfs":
                call.ignore(
                    ["priority"], "this server serves in order of arrival (--scheduling-policy)"
                )


class GenerationRun:
    """The generations of one HTTP request."""

    def __init__(
        self, generator: Generator, call: Call, jobs: Sequence[GenerationJob], ticket: Ticket
    ) -> None:
        self._generator = generator
        self._call = call
        self._jobs = jobs
        self._ticket = ticket
        self._usage = Usage(
            sum(len(job.prompt_token_ids) for job in jobs),
            num_image_tokens=sum(job.num_image_tokens for job in jobs),
        )
        """Kept, since a stream may tell it with each of a thousand sequences' tokens."""
        self._progress: list[_JobProgress] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._num_unfinished = len(jobs)
        self._items: deque[Item] = deque()
        self._news = asyncio.Event()
        self._alarm: asyncio.TimerHandle | None = None
        """Wakes `get` to look at the clock. One that comes too early is left alone,
        so that a token costs no timer."""
        self._failure: BaseException | None = None
        self._pass_on: PassOn | None = None
        """Set while `get` waits."""
        self._is_closed = False

    @property
    def adapter_use(self) -> tuple[str, bool]:
        """The name of its adapter, if any, and whether it has begun."""
        adapter = self._call.adapter
        return "" if adapter is None else adapter.name, self._ticket.has_started

    @property
    def is_over(self) -> bool:
        """Whether every generation has ended and every output was taken."""
        return not self._items and not self._num_unfinished and self._failure is None

    @property
    def usage(self) -> Usage:
        """Counts over all jobs; a prompt counts once, however many sequences continue it."""
        return replace(self._usage)

    async def submit(self, number: int, job: GenerationJob, digest: Digest) -> None:
        """Give one job to the engine; `digest` is what the jobs' parameters come to."""
        suffix = f"-{number}" if len(self._jobs) > 1 else ""
        client, tenant = self._generator.client, self._call.tenant
        prepared = client.prepare(
            f"{self._call.request_id}{suffix}.{time.monotonic_ns():x}",
            ParsedPrompt(
                job.prompt, job.prompt_token_ids, tenant.cache_salt(job.cache_salt), job.images
            ),
            (job.digest or digest).of(job.params),
            adapter=None if self._call.adapter is None else self._call.adapter.adapter,
            priority=tenant.priority if job.priority is None else job.priority,
            tenant=tenant.name,
            weight=tenant.weight,
            keep=job.keep,
        )
        stream = await client.generate(prepared)
        progress = _JobProgress(stream)
        self._progress.append(progress)
        stream.listen(partial(self._take_safely, number, progress))

    def watch(self, receive: Receive) -> None:
        """End the run as soon as the client leaves."""
        self._tasks.append(asyncio.create_task(self._await_disconnect(receive)))

    async def get(self, wait_s: float | None = None, pass_on: PassOn | None = None) -> Item | None:
        """Return the next output; None if there is none within `wait_s`. Raises what ended the run
        early; not to be called when it `is_over`.

        While this waits, each new output is first offered to `pass_on`; if it returns True, the
        output is consumed there. A job's last output is always returned here.
        """
        give_up_s = None if wait_s is None else time.monotonic() + wait_s
        while not self._items:
            if self._failure is not None:
                raise self._failure
            now = time.monotonic()
            self._check_deadlines(now)
            if give_up_s is not None and now >= give_up_s:
                return None
            self._news.clear()
            self._set_alarm(self._patience(now, give_up_s))
            self._pass_on = pass_on
            try:
                await self._news.wait()
            finally:
                self._pass_on = None
        return self._items.popleft()

    def take(self) -> Item | None:
        """Take one more output, if it is there already."""
        return self._items.popleft() if self._items else None

    async def collect(self) -> list[RequestOutput]:
        """Return every job's last output, in order."""
        outputs: dict[int, RequestOutput] = {}
        while not self.is_over:
            item = await self.get()
            if item is not None:
                outputs[item[0]] = item[1]
        return [outputs[number] for number in range(len(self._jobs))]

    async def close(self) -> None:
        """Abort what is unfinished and give back what is held. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._generator.adapted.discard(self)
        self._generator.admission.release(self._ticket)
        if self._alarm is not None:
            self._alarm.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # each holds, by what ended it, this run: they would stay until the cycle collector
        self._tasks.clear()
        for each in self._progress:
            with contextlib.suppress(Exception):  # an engine that is gone has nothing to abort
                await each.stream.aclose()
        for number, each in enumerate(self._progress):
            if not each.is_finished:
                self._book(each)
                num_sequences = self._jobs[number].params.num_sequences
                self._generator.metrics.sequences_ended("abort", num_sequences - len(each.reasons))
                self._trace(number, each, "aborted")

    # -- inside
    # ----------------------------------------------------------------------------------------------

    def _take_safely(self, number: int, progress: _JobProgress, output: RequestOutput) -> None:
        """Take one output of a job, for a caller that is not to hear of failures."""
        try:
            if not self._is_closed:
                self._take(number, progress, output)
        except Exception as error:
            self._fail(from_exception(error))

    def _take(self, number: int, progress: _JobProgress, output: RequestOutput) -> None:
        if not self._ticket.has_started:
            self._generator.admission.note_start(self._ticket)
        self._count(number, progress, output)
        if output.finished:
            progress.is_finished = True
            self._num_unfinished -= 1
            error = _error_of(output)
            self._trace(number, progress, None if error is None else error.code or "error")
            if error is not None:
                self._book(progress)
                self._fail(error)
                return
            self._finish(number, progress, output)
        elif self._has_passed_on(number, output):
            return
        self._items.append((number, output))
        if len(self._items) > MAX_BUFFERED_OUTPUTS:
            self._fail(ApiError(499, "the client reads its stream too slowly", code="slow_reader"))
        self._news.set()

    def _has_passed_on(self, number: int, output: RequestOutput) -> bool:
        """Return whether an output needs no task to be woken: it was taken where it came in,
        or the run has failed."""
        if self._pass_on is None or self._items:
            return False
        if self._failure is not None:
            return True
        try:
            return self._pass_on(number, output)
        except Exception as error:
            self._fail(error)
            return True

    def _count(self, number: int, progress: _JobProgress, output: RequestOutput) -> None:
        metrics = self._generator.metrics
        if progress.metrics is None:
            metrics.prompt_computed(output)
            self._usage.num_cached_tokens += output.num_cached_tokens
            self._usage.num_cache_write_tokens += output.num_cache_write_tokens
        progress.metrics = output.metrics
        self._call.weight_version = output.weight_version
        is_delta = self._jobs[number].params.output_kind is RequestOutputKind.DELTA
        num_new = 0
        for completion in output.outputs:
            known = progress.num_tokens.get(completion.index, 0)
            num_now = len(completion.token_ids) + (known if is_delta else 0)
            progress.num_tokens[completion.index] = num_now
            self._usage.num_output_tokens += num_now - known
            num_new += len(completion.token_ids)
            if completion.finish_reason is not None and completion.index not in progress.reasons:
                progress.reasons[completion.index] = completion.finish_reason
                metrics.sequences_ended(completion.finish_reason)
        if output.finished:
            self._usage.num_accepted_tokens += output.metrics.num_accepted_tokens
            self._usage.num_rejected_tokens += output.metrics.num_rejected_tokens
        metrics.generated(num_new)
        if is_delta:
            now = time.monotonic()
            if progress.last_output_s is not None:
                metrics.inter_token(now - progress.last_output_s)
            progress.last_output_s = now

    def _finish(self, number: int, progress: _JobProgress, output: RequestOutput) -> None:
        self._book(progress)
        counts = progress.num_tokens.values()
        self._generator.metrics.request_finished(
            output, self._jobs[number].params, sum(counts), max(counts, default=0)
        )

    def _trace(self, number: int, progress: _JobProgress, error: str | None) -> None:
        """Tell of a job's end, whatever it was."""
        tracer = self._generator.tracer
        if tracer is not None:
            job = self._jobs[number]
            counts = Usage(
                num_prompt_tokens=len(job.prompt_token_ids),
                num_output_tokens=sum(progress.num_tokens.values()),
            )
            tracer.finished(
                Finished(
                    self._call,
                    job.params,
                    progress.metrics,
                    counts,
                    tuple(progress.reasons.values()),
                    error,
                )
            )

    def _book(self, progress: _JobProgress) -> None:
        metrics = progress.metrics or RequestMetrics()
        self._generator.admission.charge(
            self._call.tenant,
            num_output_tokens=sum(progress.num_tokens.values()),
            num_cached_tokens=metrics.num_prefix_hit_tokens,
            num_cache_write_tokens=metrics.num_cache_write_tokens,
        )

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            if not isinstance(error, ApiError) or error.status == 499:
                # they will not be read; before an error, what was made is still delivered
                self._items.clear()
            if isinstance(error, ApiError):
                self._generator.metrics.request_failed(error.code or "error")
        self._news.set()

    async def _await_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._fail(ClientDisconnect())

    def _set_alarm(self, wait_s: float) -> None:
        """Be woken within `wait_s`."""
        loop = asyncio.get_running_loop()
        due_s = loop.time() + wait_s
        if self._alarm is not None:
            if self._alarm.when() <= due_s:
                return
            self._alarm.cancel()
        self._alarm = loop.call_at(due_s, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self._news.set()

    def _patience(self, now: float, give_up_s: float | None) -> float:
        """Return seconds until something must be looked at again."""
        moments = [give_up_s, self._call.deadline_s]
        if not self._ticket.has_started and self._call.queue_deadline_s is not None:
            # Past that, whether it still waits is looked at twice a second.
            moments.append(max(self._call.queue_deadline_s, now + 0.5))
        return max(
            0.0,
            min((moment for moment in moments if moment is not None), default=now + 3600.0) - now,
        )

    def _check_deadlines(self, now: float) -> None:
        call = self._call
        if call.deadline_s is not None and now >= call.deadline_s:
            message = f"the request was not finished within {call.deadline_s - call.started_s:g} s"
            raise useless_to_retry(ApiError(504, message, code=DEADLINE_EXCEEDED))
        is_late = call.queue_deadline_s is not None and now >= call.queue_deadline_s
        if is_late and self._generator.admission.is_queued(self._ticket):
            waited_s = now - call.started_s
            raise overloaded(
                f"the request waited {waited_s:.1f} s without being begun",
                code="queue_timeout",
                retry_after_s=waited_s / 2,
            )


def _error_of(output: RequestOutput) -> ApiError | None:
    """Return what an output says went wrong, if it does."""
    reasons = {completion.finish_reason for completion in output.outputs}
    # the sender's mistake, though it shows only under way
    if output.error == NO_TOKEN_LEFT:
        return bad_request(f"the request cannot be answered: {output.error}", code="no_token_left")
    if output.error is not None or "error" in reasons:
        code = NOT_FINITE_CODE if output.error == NOT_FINITE else "engine_error"
        answer = ApiError(500, f"the request failed: {output.error or 'unknown reason'}", code=code)
        return useless_to_retry(answer) if output.error == CONVICTED else answer
    if "abort" in reasons:
        return ApiError(
            503, "the request was ended by the server", code="aborted", headers={"retry-after": "1"}
        )
    return None
