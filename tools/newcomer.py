"""A newcomer's first minutes, timed: `python tools/newcomer.py [--source URL] [--make]`.

Clones the repository into a temporary folder, installs it into a fresh environment, serves, streams
an answer and runs the README's Python snippet, as the README says. Prints each command with its
seconds; exit code 1 if one fails. Nothing is left behind. Needs git and a package index. `--make`
also times `make demo` in the clone, which has an environment of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent
SERVE = "quire serve quire-storyteller --port 0"
MAX_S = 1800.0
"""No single command may take longer."""


class Log:
    """Runs commands in the clone, and prints what each took."""

    def __init__(self, folder: Path) -> None:
        self.clone = folder / "quire"
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
        }
        self.began_s = time.monotonic()
        print("| command | seconds | since the start |\n|---|---|---|", flush=True)

    def add(self, command: str, seconds: float) -> None:
        """Print a row."""
        print(
            f"| `{command}` | {seconds:.1f} | {time.monotonic() - self.began_s:.1f} |", flush=True
        )

    def run(self, command: str, folder: Path | None = None) -> str:
        """Run a shell command, in the clone unless said otherwise; what it wrote.
        Ends the program if it fails."""
        began_s = time.monotonic()
        done = subprocess.run(
            command,
            shell=True,
            cwd=folder or self.clone,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=MAX_S,
        )
        self.add(command, time.monotonic() - began_s)
        if done.returncode != 0:
            sys.exit(
                f"{command} ended with {done.returncode}:\n"
                f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
            )
        return done.stdout


@contextmanager
def serving(log: Log) -> Iterator[str]:
    """The server of the README, on a free port, until the block ends; its URL."""
    began_s = time.monotonic()
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            SERVE.split(), cwd=log.clone, env=log.environment, stderr=said, stdout=said
        )
        try:
            while (url := _ready_url(said.fileno())) is None:
                if process.poll() is not None or time.monotonic() - began_s > 300:
                    said.seek(0)
                    sys.exit(f"{SERVE} is not ready:\n{said.read()[-4000:]}")
                time.sleep(0.05)
            log.add(f"{SERVE}  # until /readyz", time.monotonic() - began_s)
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ready_url(descriptor: int) -> str | None:
    """Return where the server listens, if its log says so and it is ready."""
    found = re.search(
        r"listening on http://[^:]+:(\d+)",
        os.pread(descriptor, 1 << 16, 0).decode(errors="replace"),
    )
    if found is None:
        return None
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{found[1]}/readyz", timeout=60):
            return f"http://127.0.0.1:{found[1]}"
    except (OSError, urllib.error.URLError):
        return None


def stream(log: Log, url: str) -> None:
    """A chat, streamed: the time to the first text and to the last."""
    body = {
        "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
        "max_tokens": 60,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    began_s, first_s, text = time.monotonic(), 0.0, ""
    with urllib.request.urlopen(request, timeout=120) as response:
        for line in response:
            if line.startswith(b"data: {"):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
                first_s = first_s or (time.monotonic() - began_s if text else 0.0)
    if not text:
        sys.exit("the stream held no text")
    log.add("POST /v1/chat/completions, streamed  # to the first text", first_s)
    log.add("POST /v1/chat/completions, streamed  # to the last text", time.monotonic() - began_s)


def ask(log: Log, folder: Path) -> None:
    """Serve and stream an answer; then the README's snippet in Python."""
    with serving(log) as url:
        stream(log, url)
    readme = (log.clone / "README.md").read_text(encoding="utf-8")
    snippet = next(
        code for code in re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    )
    (folder / "first.py").write_text(snippet, encoding="utf-8")
    log.run("python first.py  # the README's snippet", folder)


def main() -> None:
    """Clone, install, serve, ask."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--source", default=str(ROOT), help="repository to clone (default: this one)"
    )
    parser.add_argument("--make", action="store_true", help="also `make demo`")
    args = parser.parse_args()
    # the folder is removed then, too
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit("ended"))
    with tempfile.TemporaryDirectory(prefix="quire-newcomer-") as name:
        folder = Path(name)
        log = Log(folder)
        log.run(f"git clone -q {args.source} quire", folder)
        log.run(f"{sys.executable} -m venv ../venv")
        log.environment["PATH"] = f"{folder / 'venv' / 'bin'}:{log.environment['PATH']}"
        log.environment["PYTHON"] = "python"
        log.run("sh tools/install-torch.sh")
        log.run("pip install -q '.[serve]'")
        ask(log, folder)
        if args.make:
            del log.environment["PYTHON"]
            log.run("make demo")


if __name__ == "__main__":
    main()
