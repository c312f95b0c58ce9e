"""Prints what development needs beyond the package itself, so that it can be installed without building Quire again."""

import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
print(*project["optional-dependencies"]["dev"])
