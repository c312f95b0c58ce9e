"""Log lines as JSON, Python's warnings among them: one object a line, with the request's id and
tenant where there is one.

Never a prompt, an answer, a key or a traceback: fields are taken from a fixed list, and of an
exception only its type.
"""

from __future__ import annotations

import json
import logging
import time
import warnings
from pathlib import PurePath
from typing import Any, TextIO

_FIELDS = ("request_id", "tenant", "method", "route", "status", "elapsed_ms")


class JsonFormatter(logging.Formatter):
    """Formats records of any logger."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        seconds, fraction = divmod(record.created, 1)
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
            + f".{int(1000 * fraction):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in _FIELDS:
            value = getattr(record, name, None)
            if value is not None:
                line[name] = value
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = record.exc_info[0].__name__
        return json.dumps(line, ensure_ascii=False, separators=(",", ":"))


def use_json_logs(level: int = logging.INFO) -> None:
    """Let every logger write JSON to standard error, and Python's warnings go to one of them,
    for good."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # the command line's own, which would write each line once more, and plain
    logging.getLogger("quire").handlers.clear()
    warnings.showwarning = _log_warning


def _log_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Log a warning as `logging.captureWarnings` does, but on one line, without the source and
    where it lies."""
    where = f"{PurePath(filename).name}:{lineno}"
    logging.getLogger("py.warnings").warning("%s: %s (%s)", category.__name__, message, where)


def say_as_json(text: str) -> None:
    """Log a server's own announcement, as a line among the others."""
    logging.getLogger("quire.server").info(text)
