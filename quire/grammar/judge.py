"""Whether grammars can be compiled: asked before a request is accepted, so that one that cannot is
refused with the reason.

They are compiled without a vocabulary in a process that can be ended (`trial`), one after the
other, whatever waits for the verdict: an event loop, or a program's thread. Verdicts are
remembered, within bounds. Both the queue and the wait have limits, and whatever exceeds them is
refused: a grammar is never taken on trust.
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import queue
import threading
from collections import OrderedDict
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Protocol

from quire.core.grammars import Grammar
from quire.errors import InvalidParameterError, UnavailableError
from quire.grammar.trial import Trial, TrialError

MAX_VERDICTS = 4096
MAX_WAITING = 256
"""Grammars that may wait to be judged; each takes at most about 0.3 s, and as a rule 2 ms."""
MAX_WAIT_S = 10.0

_Verdict = str | None
"""What is wrong with a grammar, or None."""


class Compiler(Protocol):
    """What tells whether grammars can be compiled."""

    def judge(self, grammar: Grammar) -> str | None:
        """Return what is wrong with one, or None. Raises TrialError where that is not found out."""
        ...

    def close(self) -> None:
        """End what it has started."""
        ...


class GrammarJudge:
    """A thread that asks a process, and what it found out."""

    def __init__(self, compiler: Compiler | None = None) -> None:
        self._compiler: Compiler = compiler or Trial()
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()
        self._queue: queue.Queue[tuple[bytes, Grammar, Future[_Verdict]]] = queue.Queue(MAX_WAITING)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def check(self, grammar: Grammar) -> None:
        """Wait for the verdict. Raises InvalidParameterError with the reason, or UnavailableError
        where too many wait, or none comes in time."""
        verdict = self._ask(grammar)
        try:
            _enforce(verdict.result(MAX_WAIT_S) if isinstance(verdict, Future) else verdict)
        except FutureTimeoutError:
            raise _too_late() from None

    async def check_async(self, grammar: Grammar) -> None:
        """Check as `check` does, for an event loop, which goes on meanwhile."""
        verdict = self._ask(grammar)
        if isinstance(verdict, Future):
            try:
                async with asyncio.timeout(MAX_WAIT_S):
                    verdict = await asyncio.wrap_future(verdict)
            except TimeoutError:
                raise _too_late() from None
        _enforce(verdict)

    def _ask(self, grammar: Grammar) -> Future[_Verdict] | _Verdict:
        digest = hashlib.blake2b(
            f"{grammar.kind}\0{grammar.text}".encode(), digest_size=16
        ).digest()
        with self._lock:
            if digest in self._verdicts:
                self._verdicts.move_to_end(digest)
                return self._verdicts[digest]
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="quire-grammar-judge", daemon=True
                )
                self._thread.start()
                atexit.register(self.close)
        future: Future[_Verdict] = Future()
        try:
            self._queue.put_nowait((digest, grammar, future))
        except queue.Full:
            raise UnavailableError(
                f"{MAX_WAITING} grammars wait to be judged already",
                state="overloaded",
                retry_after_s=2,
            ) from None
        return future

    def close(self) -> None:
        """End the process. Idempotent."""
        atexit.unregister(self.close)
        self._compiler.close()

    def _run(self) -> None:
        while True:
            digest, grammar, future = self._queue.get()
            if not future.set_running_or_notify_cancel():  # who asked has left
                continue
            try:
                verdict = self._compiler.judge(grammar)
            except TrialError as error:  # which says nothing of the grammar
                future.set_exception(
                    UnavailableError(f"structured_outputs: {error}", state="overloaded")
                )
                continue
            except Exception as error:  # this thread must live
                future.set_exception(error)
                continue
            with self._lock:
                self._verdicts[digest] = verdict
                if len(self._verdicts) > MAX_VERDICTS:
                    self._verdicts.popitem(last=False)
            future.set_result(verdict)


judge = GrammarJudge()
"""The process's; it starts its thread with the first grammar."""


def _too_late() -> UnavailableError:
    """Say that there is no verdict yet: what a grammar costs is counted in processor time, so that
    others before it, or a busy machine, took this long."""
    return UnavailableError(
        f"structured_outputs: the grammar was not compiled within {MAX_WAIT_S:g} s; try again",
        state="overloaded",
        retry_after_s=2,
    )


def _enforce(verdict: _Verdict) -> None:
    if verdict is not None:
        raise InvalidParameterError(verdict, param="structured_outputs")
