"""Hooks of MkDocs: pages of reference are made of the code, and links that leave the site become
the names of the files they lead to."""

from __future__ import annotations

import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from mkdocs.structure.files import File  # noqa: E402

from tools.site.reference import pages  # noqa: E402

_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|mailto:|#)([^)\s]+)\)")


def on_config(config: Any) -> Any:
    """Replace each folder in the navigation (a path that ends with /) by its pages."""
    for section in config["nav"]:
        for entry in (
            next(iter(section.values())) if isinstance(next(iter(section.values())), list) else ()
        ):
            for title, path in entry.items():
                if path.endswith("/"):
                    folder = ROOT / "docs" / path
                    entry[title] = [f"{path}{page.name}" for page in sorted(folder.glob("*.md"))]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    for path, make in pages().items():
        files.append(File.generated(config, path, content=make()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page with links to files outside the site as text: the site has no copy of the
    source tree."""
    return rewrite(markdown, page.file.src_uri)


def rewrite(markdown: str, page: str) -> str:
    """Return `markdown` of `page` (its path below docs/) without links that leave docs/."""

    def replaced(found: re.Match[str]) -> str:
        text, target = found.groups()
        parts: list[str] = []
        for part in (PurePosixPath("docs", page).parent / target.partition("#")[0]).parts:
            if part == "..":
                parts[-1:] = []
            else:
                parts.append(part)
        if parts[:1] == ["docs"] and not (ROOT / "/".join(parts)).is_dir():
            return found[0]
        path = "/".join(parts)
        return text if path in text else f"{text} (`{path}`)"

    return _LINK.sub(replaced, markdown)
