"""The status line on a real pseudo-terminal,
read back through a small model of a terminal screen."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading

import pytest

from quire.cli.terminal import printable, progress_bar

ROWS, COLUMNS = 12, 60
_ESCAPE = re.compile(r"\x1b(?:\[([\d;]*)([A-Za-z])|([78D]))|(.)", re.DOTALL)


class Screen:
    """What a terminal shows: text, scrolling region, cursor positioning, erasing, saved cursor."""

    def __init__(self, num_rows: int, num_columns: int) -> None:
        self.lines = [[" "] * num_columns for _ in range(num_rows)]
        self.num_rows, self.num_columns = num_rows, num_columns
        self.row = self.column = 0
        self.saved = (0, 0)
        self.top, self.bottom = 0, num_rows - 1

    def feed(self, text: str) -> None:
        for match in _ESCAPE.finditer(text):
            parameters, command, save, char = match.groups()
            if save:
                if save == "D":
                    self._line_feed()
                elif save == "7":
                    self.saved = (self.row, self.column)
                else:
                    self.row, self.column = self.saved
            elif command:
                self._command(command, [int(each) for each in parameters.split(";") if each])
            else:
                self._put(char)

    def _command(self, command: str, numbers: list[int]) -> None:
        if command == "r":
            self.top, self.bottom = (
                (numbers[0] - 1, numbers[1] - 1) if numbers else (0, self.num_rows - 1)
            )
            self.row = self.column = 0
        elif command == "H":
            self.row, self.column = numbers[0] - 1, numbers[1] - 1
        elif command == "A":
            self.row -= numbers[0]
        elif command == "K":
            self.lines[self.row] = [" "] * self.num_columns
        else:
            assert command == "m", command

    def _put(self, char: str) -> None:
        if char == "\r":
            self.column = 0
        elif char == "\n":
            self._line_feed()
        else:
            if self.column == self.num_columns:
                self.column = 0
                self._line_feed()
            self.lines[self.row][self.column] = char
            self.column += 1

    def _line_feed(self) -> None:
        if self.row == self.bottom:
            del self.lines[self.top]
            self.lines.insert(self.bottom, [" "] * self.num_columns)
        elif self.row < self.num_rows - 1:
            self.row += 1

    @property
    def text(self) -> list[str]:
        return ["".join(line).rstrip() for line in self.lines]


def run_on_terminal(argv: list[str], *, after: tuple[str, int] | None = None) -> tuple[int, str]:
    """Run a program on a pseudo-terminal; exit code and everything it wrote.
    `after` sends a signal once a text was seen."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    process = subprocess.Popen(argv, stdin=slave, stdout=slave, stderr=slave, close_fds=True)
    os.close(slave)
    timer = threading.Timer(60, process.kill)
    timer.start()
    data = b""
    try:
        while True:
            try:
                chunk = os.read(master, 65536)
            except OSError:  # the other side is closed
                break
            if not chunk:
                break
            data += chunk
            if after is not None and after[0].encode() in data:
                process.send_signal(after[1])
                after = None
        return process.wait(), data.decode()
    finally:
        timer.cancel()
        os.close(master)


def script(body: str) -> list[str]:
    return [
        sys.executable,
        "-c",
        f"import sys, time\nfrom quire.cli.terminal import status_line\n{body}",
    ]


def test_text_and_status_do_not_mix() -> None:
    loop = "print('line', i); time.sleep(0.02); status.show(f'at {i}')"
    body = f"with status_line() as status:\n for i in range(40): {loop}"
    code, written = run_on_terminal(script(body))
    assert code == 0
    screen = Screen(ROWS, COLUMNS)
    statuses = set()
    for piece in written.split("\n"):
        screen.feed(piece + "\n")
        assert all(line == "" or line.startswith("line ") for line in screen.text[:-1]), screen.text
        statuses.add(screen.text[-1].split(" ")[0])
    assert "at" in statuses
    assert (screen.top, screen.bottom) == (0, ROWS - 1)  # given back
    assert [line for line in screen.text if line][-1] == "line 39"
    assert not any(line.startswith("at") for line in screen.text)
    assert re.findall(r"line (\d+)\r", written) == [str(i) for i in range(40)]


def test_row_is_given_back_on_interrupt_and_termination() -> None:
    body = (
        "try:\n with status_line() as status:\n  status.show('busy'); print('begun'); "
        "sys.stdout.flush(); time.sleep(30)\n"
        "except KeyboardInterrupt: sys.exit(130)"
    )
    for number, expected in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        code, written = run_on_terminal(script(body), after=("begun", number))
        screen = Screen(ROWS, COLUMNS)
        screen.feed(written)
        assert code == expected
        assert (screen.top, screen.bottom) == (0, ROWS - 1) and not any(
            "busy" in line for line in screen.text
        )


def test_row_is_given_back_while_suspended() -> None:
    """An orphaned process group is not stopped by the signal;
    the row must be given back and taken again all the same."""
    body = (
        "import os, signal, subprocess\n"
        "with status_line() as status:\n status.show('busy')\n"
        " waker = subprocess.Popen(['sh', '-c', f'while sleep 0.3; do kill -CONT "
        "{os.getpid()}; done'])\n"
        " os.kill(os.getpid(), signal.SIGTSTP)\n waker.kill()\n waker.wait()"
    )
    code, written = run_on_terminal(script(body))
    assert code == 0
    reserved = f"\033[1;{ROWS - 1}r"
    before, given_back, after = written.partition("\033[r")
    assert reserved in before and given_back and reserved in after and after.count("\033[r") == 1


def test_row_follows_a_resized_window() -> None:
    body = (
        "import fcntl, struct, termios\nwith status_line() as status:\n status.show('one')\n"
        f" fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack('HHHH', {ROWS - 4}, 40, 0, 0))\n "
        "status.show('two ' + 'x' * 99)"
    )
    _, written = run_on_terminal(script(body))
    assert f"\033[1;{ROWS - 1}r" in written and f"\033[1;{ROWS - 5}r" in written
    assert f"\033[{ROWS - 4};1H\033[2K\033[7mtwo {'x' * 35}\033[0m" in written


def test_tiny_windows_and_dumb_terminals_get_no_status() -> None:
    body = (
        "import fcntl, struct, termios\nfcntl.ioctl(1, termios.TIOCSWINSZ, "
        "struct.pack('HHHH', 3, 40, 0, 0))\n"
        "with status_line() as status: status.show('one')"
    )
    assert run_on_terminal(script(body)) == (0, "")
    body = (
        "import os\nos.environ['TERM'] = 'dumb'\nwith status_line() as status: status.show('one')"
    )
    assert run_on_terminal(script(body)) == (0, "")


@pytest.mark.slow
def test_generate_on_a_terminal(tiny: str) -> None:
    argv = [
        sys.executable,
        "-m",
        "quire",
        "generate",
        tiny,
        "-p",
        "Once upon a time",
        "-p",
        "Lily",
        "--temperature",
        "0",
    ]
    code, written = run_on_terminal([*argv, "--max-tokens", "40", "--ignore-eos"])
    assert code == 0
    assert "\033[7m" in written and "prompts," in written and "tokens/s" in written
    screen = Screen(60, COLUMNS)
    screen.feed(written)
    shown = " ".join(screen.text)
    assert "[1/2] Once upon a time , there was a little girl named Lily." in shown
    assert "[2/2] Lily" in shown and "2 requests:" in shown and "running" not in shown


def test_model_output_cannot_steer_the_terminal() -> None:
    assert printable("plain ✓\n\ttext") == "plain ✓\n\ttext"
    assert printable("a\033[2Jb\x9bc\rd\x7f") == "a�[2Jb�c�d�"


def test_progress_bar() -> None:
    assert (
        progress_bar(0.5, 4) == "██──"
        and progress_bar(2.0, 4) == "████"
        and progress_bar(-1, 2) == "──"
    )
