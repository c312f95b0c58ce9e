"""The command line: the console script `quire`, and `python -m quire`."""

import signal
import sys


def main() -> int:
    """Run the command line; returns the exit code. An interrupt is one line already while modules
    are imported, which takes a moment on a busy machine."""
    try:
        from quire.cli.main import main
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.stderr.write("quire: interrupted\n")
        return 130  # `EXIT_INTERRUPTED` of the module that is not there
    return main()


if __name__ == "__main__":
    sys.exit(main())
