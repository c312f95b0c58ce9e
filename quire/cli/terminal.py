"""A status line at the bottom of the terminal that streamed text cannot garble.

Where text and status share a terminal, the last row is taken out of the scrolling region (DECSTBM),
so that text scrolls above it; the region is given back at the end, on Ctrl-C, on Ctrl-Z and on
termination, and set anew when the window is resized. Where the text goes elsewhere, the status
overwrites itself on one line. Without a terminal there is none.

Escape sequences: ECMA-48 and the DEC private modes that xterm, VTE, tmux, screen and the Linux
console share.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Protocol, TextIO

_MIN_ROWS = 5
_MIN_INTERVAL_S = 0.1
_SAVE, _RESTORE, _ERASE_LINE = "\0337", "\0338", "\033[2K"


class StatusLine(Protocol):
    """Somewhere to show one line that changes."""

    def show(self, text: str) -> None:
        """Show `text` (cut to the width), unless the last one was shown a moment ago."""
        ...

    def close(self) -> None:
        """Remove the line and leave the terminal as it was. Idempotent."""
        ...


class NoStatus:
    """Without a terminal."""

    def show(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class OverwrittenStatus:
    """One line that is written over and over: for a terminal to which nothing
    else is written meanwhile."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._throttle = _Throttle()
        self._is_shown = False

    def show(self, text: str) -> None:
        """See `StatusLine`."""
        if self._throttle.is_due():
            self._is_shown = True
            self._write(f"\r{_ERASE_LINE}{text[: _size(self._stream).columns - 1]}")

    def close(self) -> None:
        """See `StatusLine`."""
        if self._is_shown:
            self._is_shown = False
            self._write(f"\r{_ERASE_LINE}")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._stream.write(text)
            self._stream.flush()


class ReservedStatus:
    """The terminal's last row, outside the scrolling region."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._throttle = _Throttle()
        self._num_rows = 0
        self._text = ""

    def show(self, text: str) -> None:
        """See `StatusLine`. The first call reserves the row."""
        self._text = text
        size = _size(self._stream)
        if size.lines != self._num_rows:
            self._reserve(size.lines)
        elif not self._throttle.is_due():
            return
        if self._num_rows:
            self._write(
                f"{_SAVE}\033[{self._num_rows};1H{_ERASE_LINE}"
                f"\033[7m{text[: size.columns - 1]}\033[0m{_RESTORE}"
            )

    def close(self) -> None:
        """See `StatusLine`."""
        if self._num_rows:
            # Resetting the region moves the cursor, so it is saved and restored around it.
            self._write(f"{_SAVE}\033[{self._num_rows};1H{_ERASE_LINE}\033[r{_RESTORE}")
            self._num_rows = 0

    def redraw(self) -> None:
        """Take the row again after something else had the terminal."""
        if self._text:
            self._throttle.reset()
            self.show(self._text)

    def _reserve(self, num_rows: int) -> None:
        self.close()
        if num_rows >= _MIN_ROWS:
            # Index (one line down, same column) makes sure that the cursor does not stay in the row
            # that leaves the region.
            self._write(f"\033D\033[1A{_SAVE}\033[1;{num_rows - 1}r{_RESTORE}")
            self._num_rows = num_rows

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            self._stream.write(text)
            self._stream.flush()


@contextlib.contextmanager
def status_line(*, is_enabled: bool = True) -> Iterator[StatusLine]:
    """Show the status line that suits stdout and stderr;
    the terminal is restored however the block is left."""
    if not is_enabled or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield NoStatus()
        return
    if not sys.stdout.isatty():
        overwritten = OverwrittenStatus(sys.stderr)
        try:
            yield overwritten
        finally:
            overwritten.close()
        return
    reserved = ReservedStatus(sys.stderr)
    try:
        with _signals(reserved):
            yield reserved
    finally:
        reserved.close()


@contextlib.contextmanager
def _signals(status: ReservedStatus) -> Iterator[None]:
    """Give the row back before the process is stopped or terminated;
    take it again when it continues."""

    def terminate(number: int, frame: FrameType | None) -> None:
        status.close()
        raise SystemExit(128 + number)

    def suspend(number: int, frame: FrameType | None) -> None:
        status.close()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # stops here, and goes on here
        signal.signal(signal.SIGTSTP, suspend)
        status.redraw()

    handlers: dict[signal.Signals, Callable[[int, FrameType | None], None]] = {
        signal.SIGTERM: terminate,
        signal.SIGHUP: terminate,
        signal.SIGTSTP: suspend,
    }
    try:
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    except ValueError:  # not the main thread: the program that runs us there handles signals
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def printable(text: str) -> str:
    """Text that cannot steer a terminal: control characters but newline
    and tab are shown as U+FFFD."""
    if text.isprintable():
        return text
    return "".join(char if char in "\n\t" or not _is_control(char) else "\ufffd" for char in text)


def progress_bar(share: float, width: int = 20) -> str:
    """Return a bar such as `█████───────────────`."""
    num_full = round(max(0.0, min(1.0, share)) * width)
    return "█" * num_full + "─" * (width - num_full)


def _is_control(char: str) -> bool:
    return ord(char) < 0x20 or 0x7F <= ord(char) < 0xA0


def _size(stream: TextIO) -> os.terminal_size:
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        return os.terminal_size((80, 24))
    return size if size.columns > 1 and size.lines > 0 else os.terminal_size((80, 24))


class _Throttle:
    def __init__(self) -> None:
        self._last_s = -1.0

    def is_due(self) -> bool:
        now = time.monotonic()
        if now - self._last_s < _MIN_INTERVAL_S:
            return False
        self._last_s = now
        return True

    def reset(self) -> None:
        self._last_s = -1.0
