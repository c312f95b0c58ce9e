"""A reader who knows vLLM finds what they came for within two clicks from the start page: one on a
row that says so, one in the page's table of contents. The site's navigation has the page as well."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest
from markdown_pages import ROOT


class Question(NamedTuple):
    """What is looked for, and where it is answered."""

    asked: str
    cue: str
    """What the row of the start page says, in lower case."""
    page: str
    heading: str
    """Of the section that answers; the page's title where the whole page does."""
    answer: str
    """A pattern of what the section must say."""


QUESTIONS = (
    Question("serve a GGUF file", "gguf", "howto/quantize.md", "GGUF", r"`quire serve \S+\.gguf"),
    Question(
        "which metrics to alert on", "alert", "howto/operate.md", "Which metrics to alert on",
        r"`quire:\w+`",
    ),
    Question(
        "what an error message means", "error message", "troubleshooting.md", "Troubleshooting",
        r"\| message \| cause \| what to do \|",
    ),
    Question(
        "how to add a model", "add a model", "howto/add-a-model.md", "Add a model",
        r"`quire/models/",
    ),
    Question(
        "what exactness promises", "promised", "exactness.md",
        "Exactness: what is promised, and what it costs", r"bit",
    ),
    Question(
        "what exactness costs", "costs", "exactness.md",
        "Exactness: what is promised, and what it costs", r"\*\*What it costs\.\*\*",
    ),
)  # fmt: skip
DOCS = ROOT / "docs"


def _section(text: str, heading: str) -> str:
    """The text below a heading, up to the next one of its level or above; "" where there is none."""
    found = re.search(rf"^(#+) {re.escape(heading)}\s*$", text, re.MULTILINE)
    if found is None:
        return ""
    rest = text[found.end() :]
    end = re.search(rf"^#{{1,{len(found[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.asked)
def test_an_answer_is_two_clicks_from_the_start_page(question: Question) -> None:
    start = (DOCS / "README.md").read_text(encoding="utf-8")
    rows = [line.lower() for line in start.splitlines() if f"]({question.page})" in line]
    assert [row for row in rows if question.cue in row], "no row of the start page leads there"
    section = _section((DOCS / question.page).read_text(encoding="utf-8"), question.heading)
    assert re.search(question.answer, section), f"{question.page} does not answer it"
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    assert re.search(rf": {re.escape(question.page)}$", navigation, re.MULTILINE)


def test_the_start_page_of_the_site_is_one_click_from_the_readme() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    assert navigation.strip().splitlines()[0] == "- Start: README.md"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(r"\]\(docs/README\.md\)", readme)
