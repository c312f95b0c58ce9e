"""What a shell offers where a key is pressed, run by the shell itself."""

from __future__ import annotations

import contextlib
import io
import subprocess
from functools import cache
from shutil import which

import pytest

from quire.cli.completion import SCRIPTS
from quire.cli.main import COMMANDS, main

BASH = """
source /dev/stdin <<'SCRIPT'
{script}
SCRIPT
COMP_WORDS=({words})
COMP_CWORD={index}
_quire
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@cache
def script(shell: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["completion", shell]) == 0
    return out.getvalue()


def offered(*words: str) -> list[str]:
    """What bash offers for the last word."""
    quoted = " ".join(f"'{word}'" for word in words)
    program = BASH.format(script=script("bash"), words=quoted, index=len(words) - 1)
    done = subprocess.run(
        ["bash", "--norc", "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


needs_bash = pytest.mark.skipif(which("bash") is None, reason="there is no bash here")


@needs_bash
def test_commands_are_offered() -> None:
    assert offered("quire", "") == list(dict.fromkeys(name.split()[0] for name in COMMANDS))
    assert offered("quire", "s") == ["serve", "simulate"]
    assert offered("quire", "bench", "th") == ["throughput"]


@needs_bash
def test_options_and_their_values_are_offered() -> None:
    assert "--port" in offered("quire", "serve", "--po")
    assert "--num-threads" in offered("quire", "bench", "throughput", "--num-t")
    assert offered("quire", "serve", "--scheduling-policy", "f") == ["fcfs", "fair"]
    assert offered("quire", "completion", "") == [*SCRIPTS, "--help"]


@needs_bash
def test_files_are_left_to_the_shell() -> None:
    """An empty answer is what makes bash offer files."""
    assert offered("quire", "serve", "--api-keys-file", "") == []
    assert offered("quire", "serve", "./mod") == []


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_script_is_valid(shell: str) -> None:
    text = script(shell)
    if which(shell) is None:
        assert "quire" in text and "serve" in text
        pytest.skip(f"there is no {shell} here")
    done = subprocess.run(
        [shell, "--no-execute"] if shell == "fish" else [shell, "-n"],
        input=text, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
