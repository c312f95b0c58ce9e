"""Commands to all replicas, for a caller that waits: sent at once, answered by each in its turn.

Used by the thread that steps. Answers come by supervisors' threads through an inbox. A wait that is
interrupted leaves its answers to come, and the next command waits for them first, so that a replica
never has two commands.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from quire.engine.front.client import Question, Seen
from quire.engine.front.failures import like
from quire.engine.process.messages import Done
from quire.engine.replicas.inbox import Inbox
from quire.engine.replicas.link import Replicas
from quire.errors import EngineError, NotAvailableError, QuireError

TIMEOUT_S = 600.0
"""For weights that are written, read or loaded."""
_WAIT_S = 0.05


class Commands:
    """What is asked of the engines behind one link."""

    def __init__(self, link: Replicas, inbox: Inbox) -> None:
        """Take the link's answers from now on."""
        self._link, self._inbox = link, inbox
        self._num_asked = 0
        self._open: dict[int, int] = {}
        """By number of question: the replica that has not answered."""
        self._answers: dict[int, Seen] = {}
        link.show = lambda seen: inbox.call_soon_threadsafe(self._take, seen)

    def ask(
        self, make: Callable[[int], Question], replicas: Sequence[int] | None = None
    ) -> list[Seen]:
        """Put a question, made with a number of its own for each, to some replicas, by default to
        all; return their answers in this order. Raises EngineError where one does not answer."""
        self._wait(set(self._open))
        numbers = []
        for replica in range(self._link.num_replicas) if replicas is None else replicas:
            self._num_asked += 1
            numbers.append(self._num_asked)
            self._open[self._num_asked] = replica
            self._link.ask(make(self._num_asked), replica)
        self._wait(set(numbers))
        return [self._answers.pop(number) for number in numbers]

    def _wait(self, numbers: set[int]) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while missing := numbers & self._open.keys():
            self._inbox.run(_WAIT_S)
            for number in missing & self._open.keys():
                self._check(self._open[number], time.monotonic() > deadline_s)

    def _check(self, replica: int, is_late: bool) -> None:
        """Raise EngineError where no answer is to be waited for any more."""
        status = self._link.status(0, 0).replicas[replica]
        if is_late or status.state in ("failed", "closed"):
            self._open = {n: other for n, other in self._open.items() if other != replica}
            raise EngineError(
                f"replica {replica} does not answer; it is {status.state}"
                + (f": {status.reason}" if status.reason else "")
            )

    def _take(self, seen: Seen) -> None:
        if self._open.pop(seen.number, None) is not None:
            self._answers[seen.number] = seen


def failure_of(answer: Seen) -> QuireError | None:
    """Return why a command was not carried out, to be raised; None where it was."""
    assert isinstance(answer, Done)
    if answer.error is None:
        return None
    return (NotAvailableError if answer.is_lasting else EngineError)(answer.error)


def failure_of_any(answers: Sequence[Seen]) -> QuireError | None:
    """Return why the first of all replicas that failed did so, with its number."""
    for replica, failure in enumerate(map(failure_of, answers)):
        if failure is not None:
            return like(failure, f"replica {replica}: {failure}")
    return None
