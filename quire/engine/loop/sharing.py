"""One engine for several threads: one of them steps at a time, and outputs reach the thread that
added the request.

Owns the lock around an engine and the post of its outputs. A `Session` is one caller's view:
requests that it adds, outputs that are its own, also where another session's step made them, so
that the requests of several threads share their steps. A thread waits at most for the step of
another; a call from inside a step (from a logits processor) could never be served and is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from quire.core import checks
from quire.core.beam_params import BeamSearchParams
from quire.core.params import SamplingParams
from quire.engine.front.adapters import ChosenAdapter
from quire.engine.front.beam_output import beam_output
from quire.engine.front.digest import Digest
from quire.engine.front.outputs import BeamSearchOutput, RequestOutput
from quire.engine.front.prompts import Prompt
from quire.engine.loop.engine import Engine
from quire.errors import EngineError
from quire.lora.request import LoRARequest

Output = RequestOutput | BeamSearchOutput


class SharedEngine:
    """An engine and the sessions that use it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._turn = threading.Lock()
        """Held by the thread that is next in line: one that steps again and again would
        otherwise keep all others out."""
        self._lock = threading.RLock()
        """One that knows who has it, and is never taken twice."""
        self._holder: int | None = None
        self._owners: dict[str, Session] = {}
        self._num_named = 0

    @contextmanager
    def held(self) -> Iterator[Engine]:
        """Hold the engine for this thread alone. Raises EngineError inside a step,
        which would wait for itself."""
        me = threading.get_ident()
        if self._holder == me:
            raise self._engine.nested_call()
        self._engine.refuse_nested_call()
        try:
            with self._turn:
                self._lock.acquire()
                self._holder = me
            if self._engine.is_torn:
                self._engine.interrupted()
                self._deliver(self._engine.take_lost())
            yield self._engine
        except BaseException:
            if self._holder == me:
                # interrupted: the requests of all sessions are lost, and the others must hear of it
                self._deliver(self._engine.take_lost())
            raise
        finally:
            if self._holder == me:
                self._holder = None
            with suppress(RuntimeError):  # it was interrupted while it waited
                self._lock.release()

    def enter(self, request_id: str | None, session: Session) -> str:
        """Note whose a request is, under a name of its own where it has none.
        The engine must be held."""
        while request_id is None:
            name, self._num_named = str(self._num_named), self._num_named + 1
            request_id = None if name in self._engine.open_requests else name
        # else the engine refuses it, and it stays with its owner
        if request_id not in self._engine.open_requests:
            self._owners[request_id] = session
        return request_id

    def forget(self, request_id: str, session: Session) -> None:
        """Drop the request's outputs from now on. The engine must be held."""
        if self._owners.get(request_id) is session:
            del self._owners[request_id]

    def step(self) -> None:
        """Run one step and give its outputs to their sessions. The engine must be held."""
        self._deliver(self._engine.step())
        self._engine.settle()

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            owner = self._owners.get(output.request_id)
            if owner is not None:
                owner.receive(output)
                if output.finished:
                    del self._owners[output.request_id]


class Session:
    """One caller's requests. Several threads may share it, too; an output is given out once."""

    def __init__(self, shared: SharedEngine) -> None:
        self._shared = shared
        self._ready: list[Output] = []
        self._open: dict[str, LoRARequest | None] = {}
        """Requests without a last output, with what they are answered with besides the model."""
        self._beams: dict[str, BeamSearchParams] = {}
        """Of those of them that are for beams."""

    @property
    def num_unfinished(self) -> int:
        """Requests whose last output has not been given out."""
        return len(self._open) + sum(map(is_last, self._ready))

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | Digest,
        *,
        request_id: str | None = None,
        adapter: ChosenAdapter | None = None,
        priority: int = 0,
    ) -> str:
        """Accept a request; returns its id, which is made up where none is given.
        Raises a RequestError."""
        if request_id is not None:
            checks.text("request_id", request_id)
        with self._shared.held() as engine:
            request_id = self._shared.enter(request_id, self)
            try:
                engine.add_request(
                    request_id,
                    prompt,
                    params.as_sampling() if isinstance(params, BeamSearchParams) else params,
                    adapter=None if adapter is None else adapter.version,
                    priority=priority,
                )
            except BaseException:
                if request_id not in self._open:
                    self._shared.forget(request_id, self)
                raise
            self._open[request_id] = None if adapter is None else adapter.request
            if isinstance(params, BeamSearchParams):
                self._beams[request_id] = params
        return request_id

    def step(self) -> list[Output]:
        """Return what came of this session's requests since it was last asked; where that is
        nothing, after one step."""
        with self._shared.held() as engine:
            if not self._ready and self._open:
                if engine.asleep:
                    raise EngineError("the engine is asleep; call wake_up() first")
                if engine.is_closed:
                    raise EngineError("the engine was closed while requests were running")
                if not engine.has_work:
                    raise EngineError("the engine lost a request; this is a bug")
                self._shared.step()
            ready, self._ready = self._ready, []
        return ready

    def abort(self, request_id: str) -> Output | None:
        """End one of this session's requests; returns what there is of it."""
        with self._shared.held() as engine:
            if request_id not in self._open:
                return None
            request = self._open.pop(request_id)
            self._shared.forget(request_id, self)
            output = engine.abort(request_id)
        beams = self._beams.pop(request_id, None)
        if output is None or beams is not None:
            return None
        output.name_adapter(request)
        return output

    def receive(self, output: RequestOutput) -> None:
        """Take an output that a step made. The engine is held."""
        output.name_adapter(self._open.get(output.request_id))
        beams = self._beams.pop(output.request_id, None)
        self._ready.append(output if beams is None else beam_output(output, beams))
        if output.finished:
            self._open.pop(output.request_id, None)


def is_last(output: Output) -> bool:
    """Return whether nothing comes after an output of its request."""
    return isinstance(output, BeamSearchOutput) or output.finished
