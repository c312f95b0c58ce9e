"""Starts an engine's process and ends it. The only code that knows how one is run."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

from quire.engine.process.channel import Channel, ChannelClosed
from quire.engine.process.messages import JSON_LOGS, Start, Up
from quire.errors import EngineError

_KILL_TIMEOUT_S = 10.0
_COMMAND = (sys.executable, "-P", "-m", "quire.engine.process")
"""-P: the current folder is no place to import modules from."""


class EngineProcess:
    """A running engine's process, and the channel to it: one end of a socket pair, whose other end
    the process inherits.

    A pair has no name, so no other process can connect to it. With
    `has_json_logs`, what it logs is JSON.
    """

    def __init__(
        self, start: Start, command: Sequence[str] = _COMMAND, *, has_json_logs: bool = False
    ) -> None:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [
                        *command,
                        str(theirs.fileno()),
                        str(os.getpid()),
                        *([JSON_LOGS] if has_json_logs else []),
                    ],
                    stdin=subprocess.DEVNULL,
                    cwd="/",  # it cannot be deleted; all paths are absolute
                    pass_fds=[theirs.fileno()],
                    # a terminal's Ctrl-C is for the server, which decides what becomes of the
                    # engine
                    start_new_session=True,
                )
        except OSError as error:
            ours.close()
            raise EngineError(
                f"the engine's process cannot be started: {type(error).__name__}"
            ) from error
        self.channel: Channel[Up] = Channel(ours, Up)
        # it has ended already, as the receiver will find out
        with contextlib.suppress(ChannelClosed):
            self.channel.send(start)

    @property
    def pid(self) -> int:
        """The operating system's number."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    def describe_end(self) -> str:
        """Return how it ended, for a log."""
        code = self._process.poll()
        if code is None:
            return "it is still running"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"killed by {signal.Signals(-code).name}"
        return f"exit code {code}"

    def kill(self) -> None:
        """End it at once, frozen or not, and wait until the system has taken back what it held.
        Idempotent."""
        self.channel.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_TIMEOUT_S)
