"""The engine's process: builds the model, and serves one channel with it until that ends.

Ends when the server does: on the end of the connection, on anything that is not of the protocol,
and by the kernel's word should the server die without closing it. It listens to no other process,
and to no terminal: when to end is the server's decision.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable

from quire.common import garbage
from quire.common.failures import is_final, log_failure
from quire.common.file_states import check_unchanged
from quire.common.json_logs import use_json_logs
from quire.config.engine import EngineConfig
from quire.engine.assembly.builder import build_executor, look_ahead_of, pace_of, prerequisites_of
from quire.engine.assembly.preparation import begin_loading, digest_key, plan_engine
from quire.engine.loop.step_loop import StepLoop, loop_of
from quire.engine.process.channel import Channel, ChannelClosed, ProtocolError, wait
from quire.engine.process.messages import (
    PROTOCOL_VERSION,
    Down,
    Heartbeat,
    Ready,
    Start,
    StartFailed,
)
from quire.engine.process.service import Service
from quire.errors import EngineError, QuireError

logger = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S = 0.25
_START_TIMEOUT_S = 30.0
_PR_SET_PDEATHSIG = 1

BuildLoop = Callable[[EngineConfig], StepLoop]


class Host:
    """One engine and its connection."""

    def __init__(self, channel: Channel[Down], build: BuildLoop) -> None:
        self._channel = channel
        self._build = build
        self._service: Service | None = None
        self._is_over = threading.Event()

    def run(self) -> None:
        """Serve until the connection ends."""
        heartbeat = threading.Thread(target=self._beat, name="quire-heartbeat", daemon=True)
        try:
            start = self._receive_start()
            heartbeat.start()
            self._service = self._load(start)
            while True:
                self._service.serve_round(self._channel)
        except ChannelClosed:
            logger.debug("the server is gone")
        except ProtocolError as error:
            logger.error("the connection is closed: %s", error)
        finally:
            self._is_over.set()
            self._channel.close()

    def _receive_start(self) -> Start:
        if not wait((self._channel,), (), _START_TIMEOUT_S):
            raise ChannelClosed("the server says nothing")
        messages = self._channel.receive()
        if len(messages) != 1 or not isinstance(messages[0], Start):
            raise ProtocolError("the first message must say what to build")
        start = messages[0]
        if start.version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"version {start.version} instead of {PROTOCOL_VERSION}: restart the server"
            )
        return start

    def _load(self, start: Start) -> Service:
        began_s = time.monotonic()
        try:
            check_unchanged(start.files)
            loop = self._build(EngineConfig.from_options(start.model, start.options))
            check_unchanged(start.files)  # also while they were read
        except Exception as error:
            is_expected = isinstance(error, QuireError)
            if not is_expected:
                log_failure(logger, "the engine could not be built", error)
            message = (
                str(error)
                if is_expected
                else f"the engine could not be built: {type(error).__name__}"
            )
            # Memory may come free, for instance once the system has taken back what the engine
            # before this one held; and a rank that was killed may be built the next time.
            self._channel.send(StartFailed(message, is_final(error)))
            raise ChannelClosed("nothing to serve") from error
        service = Service(loop)
        garbage.settle()
        self._channel.send(Ready(time.monotonic() - began_s))
        return service

    def _beat(self) -> None:
        """Send signs of life, whatever the main thread is doing;
        it cannot while the process is frozen."""
        with contextlib.suppress(EngineError):
            while not self._is_over.wait(HEARTBEAT_INTERVAL_S):
                service = self._service
                if not self._channel.num_unsent_bytes:
                    self._channel.send(Heartbeat() if service is None else service.heartbeat())


def build_loop(config: EngineConfig) -> StepLoop:
    """Return a loop around the model that the options name."""
    planned = begin_loading(plan_engine(config))
    plan = planned.plan
    pace, cost_file = pace_of(planned)
    executor = build_executor(planned)
    loop = loop_of(plan)
    return StepLoop(
        plan.limits,
        executor,
        time.monotonic,
        loop,
        prerequisites=prerequisites_of(plan, pace),
        digest_key=digest_key(plan),
        pace=pace,
        cost_file=cost_file,
        look_ahead=look_ahead_of(planned, pace),
    )


def die_with_parent() -> None:
    """Ask the kernel to end this process with its parent (Linux);
    elsewhere the end of the connection does."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main(
    fileno: int, parent_pid: int, build: BuildLoop = build_loop, *, has_json_logs: bool = False
) -> int:
    """Run an engine's process on an inherited socket."""
    die_with_parent()
    if os.getppid() != parent_pid:  # it died before the kernel was asked
        return 0
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if has_json_logs:
        use_json_logs(logging.WARNING)
    else:
        logging.basicConfig(format="quire: engine: %(levelname)s: %(message)s")
    with socket.socket(fileno=fileno) as sock:
        Host(Channel(sock, Down), build).run()
    return 0
