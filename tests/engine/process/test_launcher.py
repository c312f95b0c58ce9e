"""How an engine's process is run: here, what it says on standard error."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

import pytest
from served import until

from quire.engine.process.channel import ChannelClosed
from quire.engine.process.launcher import EngineProcess
from quire.engine.process.messages import Start, StartFailed

_ENGINE = """
import sys, warnings
from quire.engine.process.host import main
from quire.engine.process.messages import JSON_LOGS

def build(config):
    warnings.warn("odd")
    raise RuntimeError("a secret")

sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), build, has_json_logs=JSON_LOGS in sys.argv[3:]))
"""


@pytest.mark.slow_except("True")
@pytest.mark.parametrize("has_json_logs", [True, False])
def test_an_engine_logs_as_its_server_does(
    capfd: pytest.CaptureFixture[str], has_json_logs: bool
) -> None:
    command = (sys.executable, "-W", "default", "-c", _ENGINE)
    process = EngineProcess(Start("a", {}), command, has_json_logs=has_json_logs)
    try:
        until(lambda: process.has_ended)
    finally:
        process.kill()
    lines = capfd.readouterr().err.splitlines()
    if has_json_logs:
        seen = [json.loads(line) for line in lines]
        assert [(each["level"], each["logger"]) for each in seen] == [
            ("warning", "py.warnings"),
            ("error", "quire.engine.process.host"),
        ]
        assert seen[0]["message"].startswith("UserWarning: odd (")
    else:
        assert any("UserWarning: odd" in line for line in lines) and any(
            line.startswith("quire: engine: ERROR: ") for line in lines
        )


@pytest.mark.slow_except("ConfigError-*", "EngineError-*")
@pytest.mark.parametrize(
    ("error", "is_final"),
    [("ConfigError", True), ("CapacityError", False), ("EngineError", False), ("OSError", False)],
)
def test_what_may_be_there_the_next_time_is_no_final_failure(error: str, is_final: bool) -> None:
    """A rank that is killed while the engine is built, say."""
    script = _ENGINE.replace("RuntimeError", f"__import__('quire.errors').errors.{error}")
    if error == "OSError":
        script = _ENGINE.replace("RuntimeError", error)
    process = EngineProcess(Start("a", {}), (sys.executable, "-c", script))
    told: list[object] = []

    def has_failed() -> bool:
        with contextlib.suppress(ChannelClosed):
            told.extend(each for each in process.channel.receive() if type(each) is StartFailed)
        return bool(told)

    try:
        until(has_failed)
    finally:
        process.kill()
    assert isinstance(told[0], StartFailed) and told[0].is_final == is_final


def test_the_servers_command_takes_the_argument() -> None:
    """And nothing else: it ends where there is no connection to be had."""
    command = [sys.executable, "-m", "quire.engine.process", "0", "0", "json-logs"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
