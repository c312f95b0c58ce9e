"""Log lines as JSON: one object a line, with the request's id and tenant where there is one.

Never a prompt, an answer, a key or a traceback: fields are taken from a fixed list, and of an exception only its type.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import msgspec

_FIELDS = ("request_id", "tenant", "method", "route", "status", "elapsed_ms")


class JsonFormatter(logging.Formatter):
    """Formats records of any logger."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        seconds, fraction = divmod(record.created, 1)
        line: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{int(1000 * fraction):03d}Z",
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
        return msgspec.json.encode(line).decode()


def use_json_logs(level: int = logging.INFO) -> None:
    """Let every logger write JSON to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("quire").handlers.clear()  # the command line's own, which would write each line once more, and plain


def say_as_json(text: str) -> None:
    """What a server says of itself on its way, as a line among the others."""
    logging.getLogger("quire.server").info(text)
