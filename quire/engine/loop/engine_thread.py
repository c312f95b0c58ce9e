"""A `Link` to an engine in this process, which runs in a thread of its own. If this engine dies,
its requests do too.

The thread steps while there is work, and carries out commands between steps; no other thread
touches the engine. Every wait ends with the thread: if it dies, all streams end with an
EngineError.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable

from quire.common.failures import log_failure
from quire.common.residence import UNDER_WAY
from quire.common.threads import close_at_exit
from quire.engine.front.client import Question, Seen
from quire.engine.front.outputs import RequestOutput
from quire.engine.front.requests import PreparedRequest
from quire.engine.front.status import EngineStatus
from quire.engine.front.streams import OutputSink, Post, send
from quire.engine.loop.counters import count
from quire.engine.loop.engine import Engine
from quire.engine.process.messages import Done, UpdateWeights
from quire.engine.process.service import answer
from quire.engine.process.updates import WeightUpdate
from quire.errors import EngineError, QuireError

logger = logging.getLogger(__name__)

_LOADING_S = 0.01
"""So often an idle thread looks whether the next weights are loaded."""
_IDLE_WAIT_S = 0.5
"""How long the idle thread sleeps between looks at whether it should stop;
a command wakes it at once."""

Command = Callable[[Engine], None]


class EngineThread:
    """An engine, which this owns and closes, and its thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        engine.record_steps()
        self.failure: BaseException | None = None
        """What the thread died of."""
        self.show: Callable[[Seen], None] = lambda answer: None
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._post = Post()
        self._update: WeightUpdate | None = None
        self._arrivals: list[tuple[str, Command, OutputSink]] | None = None
        """Requests that wait for the next weights; None where they do not."""
        self._is_closing = False
        self._is_over = False
        self._ending = threading.Lock()
        """Guards `_is_over`: a command is either queued before the thread's last
        look at the queue, or refused."""
        self._process_id = os.getpid()
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)

    # -- for other threads
    # -------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()
        close_at_exit(self)

    @property
    def is_running(self) -> bool:
        """Whether requests can be taken."""
        return not self._is_over and not self._is_closing

    def submit(self, command: Command) -> None:
        """Have the thread do something between two steps. Raises EngineError where it has ended, or
        is in the process that this one was forked from: nothing here would answer."""
        if os.getpid() != self._process_id:
            raise EngineError(
                f"the engine runs in process {self._process_id}, which this one was forked from; "
                "make an AsyncLLM in each process, or start processes with spawn"
            )
        with self._ending:
            if self._is_over:
                raise self._last_word()
            self._commands.put(command)

    def add(self, prepared: PreparedRequest, stream: OutputSink) -> None:
        self.begin(prepared.spec.request_id, lambda engine: engine.add(prepared), stream)

    def begin(self, request_id: str, add: Command, stream: OutputSink) -> None:
        """Serve the request that `add` gives to the engine;
        what that raises is what its stream ends with."""
        self.submit(lambda engine: self._begin(engine, request_id, add, stream))

    def abort(self, request_id: str) -> None:
        self.submit(lambda engine: self._abort(engine, request_id, None))

    def leave(self, request_id: str, stream: OutputSink) -> None:
        """End the request of a stream whose reader has gone. One that was refused,
        since its id is in use, ends no other request."""
        with contextlib.suppress(EngineError):  # an engine that is over has no request to abort
            self.submit(lambda engine: self._abort(engine, request_id, stream))

    def ask(self, question: Question, replica: int = 0) -> None:
        if isinstance(question, UpdateWeights):
            command = question
            self.submit(lambda engine: self._begin_update(engine, command))
        else:
            asked = question
            self.submit(lambda engine: self.show(answer(engine, asked)))

    def hold_arrivals(self) -> None:
        """Keep requests that come from now on. To be called in the thread."""
        self._arrivals = self._arrivals if self._arrivals is not None else []

    def let_in(self, engine: Engine) -> None:
        """Take what was kept, and whatever comes. To be called in the thread."""
        arrivals, self._arrivals = self._arrivals or [], None
        for request_id, add, stream in arrivals:
            self._begin(engine, request_id, add, stream)

    def end_all(self, message: str) -> None:
        self.submit(lambda engine: self._end_all(engine, EngineError(message)))

    def close(self, timeout_s: float = 30.0) -> None:
        self._is_closing = True
        with contextlib.suppress(EngineError):
            self.submit(lambda engine: None)  # wakes an idle thread
        self._thread.join(timeout_s)

    def status(self, num_requests: int, num_prompt_tokens: int) -> EngineStatus:
        asleep = self.engine.asleep
        return EngineStatus(
            state=("sleeping" if asleep else "ready")
            if self.is_running
            else "failed"
            if self.failure is not None
            else "closed",
            reason=f"it sleeps: {' and '.join(asleep)} went back to the system"
            if self.is_running and asleep
            else ""
            if self.is_running
            else str(self._last_word()),
            num_requests=num_requests,
            num_prompt_tokens=num_prompt_tokens,
            **count(self.engine.scheduler).counters(),
        )

    # -- the thread
    # ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._take_commands()
                self._end_update()
                if self.engine.can_step:
                    self._step()
                elif not self.engine.has_work:
                    self.engine.idle()
        except BaseException as error:
            log_failure(logger, "the engine's thread died", error)
            self.failure = error
        finally:
            self._end()

    def _step(self) -> None:
        self._post.deliver(
            output for output in self.engine.step() if isinstance(output, RequestOutput)
        )

    def _take_commands(self) -> None:
        """Carry out what is queued; an idle engine waits for something."""
        with contextlib.suppress(queue.Empty):
            if not self.engine.can_step:
                wait_s = _IDLE_WAIT_S if self._update is None else _LOADING_S
                self._commands.get(timeout=wait_s)(self.engine)
            while True:
                self._commands.get_nowait()(self.engine)

    def _begin_update(self, engine: Engine, command: UpdateWeights) -> None:
        if self._update is not None:
            self.show(Done(command.number, engine.asleep, UNDER_WAY))
            return
        self._update = WeightUpdate(engine, command)
        if command.waits:
            self.hold_arrivals()

    def _end_update(self) -> None:
        done = None if self._update is None else self._update.take_in()
        if done is not None:
            self._update = None
            self.let_in(self.engine)
            self.show(done)

    def _begin(self, engine: Engine, request_id: str, add: Command, stream: OutputSink) -> None:
        if self._arrivals is not None:
            self._arrivals.append((request_id, add, stream))
            return
        try:
            add(engine)
        except Exception as error:
            if not isinstance(error, QuireError):
                log_failure(logger, f"request {request_id} could not be added", error)
                error = EngineError(f"the request could not be added: {type(error).__name__}")
            send([(stream, error)])
            return
        self._post.open(request_id, stream)

    def _abort(self, engine: Engine, request_id: str, stream: OutputSink | None) -> None:
        for place, (arrived, _, waiting) in enumerate(self._arrivals or ()):
            if arrived == request_id and stream in (None, waiting):
                assert self._arrivals is not None
                del self._arrivals[place]
                send([(waiting, EngineError("the request was aborted before it was computed"))])
                return
        if stream is not None and self._post.find(request_id) is not stream:
            return
        output = engine.abort(request_id)
        if output is not None:
            self._post.deliver([output])

    def pause(self, engine: Engine) -> None:
        """Compute nothing more; what was computed elsewhere before is delivered. To be called in
        the thread."""
        engine.pause()
        if engine.can_step:
            self._step()

    def abort_all(self, engine: Engine) -> None:
        """End every request with what there is. To be called in the thread."""
        for request_id in list(engine.open_requests):
            self._abort(engine, request_id, None)

    def _end_all(self, engine: Engine, error: EngineError) -> None:
        self._post.fail_all(error)
        arrivals, self._arrivals = self._arrivals or [], None
        send([(stream, error) for _, _, stream in arrivals])
        for request_id in list(engine.open_requests):
            engine.abort(request_id)

    def _end(self) -> None:
        """Refuse new commands and fail all that still wait: nothing runs any more."""
        with self._ending:
            self._is_over = True
        with contextlib.suppress(Exception):
            self.engine.close()
        self._post.fail_all(self._last_word())
        self.let_in(self.engine)
        with contextlib.suppress(queue.Empty):
            while True:  # a closed engine refuses what is added now, and its stream hears of it
                self._commands.get_nowait()(self.engine)

    def _last_word(self) -> EngineError:
        return EngineError(
            "the engine was closed"
            if self.failure is None
            else f"the engine died: {type(self.failure).__name__}"
        )
