"""The command line: the console script `quire`, and `python -m quire`."""

import os
import signal
import sys


def main() -> int:
    """Run the command line; returns the exit code. An interrupt is one line already while modules
    are imported, which takes a moment on a busy machine."""
    _fill_streams()
    try:
        from quire.cli.main import main
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.stderr.write("quire: interrupted\n")
        return 130  # `EXIT_INTERRUPTED` of the module that is not there
    return main()


def _fill_streams() -> None:
    """Have all standard streams, of which a caller may have closed some: else the first files that
    are opened take their numbers, and what a library prints goes into them. Input that is closed
    has ended, output that is closed cannot be written, and errors are told to no one."""
    kinds = (
        ("stdin", os.O_RDONLY, "r"),
        ("stdout", os.O_RDONLY, "w"),
        ("stderr", os.O_WRONLY, "w"),
    )
    for number, (name, flags, mode) in enumerate(kinds):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, flags)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
            stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115 (stays open)
            setattr(sys, name, stream)


if __name__ == "__main__":
    sys.exit(main())
