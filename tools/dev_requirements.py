"""Prints what development needs beyond the package itself, a line each:
pip then need not build Quire again."""

import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
print(*project["optional-dependencies"]["dev"], sep="\n")
