"""How an unexpected exception is logged: one line that says what failed and of which type, the
details only on demand.

A message or a traceback may hold a user's text, paths or addresses, so neither is in a log by
default. To look for the cause, set the logger's level to DEBUG.
"""

from __future__ import annotations

import logging

from quire.errors import CapacityError, EngineError, QuireError


def is_final(error: BaseException) -> bool:
    """Return whether building an engine, or a part of one, would fail in the same way once more:
    not where a process was lost meanwhile, nor where memory may come free."""
    return isinstance(error, QuireError) and not isinstance(error, CapacityError | EngineError)


def log_failure(logger: logging.Logger, what: str, error: BaseException) -> None:
    """Log at ERROR that `what` failed with this type of error, and at DEBUG the traceback."""
    logger.error(
        "%s: %s (set this logger's level to DEBUG for the traceback)", what, type(error).__name__
    )
    logger.debug("%s", what, exc_info=error)
