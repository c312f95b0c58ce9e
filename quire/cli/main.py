"""The entry point `quire`: finds the subcommand, runs it, and turns every expected failure into one
line and an exit code.

Owns the list of subcommands and the exit codes: 0 done, 1 done in part (some request failed, some
check failed), 2 refused, 130 interrupted, 141 the reader of the output went away. Imports nothing
heavy: a subcommand's module is imported when it is called, and imports what it needs when it
runs.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import NamedTuple

from quire import __version__
from quire.cli.parser import Parser, UsageError
from quire.errors import QuireError

EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
_WRITE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


class Command(NamedTuple):
    """A subcommand: its module offers `add_arguments(parser)` and `run(args) -> int`."""

    module: str
    help: str


COMMANDS = {
    "serve": Command("quire.cli.serve", "serve a model over HTTP, as OpenAI's API"),
    "route": Command("quire.cli.route", "one address in front of many servers of OpenAI's API"),
    "generate": Command("quire.cli.generate", "complete prompts, streaming to the terminal"),
    "chat": Command("quire.cli.chat", "talk to a model in the terminal"),
    "embed": Command("quire.cli.embed", "vectors of texts, as JSON lines or a NumPy array"),
    "rerank": Command("quire.cli.rerank", "documents in the order of how they answer a query"),
    "plan": Command("quire.cli.plan", "what memory and limits the engine would choose, and why"),
    "quantize": Command("quire.cli.quantize", "write a model's weights as 8 or 4 bit integers"),
    "doctor": Command("quire.cli.doctor", "check this machine and this installation"),
    "completion": Command("quire.cli.completion", "a script by which a shell completes commands"),
    "bench throughput": Command(
        "quire.cli.bench.throughput", "many requests at once: tokens per second"
    ),
    "bench latency": Command(
        "quire.cli.bench.latency", "a few requests: time to first token and per token"
    ),
    "bench serve": Command(
        "quire.cli.bench.serve", "a running server under load: latencies, goodput, a report"
    ),
    "bench control-plane": Command(
        "quire.cli.bench.control_plane", "scheduling alone: milliseconds a step, no model"
    ),
    "bench steps": Command(
        "quire.cli.bench.steps", "what steps cost, and how far the simulator is off"
    ),
    "bench tiers": Command(
        "quire.cli.bench.tiers", "a disk behind the KV pool: hits and first tokens on a trace"
    ),
    "bench kernels": Command(
        "quire.cli.bench.kernels", "the projections of the CPU against its limits"
    ),
    "plugin list": Command("quire.cli.plugin.list", "devices that other packages bring"),
    "plugin check": Command(
        "quire.cli.plugin.check", "whether such a device computes what it must, to the bit"
    ),
    "simulate": Command(
        "quire.cli.simulate", "run the scheduler without a model, on traces and under faults"
    ),
}
"""Subcommands by name; a name of two words is a subcommand of a group."""
_GROUPS = {
    "bench": "Measure the engine on this machine.",
    "plugin": "List and check the devices that other packages bring.",
}

EXAMPLES = """\
examples:
  quire generate quire-storyteller --chat -p "Tell me a story about a brave knight."
  quire chat quire-storyteller
  quire serve quire-storyteller --port 8000
  quire plan ./my-model --max-model-len 8192
  quire doctor

`quire COMMAND --help` has a command's options and examples.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code and never raises for what a user,
    a file or a terminal did."""
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        # the process ends now: another one would only interrupt the interpreter's last steps
        if argv is None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        return _fail("quire: interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        _discard_stdout()
        return EXIT_BROKEN_PIPE
    except QuireError as error:
        if _cannot_write():  # that is the error then, and would be raised again at exit
            _discard_stdout()
        return _fail(f"quire: error: {' '.join(str(error).split())}", EXIT_REFUSED)
    except OSError as error:
        if error.errno not in _WRITE_ERRORS and not _cannot_write():
            raise
        _discard_stdout()
        return _fail(f"quire: error: the output cannot be written: {error.strerror}", EXIT_REFUSED)


def _dispatch(argv: list[str]) -> int:
    for num_words in (2, 1):
        name = " ".join(argv[:num_words])
        if name in COMMANDS:
            return _run(name, argv[num_words:])
    group = argv[0] if argv and any(name.startswith(f"{argv[0]} ") for name in COMMANDS) else None
    rest = argv[1:] if group else argv
    overview = _overview(group)
    if not rest:
        sys.stderr.write(overview.format_help())
        return EXIT_REFUSED
    with contextlib.suppress(SystemExit):
        if rest[0].startswith("-"):
            overview.parse(rest)
            raise UsageError(f"no command given ({overview.prog} --help lists them)")
        raise UsageError(
            f"there is no command {rest[0]!r}{_hint(rest[0], _names(group))} "
            f"({overview.prog} --help lists them)"
        )
    return 0


def _run(name: str, argv: list[str]) -> int:
    command = COMMANDS[name]
    module = import_module(command.module)
    parser = Parser(f"quire {name}", command.help)
    module.add_arguments(parser)
    try:
        args = parser.parse(argv)
    except SystemExit:  # --help has been printed
        return 0
    _configure_streams()
    _check_folder()
    result: int = module.run(args)
    return result


def _check_folder() -> None:
    """Raise UsageError where the working folder is gone: libraries end the process then."""
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError(
            f"the working folder cannot be used ({error.strerror}); change to another one"
        ) from None


def _names(group: str | None) -> list[str]:
    """Return the first words of all commands, or the second words of a group's."""
    if group is None:
        return list(dict.fromkeys(name.split()[0] for name in COMMANDS))
    return [name.split()[1] for name in COMMANDS if name.startswith(f"{group} ")]


def _overview(group: str | None) -> Parser:
    """Return a parser that knows no command's options: it prints the list of commands."""
    prefix = "" if group is None else f"{group} "
    chosen = {
        name.removeprefix(prefix): command
        for name, command in COMMANDS.items()
        if name.startswith(prefix)
    }
    title = "Quire: LLM inference on paged attention." if group is None else _GROUPS[group]
    listing = "\n".join(f"  {name:<17} {command.help}" for name, command in chosen.items())
    parser = Parser(f"quire {prefix}".strip(), f"{title}\n\ncommands:\n{listing}", is_overview=True)
    parser.epilog = (
        EXAMPLES
        if group is None
        else f"`quire {group} COMMAND --help` has a command's options and examples."
    )
    if group is None:
        parser.add_argument("--version", action="version", version=f"quire {__version__}")
    return parser


def _hint(word: str, known: list[str]) -> str:
    close = get_close_matches(word, known, 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _configure_streams() -> None:
    """Warnings as lines like our own messages, unless the program that called `main` has its own
    handlers.

    A character that the terminal's encoding lacks is replaced, not a reason to fail.
    """
    logger = logging.getLogger("quire")
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(_LineFormatter())
        logger.addHandler(handler)
    with contextlib.suppress(AttributeError, ValueError):
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]


class _LineFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"quire: {record.levelname.lower()}: {super().format(record)}"


def _fail(message: str, code: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        print(message, file=sys.stderr)
    return code


def _cannot_write() -> bool:
    """Return whether standard output takes nothing more: it is closed, or full."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        return True
    return False


def _discard_stdout() -> None:
    """Discard what Python still buffers for a reader that has gone, or it would raise again at
    exit."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
