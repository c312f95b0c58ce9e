"""A newcomer's first minutes, timed: `python tools/newcomer.py [--source URL] [--make]`, or with
`--wheel FILE` for those who install a wheel.

Clones the repository into a temporary folder, installs it into a fresh environment, serves, streams
an answer, loads the page and runs the README's Python snippet, as the README says. Prints each
command with its seconds; exit code 1 if one fails. Nothing is left behind. Needs git and a package
index. `--make` also times `make demo` in the clone, which has an environment of its own. `--wheel`
installs that file in place of a clone, and also prints what each installation adds on disk.
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
import urllib.parse
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

    def __init__(self, folder: Path, work: str = "quire") -> None:
        """`work` is the folder, below `folder`, that commands run in."""
        self.clone = folder / work
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


def load_page(log: Log, url: str) -> None:
    """The page, with all scripts and styles that it names."""
    began_s, num_bytes = time.monotonic(), 0
    with urllib.request.urlopen(f"{url}/", timeout=60) as response:
        page = response.read()
        base = response.url
    parts = re.findall(rb'(?:src|href)="([^"#:]+)"', page)
    if not parts:
        sys.exit("the page names no scripts")
    for part in parts:
        with urllib.request.urlopen(urllib.parse.urljoin(base, part.decode()), timeout=60) as file:
            num_bytes += len(file.read())
    what = f"GET /  # and its {len(parts)} files, {(len(page) + num_bytes) / 1e3:.0f} kB"
    log.add(what, time.monotonic() - began_s)


def ask(log: Log, folder: Path, readme: str) -> None:
    """Serve, stream an answer and load the page; then the README's snippet in Python."""
    with serving(log) as url:
        stream(log, url)
        load_page(log, url)
    snippet = next(
        code for code in re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    )
    (folder / "first.py").write_text(snippet, encoding="utf-8")
    log.run("python first.py  # the README's snippet", folder)


def size_of(folder: Path) -> float:
    """Megabytes (10^6 bytes) of all files below a folder."""
    files = (path for path in folder.rglob("*") if not path.is_symlink())
    return sum(path.stat().st_size for path in files if path.is_file()) / 1e6


def from_wheel(folder: Path, wheel: Path) -> None:
    """Install the wheel into an empty environment, and ask."""
    log = Log(folder, ".")
    environment = folder / "venv"
    log.run(f"{sys.executable} -m venv venv")
    log.environment["PATH"] = f"{environment / 'bin'}:{log.environment['PATH']}"
    log.environment["PYTHON"] = "python"
    sizes = [size_of(environment)]
    for command in (
        f"sh {ROOT / 'tools' / 'install-torch.sh'}",
        f"pip install -q '{wheel.resolve()}[serve]'",
    ):
        log.run(command)
        sizes.append(size_of(environment))
        print(f"| # adds {sizes[-1] - sizes[-2]:.0f} MB | | |", flush=True)
    ask(log, folder, (ROOT / "README.md").read_text(encoding="utf-8"))


def from_clone(folder: Path, source: str, with_make: bool) -> None:
    """Clone, install, ask."""
    log = Log(folder)
    log.run(f"git clone -q {source} quire", folder)
    log.run(f"{sys.executable} -m venv ../venv")
    log.environment["PATH"] = f"{folder / 'venv' / 'bin'}:{log.environment['PATH']}"
    log.environment["PYTHON"] = "python"
    log.run("sh tools/install-torch.sh")
    log.run("pip install -q '.[serve]'")
    ask(log, folder, (log.clone / "README.md").read_text(encoding="utf-8"))
    if with_make:
        del log.environment["PYTHON"]
        log.run("make demo")


def main() -> None:
    """Install, serve, ask."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--source", default=str(ROOT), help="repository to clone (default: this one)"
    )
    parser.add_argument("--make", action="store_true", help="also `make demo`")
    parser.add_argument("--wheel", type=Path, help="install this wheel in place of a clone")
    args = parser.parse_args()
    # the folder is removed then, too
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit("ended"))
    with tempfile.TemporaryDirectory(prefix="quire-newcomer-") as name:
        if args.wheel is None:
            from_clone(Path(name), args.source, args.make)
        else:
            from_wheel(Path(name), args.wheel)


if __name__ == "__main__":
    main()
