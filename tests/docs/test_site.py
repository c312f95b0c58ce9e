"""The site: pages of reference name everything that there is, and links that leave it become text."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
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


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=250
    )
    assert done.returncode == 0, done.stderr[-3000:]
    index = json.loads((tmp_path / "search" / "search_index.json").read_text(encoding="utf-8"))
    found = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert {
        "reference/options.html", "reference/metrics.html", "reference/http-api.html",
        "reference/python.html", "reference/commands.html", "troubleshooting.html",
        "exactness.html", "howto/operate.html",
    } <= found  # fmt: skip
