"""`python -m quire.engine.ranks`: one rank. Told what to build by a line of JSON on its standard
input, and over when that is closed.

With `--fork N` it forks such ranks instead, as it is asked to by descriptor N
(`quire.parallel.fork_server`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from quire.common.failures import is_final, log_failure
from quire.errors import QuireError
from quire.parallel.fork_server import FORK, serve_forks
from quire.parallel.processes import BEAT_INTERVAL_S

logger = logging.getLogger(__name__)
_MAX_ERROR_CHARS = 4096
"""Of which JSON makes six bytes each at most: a fraction of the longest answer that is read."""


def main(arguments: Sequence[str]) -> int:
    """Serve until rank 0 is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if arguments and arguments[0] == FORK:
        environment = serve_forks(int(arguments[1]), _import)
        if environment is None:
            return 0
        os.environ.clear()
        os.environ.update(environment)
    return _run_rank()


def _run_rank() -> int:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no answer
    told = sys.stdin.readline()
    if not told:  # rank 0 is gone already
        return 0
    start = json.loads(told)
    logging.basicConfig(format=f"quire: rank {start['rank']}: %(levelname)s: %(message)s")
    threading.Thread(target=_end_with_input, name="quire-parent", daemon=True).start()
    try:
        with _signs_of_life(answers):
            serve, end = _build(start)
    except Exception as error:
        is_expected = isinstance(error, QuireError)
        if not is_expected:
            log_failure(logger, "the rank could not be built", error)
        text = str(error) if is_expected else f"a rank could not be built: {type(error).__name__}"
        _answer(answers, {"error": text[:_MAX_ERROR_CHARS], "is_final": is_final(error)})
        return 1
    _answer(answers, {"ready": True})
    try:
        serve()
    except Exception as error:
        log_failure(logger, "the rank ends", error)
        return 1
    finally:
        end()
    return 0


def _import() -> None:
    import quire.engine.ranks.building  # noqa: F401


def _build(start: Mapping[str, Any]) -> tuple[Callable[[], None], Callable[[], None]]:
    from quire.engine.ranks.building import build_rank  # which takes seconds

    return build_rank(start)


@contextlib.contextmanager
def _signs_of_life(answers: TextIO) -> Iterator[None]:
    """Give them while the rank is loading."""
    is_over = threading.Event()

    def beat() -> None:
        with contextlib.suppress(OSError):  # rank 0 is gone
            while not is_over.wait(BEAT_INTERVAL_S):
                _answer(answers, {})

    thread = threading.Thread(target=beat, name="quire-loading", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()  # what follows is the last line


def _answer(answers: TextIO, answer: Mapping[str, object]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _end_with_input() -> None:
    """Rank 0 is gone, however it ended."""
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
