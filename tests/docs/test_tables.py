"""What pages say of the code is true: supported models, error messages, endpoints, commands,
line counts."""

from __future__ import annotations

import re
import sys

import pytest
from markdown_pages import ROOT

from quire.cli.main import COMMANDS
from quire.models.registry import ARCHITECTURES
from quire.weights.gguf.model import ARCHITECTURES as GGUF

sys.path.append(str(ROOT / "tools"))
import architecture  # type: ignore[import-not-found]


def _page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def test_the_table_of_models_is_the_registry() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \|.*\| `(quire/models/\w+\.py)` \| (?:`([\w-]+)` )?\|$",
        _page("models.md"),
        re.MULTILINE,
    )
    assert {name: file for name, file, _ in rows} == {
        name: declare.__module__.replace(".", "/") + ".py"
        for name, declare in ARCHITECTURES.items()
    }
    assert {gguf: name for name, _, gguf in rows if gguf} == dict(GGUF)


def test_every_message_of_the_troubleshooting_page_is_one_that_the_code_raises() -> None:
    source = "".join(
        path.read_text(encoding="utf-8") for path in sorted((ROOT / "quire").rglob("*.py"))
    )
    source = (
        re.sub(r'"\s*\n\s*f?"', "", source)
        .replace("{device!r}", "'cuda'")
        .replace("{name!r}", "'cuda'")
    )
    said = [
        text
        for row in re.findall(r"^\| (\".*?) \|", _page("troubleshooting.md"), re.MULTILINE)
        for text in re.findall(r'"(.*?)"', row)
    ]
    assert len(said) > 15
    assert [text for text in said if text not in source] == []


def test_every_endpoint_of_the_guide_is_served() -> None:
    app = (ROOT / "quire" / "server" / "app.py").read_text(encoding="utf-8")
    routes = {
        path.split("{")[0].rstrip("/")
        for path in re.findall(r'_(?:get|post|delete)\("([^"]+)"', app)
    }
    table = _page("howto/use-the-http-api.md").partition("## Endpoints")[2].partition("##")[0]
    named = {path.split("{")[0].rstrip("/") for path in re.findall(r"`(/[\w/{}.]+)`", table)}
    assert routes - named == set()


def test_the_guide_to_the_command_line_names_every_command() -> None:
    text = _page("howto/command-line.md")
    assert [name for name in COMMANDS if f"`quire {name}" not in text] == []


def test_line_counts_in_the_architecture_picture_are_true() -> None:
    assert architecture.stale_counts() == [], "draw it again: python tools/architecture.py"
    light, dark = (
        re.findall(
            r">([\d.]+k)<", (ROOT / "docs" / "images" / f"architecture-{theme}.svg").read_text()
        )
        for theme in ("light", "dark")
    )
    assert light == dark


def test_every_package_is_in_the_architecture_picture() -> None:
    folders = {path.name for path in (ROOT / "quire").iterdir() if (path / "__init__.py").exists()}
    drawn = {box.name for box in architecture.BOXES}
    assert {name for name in folders if name not in drawn} <= {"assets", "observe", "utils"}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pictures_are_small(theme: str) -> None:
    images = ROOT / "docs" / "images"
    assert (images / f"block-map-{theme}.webp").stat().st_size < 1_500_000
    assert (images / f"peers-{theme}.svg").stat().st_size < 20_000


def test_files_that_guides_name_exist() -> None:
    skipped = {".git", ".venv", "build", ".mypy_cache", ".ruff_cache", ".hypothesis"}
    files = [
        "/" + str(path.relative_to(ROOT))
        for folder in ("quire", "csrc", "tests", "tools", "benchmarks", "examples", "deploy")
        for path in (ROOT / folder).rglob("*.*")
        if not skipped & set(path.relative_to(ROOT).parts)
    ]
    guides = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "docs" / "tour.md",
        *(ROOT / "docs" / "howto").glob("*.md"),
    ]
    missing = {
        f"{guide.name}: {name}"
        for guide in guides
        for name in re.findall(
            r"`([\w/]+\.(?:py|pyi|cpp|hpp|sh|js))`", guide.read_text(encoding="utf-8")
        )
        if not any(file.endswith(f"/{name}") for file in files)
    }
    assert missing == set()
