"""Keeps an engine running and every request in flight on it, whatever becomes of the engine.

One thread owns the journal, the engine's process and the channel to it. It gives requests to the
engine, takes in what comes back, watches for signs of progress, and replaces an engine that is
dead, frozen or speaks nonsense; what was in flight goes on with the next one. It never waits
without a limit, and no thread waits for it: others post commands and read `state`.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from quire.common.failures import log_failure
from quire.core.request import FinishReason
from quire.engine.front.client import Question, Seen
from quire.engine.front.outputs import RequestOutput
from quire.engine.front.requests import PreparedRequest
from quire.engine.front.status import EngineState, EngineStatus
from quire.engine.front.streams import OutputSink, Post
from quire.engine.process.channel import ChannelClosed, FrameTooLarge, ProtocolError, wait
from quire.engine.process.journal import Journal, JournalEntry
from quire.engine.process.launcher import EngineProcess
from quire.engine.process.messages import (
    AskCache,
    CacheAnswered,
    Command,
    Done,
    Heartbeat,
    Inspected,
    InspectedBlock,
    Pause,
    Ready,
    Refused,
    Sleep,
    StartFailed,
    StepDeltas,
    Up,
    UpdateWeights,
)
from quire.engine.process.quarantine import choose, judge
from quire.engine.process.watch import Watch, WatchConfig
from quire.errors import EngineError

logger = logging.getLogger(__name__)

_ROUND_S = 0.1
"""Longest time between two looks at the clock."""
_MAX_UNSENT_BYTES = 1 << 20
"""While the engine has not taken that much, it is given nothing more:
requests wait in the journal, not in a buffer."""
CONVICTED = (
    "the engine died three times while it ran this request, lastly with no other beside it; it "
    "is not tried again"
)


class Supervisor:
    """The thread and what others may see of it: a `Link`."""

    def __init__(
        self, launch: Callable[[], EngineProcess], journal: Journal, config: WatchConfig
    ) -> None:
        self.watch = Watch(config)
        self.reason = "the model is being loaded"
        """Why the engine is not ready."""
        self._launch = launch
        self._journal = journal
        self._post = Post()
        self._deliver = self._post.deliver
        self._process: EngineProcess | None = None
        self._start_at_s: float | None = time.monotonic()
        """When the next engine is started, while none runs; None: never again."""
        self._questions: list[Question] = []
        """For the engine, as soon as it listens; those that it does not hear soon
        are forgotten by who asked."""
        self.show: Callable[[Seen], None] = lambda answer: None
        self._asleep: tuple[str, ...] = ()
        self._bedtime: Sleep | None = None
        """What the engine was last told of sleeping; the next one is told, too."""
        self._pause_command: Pause | None = None
        """What was last said of pausing; while it holds, the engine is given no requests, and the
        next one is told before it makes a step."""
        self._weights: UpdateWeights | None = None
        """Where the weights are from that the engine computes with, if not those it was built
        with; the next one is told before it gets any request."""
        self._running: dict[int, Command | AskCache] = {}
        """What the engine has been told, and has not answered, and is waited for."""
        self._has_failed = False
        self._is_closing = False
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="quire-supervisor", daemon=True)

    # -- for other threads
    # -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to load the model."""
        self._thread.start()

    @property
    def state(self) -> EngineState:
        """How the engine is doing now, also if the supervisor has not
        come round to acting upon it."""
        if self._is_closing:
            return "closed"
        if self._has_failed:
            return "failed"
        if self._process is None or not self.watch.is_loaded:
            return "restarting" if self.watch.num_restarts else "loading"
        if self.watch.complaint() is not None:
            return "stalled"
        return "sleeping" if self._asleep else "ready"

    @property
    def engine_pid(self) -> int | None:
        """The engine's process, while one runs."""
        process = self._process
        return None if process is None else process.pid

    def add(self, prepared: PreparedRequest, stream: OutputSink) -> None:
        self._submit(lambda: self._add(prepared, stream))

    def abort(self, request_id: str) -> None:
        self._submit(lambda: self._end(request_id, FinishReason.ABORT, None))

    def ask(self, question: Question, replica: int = 0) -> None:
        self._submit(lambda: self._ask(question))

    def end_all(self, message: str) -> None:
        self._submit(lambda: self._end_all(message))

    def close(self, timeout_s: float = 15.0) -> None:
        self._is_closing = True
        self._submit(lambda: None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def status(self, num_requests: int, num_prompt_tokens: int) -> EngineStatus:
        watch, state, reason = self.watch, self.state, self.reason
        if state == "sleeping":
            reason = f"it sleeps: {' and '.join(self._asleep)} went back to the system"
        if state == "stalled":
            reason = watch.complaint() or "the engine shows no progress"
        heartbeat = watch.heartbeat
        num_waiting = max(heartbeat.num_waiting, num_requests - heartbeat.num_running, 0)
        return EngineStatus(
            state=state,
            reason=reason,
            num_requests=num_requests,
            num_prompt_tokens=num_prompt_tokens,
            **heartbeat.counters() | {"num_waiting": num_waiting},
            last_step_age_s=watch.step_age_s if num_requests else None,
            last_sign_of_life_age_s=watch.sign_age_s,
            num_restarts=watch.num_restarts,
            engine_pid=self.engine_pid,
        )

    def _submit(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        # full: it is awake; closed: it is over, and refuses later requests
        with contextlib.suppress(OSError):
            self._wake_sender.send(b"\0")

    # -- the thread
    # ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._round()
        except BaseException as error:
            log_failure(logger, "the supervisor died", error)
            self._has_failed, self.reason = True, f"the supervisor died: {type(error).__name__}"
        finally:
            self._is_closing = self._is_closing or not self._has_failed
            if self._process is not None:
                self._process.kill()
                self._process = None
            self._journal.leave_engine()
            self._take_commands()
            self._end_all("the server is shutting down" if not self._has_failed else self.reason)
            self._wake_receiver.close()
            self._wake_sender.close()

    def _round(self) -> None:
        self._take_commands()
        if self._process is None:
            self._start_if_due()
        try:
            self._talk()
        except (ChannelClosed, ProtocolError) as error:
            self._replace(str(error))
            return
        complaint = self.watch.complaint() if self._process is not None else None
        if complaint is not None:
            self._replace(complaint)

    def _take_commands(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._commands.get_nowait()()

    def _start_if_due(self) -> None:
        if self._start_at_s is None or time.monotonic() < self._start_at_s:
            return
        try:
            process = self._launch()
        except EngineError as error:
            self._pause(str(error))
        else:
            self.watch.start()  # before others see it, who would judge it by its predecessor
            self._process = process

    def _talk(self) -> None:
        """Tell the engine what it must hear, wait for something to happen,
        and take in what it says."""
        process = self._process
        channel = None if process is None else process.channel
        if channel is not None and self.watch.is_loaded:
            self._tell()
        readers: list[Any] = (
            [self._wake_receiver, channel] if channel is not None else [self._wake_receiver]
        )
        writers = [channel] if channel is not None and channel.num_unsent_bytes else []
        if self._wake_receiver.fileno() in wait(readers, writers, _ROUND_S):
            with contextlib.suppress(BlockingIOError):
                self._wake_receiver.recv(4096)
        if channel is None:
            return
        channel.flush()
        for message in channel.receive():
            self._take(message)

    def _tell(self) -> None:
        assert self._process is not None
        channel = self._process.channel
        questions, self._questions = self._questions, []
        for question in questions:
            if isinstance(question, Command | AskCache):
                self._running[question.number] = question
            if isinstance(question, Sleep):
                self._bedtime = question
            channel.send(question)
        for message in self._journal.take_messages():
            channel.send(message)
        for entry in [] if self._holds_requests else choose(self._journal.entries.values()):
            if channel.num_unsent_bytes > _MAX_UNSENT_BYTES:
                break
            try:
                for part in self._journal.telling(entry):
                    channel.send(part)
            except ChannelClosed:
                raise
            except FrameTooLarge as error:
                self._deliver(
                    self._journal.end(
                        entry, FinishReason.ERROR, f"the request is too large: {error}"
                    )
                )
            except Exception as error:
                log_failure(
                    logger,
                    f"request {entry.request.request_id} cannot be sent to the engine",
                    error,
                )
                complaint = f"the request could not be sent to the engine: {type(error).__name__}"
                self._deliver(self._journal.end(entry, FinishReason.ERROR, complaint))
            else:
                entry.is_sent = True

    @property
    def _holds_requests(self) -> bool:
        """Whether those that the engine does not have wait: for other weights, or to go on."""
        if self._pause_command is not None and self._pause_command.holds:
            return True
        running = self._running.values()
        return any(isinstance(each, UpdateWeights) and each.waits for each in running)

    def _take(self, message: Up) -> None:
        self.watch.hear(message if isinstance(message, Heartbeat) else None)
        if isinstance(message, Heartbeat):
            return
        if isinstance(message, StepDeltas):
            if any(delta.token_ids for delta in message.deltas):
                self.watch.note_progress()
            self._deliver(self._journal.take(message))
        elif isinstance(message, Ready):
            self.watch.is_loaded, self.reason = True, ""
            logger.info("the engine is ready after %.2f s", message.load_s)
            if self._weights is not None:
                self._questions.insert(0, self._weights)
            elif self._asleep and self._bedtime is not None:
                self._questions.insert(0, self._bedtime)
            if self._pause_command is not None and self._pause_command.holds:
                self._questions.insert(0, self._pause_command)
        elif isinstance(message, Done):
            self._take_done(message)
        elif isinstance(message, Inspected | InspectedBlock | CacheAnswered):
            self._running.pop(message.number, None)
            self.show(message)
        elif isinstance(message, Refused):
            entry = self._journal.entries.get(message.number)
            if entry is not None:
                self._deliver(self._journal.end(entry, FinishReason.ERROR, message.message))
        else:
            self._take_start_failure(message)

    def _take_done(self, done: Done) -> None:
        command = self._running.pop(done.number, None)
        if command is self._weights is not None and done.error is not None:
            self._give_up(
                f"the weights of version {self._weights.version!r} cannot be loaded again: "
                f"{done.error}"
            )
            return
        if isinstance(command, Pause):
            pass  # what sleeps, or is to be told of it, has not changed
        elif command is self._weights is not None and self._asleep and self._bedtime is not None:
            self._questions.insert(0, self._bedtime)
        else:
            self._asleep = done.asleep
        if isinstance(command, UpdateWeights) and done.error is None:
            # there is nothing that could end before, in an engine that replaces this one
            self._weights = msgspec.structs.replace(command, waits=True)
        self.show(done)

    def _take_start_failure(self, failure: StartFailed) -> None:
        if failure.is_final:
            self._give_up(failure.message)
        else:
            raise ChannelClosed(failure.message)

    # -- when an engine is lost
    # --------------------------------------------------------------------------------------

    def _replace(self, complaint: str) -> None:
        """Make sure that a lost engine is gone, and go on with another."""
        process, self._process = self._process, None
        assert process is not None
        process.kill()
        logger.error(
            "the engine (process %d) is lost: %s; %s; %d requests go on with the next one",
            process.pid, complaint, process.describe_end(), len(self._journal),
        )  # fmt: skip
        convicted = judge(self._journal.entries.values()) if self.watch.is_loaded else None
        self._journal.leave_engine()
        self._drop_questions("the engine was lost meanwhile; try again")
        if convicted is not None:
            logger.error("request %s: %s", convicted.request.request_id, CONVICTED)
            self._deliver(self._journal.end(convicted, FinishReason.ERROR, CONVICTED))
            self.watch.note_progress()  # its cause is gone
        self._pause(complaint)

    def _drop_questions(self, reason: str) -> None:
        """Answer whatever waits for an answer of an engine that is no more."""
        dropped = [*self._running.values(), *self._questions]
        self._running.clear()
        self._questions.clear()
        for each in dropped:
            if isinstance(each, Pause):  # holds for the next engine
                self.show(Done(each.number, self._asleep))
            elif isinstance(each, Command):
                self.show(Done(each.number, self._asleep, reason))
            elif isinstance(each, AskCache):
                self.show(CacheAnswered(each.number))

    def _pause(self, complaint: str) -> None:
        pause_s = self.watch.pause_s()
        if pause_s is None:
            self._give_up(
                f"{self.watch.num_deaths_in_a_row} engines in a row were lost, the last one "
                f"to: {complaint}"
            )
        else:
            self.reason = f"the engine is being restarted: {complaint}"
            self._start_at_s = time.monotonic() + pause_s

    def _give_up(self, reason: str) -> None:
        logger.error("no engine is started any more: %s", reason)
        self._has_failed, self.reason, self._start_at_s = True, reason, None
        if self._process is not None:
            self._process.kill()
            self._process = None
        self._journal.leave_engine()
        self._drop_questions(reason)
        self._end_all(reason)

    # -- commands
    # ----------------------------------------------------------------------------------------------

    def _ask(self, question: Question) -> None:
        if isinstance(question, Pause):
            self._pause_command = question
            if self._process is None or not self.watch.is_loaded:
                self.show(Done(question.number, self._asleep))
                return
        self._questions.append(question)

    def _add(self, prepared: PreparedRequest, stream: OutputSink) -> None:
        self._post.open(prepared.spec.request_id, stream)
        try:
            entry = self._journal.add(prepared)
        except Exception as error:
            request_id, name = prepared.spec.request_id, type(error).__name__
            log_failure(logger, f"request {request_id} could not be taken in", error)
            message = f"the request could not be taken in: {name}"
            self._deliver([RequestOutput(request_id, None, [], [], finished=True, error=message)])
            return
        if self._has_failed or self._is_closing:
            self._deliver(
                self._journal.end(
                    entry, FinishReason.ERROR, self.reason or "the server is shutting down"
                )
            )

    def _end(self, request_id: str, reason: FinishReason, error: str | None) -> None:
        entry = self._journal.find(request_id)
        if entry is not None:
            self._deliver(self._journal.end(entry, reason, error))

    def _end_all(self, message: str) -> None:
        entries: Sequence[JournalEntry] = list(self._journal.entries.values())
        for entry in entries:
            self._deliver(self._journal.end(entry, FinishReason.ERROR, message))
