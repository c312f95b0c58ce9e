"""Measures what an installation costs: `python tools/measure_install.py dist/quire_llm-*.whl`.

Makes an empty environment in a temporary folder, installs torch as tools/install-torch.sh does,
then the wheel, then each extra alone on top of it (taken away again before the next). Prints a
table of seconds, megabytes (10^6 bytes of files) and what came in. Needs a package index; seconds
depend on it, and on pip's cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
NOT_INSTALLED_BY_USERS = ("dev", "charts", "clients")
"""Extras for those who change Quire."""
MAX_S = 1800.0
"""No single command may take longer."""


class Environment:
    """An empty virtual environment, and what is in it."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=MAX_S)
        self.folder = folder
        self.python = folder / "bin" / "python"

    def run(self, *command: str | Path) -> float:
        """Run a command with this environment's Python in PYTHON; its seconds."""
        began_s = time.monotonic()
        environment = {**os.environ, "PYTHON": str(self.python)}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=MAX_S, cwd=ROOT
        )
        if done.returncode != 0:
            sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}"[-4000:])
        return time.monotonic() - began_s

    def pip(self, *arguments: str) -> float:
        """Run pip; its seconds."""
        return self.run(self.python, "-m", "pip", "--quiet", *arguments)

    def packages(self) -> set[str]:
        """The names of what is installed."""
        done = subprocess.run(
            [self.python, "-m", "pip", "list", "--format", "json"],
            check=True, capture_output=True, text=True, timeout=MAX_S,
        )  # fmt: skip
        return {each["name"] for each in json.loads(done.stdout)}

    def num_bytes(self) -> int:
        """Of all files."""
        files = (path for path in self.folder.rglob("*") if not path.is_symlink())
        return sum(path.stat().st_size for path in files if path.is_file())


class Table:
    """Prints a row for each step: what the environment gained since the row before."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._bytes, self._packages = environment.num_bytes(), environment.packages()
        print("| step | seconds | MB | packages |\n|---|---|---|---|", flush=True)

    def row(self, step: str, seconds: float) -> set[str]:
        """Print a row, and return the packages that came in."""
        size, packages = self._environment.num_bytes(), self._environment.packages()
        new = packages - self._packages
        listed = f"{len(new)}: {', '.join(sorted(new, key=str.lower))}" if new else "0"
        print(
            f"| {step} | {seconds:.1f} | {(size - self._bytes) / 1e6:.1f} | {listed} |", flush=True
        )
        self._bytes, self._packages = size, packages
        return new

    def forget(self) -> None:
        """Take what is there now as the row before."""
        self._bytes, self._packages = self._environment.num_bytes(), self._environment.packages()


def extras() -> list[str]:
    """Those that users install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [name for name in project["optional-dependencies"] if name not in NOT_INSTALLED_BY_USERS]


def main() -> None:
    """Install and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument(
        "--extras", nargs="*", default=extras(), help=f"default: {' '.join(extras())}"
    )
    args = parser.parse_args()
    wheel = args.wheel.resolve()
    with tempfile.TemporaryDirectory(prefix="quire-install-") as name:
        environment = Environment(Path(name) / "venv")
        table = Table(environment)
        table.row("torch", environment.run("sh", "tools/install-torch.sh"))
        table.row("no extra", environment.pip("install", str(wheel)))
        for extra in args.extras:
            seconds = environment.pip("install", f"{wheel}[{extra}]")
            new = table.row(f"`{extra}`", seconds)
            if new:
                environment.pip("uninstall", "--yes", *sorted(new))
            table.forget()


if __name__ == "__main__":
    main()
