"""Every link in every Markdown file leads to a file, and every anchor to a heading."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from markdown_pages import ROOT, anchors, links, pages


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in links(page):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
            broken.append(link)
    assert broken == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One heading: `code` (and more)\n\n[a](#one-heading-code-and-more) `[b](no)`\n\n## "
        "Twice\n## Twice\n"
    )
    assert links(page) == ["#one-heading-code-and-more"]
    assert anchors(page) == {"one-heading-code-and-more", "twice", "twice-1"}


def test_the_index_names_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    reached = {(index.parent / link.partition("#")[0]).resolve() for link in links(index)}
    lab = ROOT / "docs" / "lab" / "README.md"
    reached |= {(lab.parent / link).resolve() for link in links(lab)}
    missing = [
        str(page.relative_to(ROOT))
        for page in (ROOT / "docs").rglob("*.md")
        if page.resolve() not in reached and page.parent.resolve() not in reached and page != index
    ]
    assert [each for each in missing if each != "docs/benchmarks/records.md"] == []


def test_pages_that_the_code_names_exist() -> None:
    suffixes = {".py", ".cpp", ".hpp", ".sh", ".toml"}
    sources = [
        path
        for folder in ("quire", "csrc", "benchmarks", "tools", "tests", "examples")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in suffixes
    ]
    named = {
        name
        for path in [*sources, ROOT / "Makefile", ROOT / "CMakeLists.txt"]
        for name in re.findall(r"\bdocs/[\w/.-]+\.(?:md|csv)\b", path.read_text(encoding="utf-8"))
    }
    assert named and [name for name in sorted(named) if not (ROOT / name).is_file()] == []
