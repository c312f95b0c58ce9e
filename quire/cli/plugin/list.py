"""`quire plugin list`: which platforms packages on this machine offer."""

from __future__ import annotations

import argparse

from quire.common.platforms import GROUP, find_platforms

EXAMPLES = """\
examples:
  quire plugin list
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command."""
    parser.epilog = EXAMPLES


def run(args: argparse.Namespace) -> int:
    """Run the command: a line for each, without importing any."""
    found = find_platforms()
    for each in found:
        print(f"{each.name}  {each.package} {each.version}  {each.entry_point.value}")
    if not found:
        print(f"no package offers a platform (entry point group {GROUP})")
    return 0
