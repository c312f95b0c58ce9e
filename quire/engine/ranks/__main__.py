"""`python -m quire.engine.ranks`: one rank. Told what to build by a line of JSON on its standard
input, and over when that is closed."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TextIO

from quire.common.failures import log_failure
from quire.common.file_states import check_unchanged
from quire.config.engine import EngineConfig
from quire.errors import QuireError

if TYPE_CHECKING:
    from quire.executor.follower import Follower

logger = logging.getLogger(__name__)
_ALL_MEMORY = 1 << 60
"""What fits was decided where the group was planned; some of it is taken by now."""


def main() -> int:
    """Serve until rank 0 is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no answer
    start = json.loads(sys.stdin.readline())
    logging.basicConfig(format=f"quire: rank {start['rank']}: %(levelname)s: %(message)s")
    threading.Thread(target=_end_with_input, name="quire-parent", daemon=True).start()
    try:
        follower, beat = _build(start)
    except Exception as error:
        is_expected = isinstance(error, QuireError)
        if not is_expected:
            log_failure(logger, "the rank could not be built", error)
        text = str(error) if is_expected else f"a rank could not be built: {type(error).__name__}"
        _answer(answers, {"error": text})
        return 1
    _answer(answers, {"ready": True})
    try:
        follower.serve(lambda: True)
    except Exception as error:
        log_failure(logger, "the rank ends", error)
        return 1
    finally:
        beat.set()
    return 0


def _build(start: Mapping[str, Any]) -> tuple[Follower, threading.Event]:
    """Build what rank 0 describes, and begin to give signs of life."""
    from quire.engine.assembly.builder import kv_memory, select
    from quire.engine.assembly.loading import load_model
    from quire.engine.assembly.preparation import plan_engine
    from quire.engine.assembly.threads import set_num_threads
    from quire.engine.plan.machine import Machine
    from quire.executor.follower import Follower
    from quire.parallel.processes import BEAT_INTERVAL_S
    from quire.parallel.shared_memory import SharedMemory

    shared = SharedMemory(start["fileno"], start["command_bytes"])
    exchange = shared.exchange(start["rank"], start["num_ranks"], start["silence_s"])
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(BEAT_INTERVAL_S):
            exchange.native.beat()

    threading.Thread(target=beat, name="quire-beat", daemon=True).start()
    check_unchanged(start["files"])
    config = EngineConfig.from_options(start["model"], start["options"])
    machine = replace(Machine.inspect(), available_memory=_ALL_MEMORY)
    planned = plan_engine(config, machine)
    set_num_threads(planned.plan.num_threads)
    model = load_model(planned, select(planned.plan).kernels, None, exchange).decoder
    check_unchanged(start["files"])  # also while they were read
    memory = kv_memory(planned.plan, model)
    return Follower(model, memory, shared, exchange), is_over


def _answer(answers: TextIO, answer: Mapping[str, object]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _end_with_input() -> None:
    """Rank 0 is gone, however it ended."""
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
