"""Logs as JSON."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator

import pytest

from quire.cli.main import _configure_streams
from quire.common import json_logs
from quire.common.json_logs import say_as_json, use_json_logs


@pytest.fixture
def loggers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The loggers' handlers and where warnings go, put back at the end."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    chosen = (logging.getLogger(), logging.getLogger("quire"))
    before = [(logger, logger.handlers[:], logger.level) for logger in chosen]
    for logger in chosen:
        logger.handlers.clear()
    yield
    for logger, handlers, level in before:
        logger.handlers[:] = handlers
        logger.setLevel(level)


def test_every_line_is_an_object_and_said_once(
    loggers: None, capsys: pytest.CaptureFixture[str]
) -> None:
    _configure_streams()  # as the command line does, before it knows of JSON
    use_json_logs()
    say_as_json("listening")
    logging.getLogger("quire.access").info(
        "request", extra={"request_id": "r", "status": 200, "prompt": "a secret"}
    )
    try:
        raise ValueError("a secret")
    except ValueError:
        logging.getLogger("uvicorn.error").exception("it failed")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["message"] for line in lines] == ["listening", "request", "it failed"]
    assert (lines[1]["request_id"], lines[1]["status"], lines[2]["exception"]) == (
        "r",
        200,
        "ValueError",
    )
    assert "a secret" not in json.dumps(lines)


def test_a_warning_is_a_line_like_others(loggers: None, capsys: pytest.CaptureFixture[str]) -> None:
    use_json_logs()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = json_logs._log_warning  # pytest has put its own there
        warnings.warn("odd,\nvery odd", UserWarning, stacklevel=1)
    [line] = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert (line["level"], line["logger"]) == ("warning", "py.warnings")
    assert line["message"].startswith("UserWarning: odd,\nvery odd (test_json_logs.py:")
