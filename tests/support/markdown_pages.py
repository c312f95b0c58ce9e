"""Markdown files of the repository as tests see them: code blocks, links, anchors, prose."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
GENERATED = ("results: begin", "results: end")


class Block(NamedTuple):
    """A fenced block of code, and where it stands."""

    page: str
    number: int
    language: str
    code: str


def pages() -> list[Path]:
    """Return every Markdown file that belongs to the repository."""
    skipped = {".venv", "build", ".git", "node_modules", ".hypothesis", "gpu-results"}
    found = (
        path
        for folder in ("docs", "benchmarks", "examples", "quire")
        for path in (ROOT / folder).rglob("*.md")
    )
    return sorted([*ROOT.glob("*.md"), *(path for path in found if not skipped & set(path.parts))])


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page that name a language."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^( *)```(\w+)\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    name = str(page.relative_to(ROOT))
    return [
        Block(name, number, language, re.sub(rf"^{indent}", "", code, flags=re.MULTILINE))
        for number, (indent, language, code) in enumerate(found)
    ]


def without_code(text: str) -> str:
    """Return a page's text without fenced blocks, code spans and indented blocks."""
    text = re.sub(r"^( *)```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(    |\t)(?! *[-*\d]).*$", "", text, flags=re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", text)


def links(page: Path) -> list[str]:
    """Return the targets of all links and pictures of a page."""
    text = re.sub(
        r"^( *)```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    text = re.sub(r"`[^`\n]*`", "", text)
    return re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to a page's headings."""
    found: set[str] = set()
    text = re.sub(
        r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    for heading in re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        base = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = 0
        while (anchor := base if number == 0 else f"{base}-{number}") in found:
            number += 1
        found.add(anchor)
    return found
