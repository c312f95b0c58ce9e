"""The site: pages of reference name everything that there is, and links that leave it become text."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import quire
from quire.cli.main import COMMANDS
from quire.config.engine import EngineConfig
from tools.site import reference

ROOT = Path(__file__).parent.parent.parent


def test_every_option_is_in_the_reference() -> None:
    page = reference.options()
    for item in dataclasses.fields(EngineConfig):
        is_shown = not str(item.metadata["help"]).startswith("not available")
        assert (f"| `{item.name}` |" in page) == is_shown


def test_every_command_and_public_class_is_in_the_reference() -> None:
    commands, python = reference.commands(), reference.python()
    assert [name for name in COMMANDS if f"\n## quire {name}\n" not in commands] == []
    for name in ("LLM", "AsyncLLM", "RequestOutput", "SamplingParams"):
        assert name in quire.__all__ and f"\n## {name}\n" in python
    assert "`generate(prompts" in python


def test_bodies_and_metrics_are_made_of_what_a_server_says() -> None:
    body = {"type": "object", "properties": {"n": {"type": "integer", "default": 1}}}
    document = {
        "components": {"schemas": {"Body": body}},
        "paths": {"/v1/x": {"post": {"summary": "Do it.", "requestBody": {
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Body"}}}}}}},
    }  # fmt: skip
    page = reference.http_api(document)
    assert "| `POST /v1/x` | Do it. |" in page and "| `n` | integer | `1` |" in page
    text = "# HELP quire:a Number of a.\n# TYPE quire:a gauge\nquire:a 1\n"
    assert "| `quire:a` | gauge | Number of a. |" in reference.metrics(text)


def test_links_that_leave_the_site_become_text() -> None:
    hooks = pytest.importorskip("tools.site.hooks", reason="mkdocs is not installed")
    assert hooks.rewrite("[why](../decisions/0002-numbers.md#x)", "howto/a.md").startswith("[why](")
    assert hooks.rewrite("[the rules](../CONTRIBUTING.md)", "README.md") == (
        "the rules (`CONTRIBUTING.md`)"
    )
    assert hooks.rewrite("[`quire/llm.py`](../../quire/llm.py)", "howto/a.md") == "`quire/llm.py`"
    assert hooks.rewrite("![p](../images/a.png) [q](https://x.org)", "howto/a.md") == (
        "![p](../images/a.png) [q](https://x.org)"
    )


def test_pages_that_are_made_or_must_not_be_lost_are_in_the_navigation() -> None:
    """`make check` builds the site, and fails where a page of the navigation is missing."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "\nstrict: true\n" in text and "not_found: warn" in text
    for page in (
        "reference/options.md", "reference/metrics.md", "reference/http-api.md",
        "reference/python.md", "reference/commands.md", "troubleshooting.md",
        "exactness.md", "howto/operate.md",
    ):  # fmt: skip
        assert f": {page}\n" in text
    assert "mkdocs build --quiet --strict" in (ROOT / "Makefile").read_text(encoding="utf-8")
