"""Whether grammars can be compiled: asked before a request is accepted, so that one that cannot is
refused with the reason.

Compiles without a vocabulary, in one thread of its own for the whole process, whatever waits for
the verdict: an event loop, or a program's thread. Verdicts are remembered, within bounds. Both the
queue and the wait have limits, and whatever exceeds them is refused: a grammar is never taken on
trust.
"""

from __future__ import annotations

import asyncio
import hashlib
import queue
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from quire.core.grammars import Grammar
from quire.errors import InvalidParameterError, UnavailableError
from quire.grammar.backend import validate, with_deep_stack

MAX_VERDICTS = 4096
MAX_WAITING = 256
"""Grammars that may wait to be judged; each takes at most about 0.3 s, and as a rule 2 ms."""
MAX_WAIT_S = 10.0

MAX_COST_S = 1.0
"""Processor time to compile a grammar and take its first step;
the engine will spend as much of a step on it."""

_Verdict = str | None
"""What is wrong with a grammar, or None."""


class GrammarJudge:
    """A thread, and what it found out."""

    def __init__(self) -> None:
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()
        self._queue: queue.Queue[tuple[bytes, Grammar, Future[_Verdict]]] = queue.Queue(MAX_WAITING)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def check(self, grammar: Grammar) -> None:
        """Wait for the verdict. Raises InvalidParameterError with the reason,
        or UnavailableError where too many wait."""
        verdict = self._ask(grammar)
        try:
            _enforce(verdict.result(MAX_WAIT_S) if isinstance(verdict, Future) else verdict)
        except FutureTimeoutError:
            _enforce(_TOO_SLOW)

    async def check_async(self, grammar: Grammar) -> None:
        """Check as `check` does, for an event loop, which goes on meanwhile."""
        verdict = self._ask(grammar)
        if isinstance(verdict, Future):
            try:
                async with asyncio.timeout(MAX_WAIT_S):
                    verdict = await asyncio.wrap_future(verdict)
            except TimeoutError:
                verdict = _TOO_SLOW
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
                self._thread = with_deep_stack(self._run, "quire-grammar-judge")
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

    def _run(self) -> None:
        while True:
            digest, grammar, future = self._queue.get()
            if not future.set_running_or_notify_cancel():  # who asked has left
                continue
            verdict: _Verdict = None
            began_s = time.thread_time()
            try:
                validate(grammar)
                if time.thread_time() - began_s > MAX_COST_S:
                    verdict = (
                        f"structured_outputs: the grammar takes more than {MAX_COST_S:g} s to "
                        "compile and begin"
                    )
            except InvalidParameterError as error:
                verdict = str(error)
            except (
                BaseException
            ) as error:  # a panic of the library's is no Exception, and this thread must live
                verdict = (
                    f"structured_outputs: the grammar cannot be compiled ({type(error).__name__})"
                )
            with self._lock:
                self._verdicts[digest] = verdict
                if len(self._verdicts) > MAX_VERDICTS:
                    self._verdicts.popitem(last=False)
            future.set_result(verdict)


_TOO_SLOW = f"structured_outputs: the grammar was not compiled within {MAX_WAIT_S:g} s"

judge = GrammarJudge()
"""The process's; it starts its thread with the first grammar."""


def _enforce(verdict: _Verdict) -> None:
    if verdict is not None:
        raise InvalidParameterError(verdict, param="structured_outputs")
