"""Pages that newcomers read use the field's terms:
a list of words that this project once used instead, and what to write."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_pages import ROOT, without_code

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "docs/README.md",
    "docs/tour.md",
    "docs/glossary.md",
    "docs/models.md",
    "docs/troubleshooting.md",
    "docs/benchmarks/README.md",
    "docs/lab/README.md",
    "docs/benchmarks/records.md",
    "benchmarks/README.md",
    *(
        str(page.relative_to(ROOT))
        for name in ("howto", "decisions")
        for page in sorted((ROOT / "docs" / name).glob("*.md"))
    ),
]
TERMS = {
    r"stretch(es)?": "split-K chunk",
    r"(?<!dot )(matrix )?products?": "GEMM",
    r"reckoned": "estimated",
    r"acted out|acting out": "emulated",
    r"goes? past the caches": "streaming store",
    r"asks? for lines": "prefetch",
    r"thoughts?|thinks": "reasoning",
    r"books": "accounting",
    r"pulse": "heartbeat",
    r"made-up weights": "random weights",
    r"in company|company": "batch composition",
    r"crowds?": "burst",
    r"whoever|whosever|somebody|nobody|everybody|anybody": (
        "the component: the client, a request, the scheduler"
    ),
    r"look(s|ed)? into": "query",
    r"peaks?": "maximum, or max logit",
    r"unasked|asked for": "requested, or name the caller",
    r"lies|lie(?= (in|on|there))": "is",
    r"is told (of|apart)": "is separated, is reported",
    r"since then|likewise|besides,": "nothing: say the present state",
}
CODE_TERMS = re.compile(
    r"\b(stretch(es)?|reckon(s|ed|ing)?|acted out|goes? past the caches|made-up|company|crowds?"
    r"|whoever|somebody|look(s|ed)? into|unasked|asked for|thoughts)\b",
    re.IGNORECASE,
)
"""What docstrings and comments do without; the other terms are right somewhere in the code."""
MAX_WORDS_A_SENTENCE = 60


def violations(text: str) -> list[str]:
    """Say which words of a text have a better term."""
    prose = without_code(text)
    prose = re.sub(r"\]\([^)]*\)", "]", prose)
    return [
        (
            f"{match[0]!r} (better: {better}) in "
            f"{prose[max(0, match.start() - 30) : match.end() + 30]!r}"
        )
        for word, better in TERMS.items()
        for match in re.finditer(rf"\b({word})\b", prose, re.IGNORECASE)
    ]


@pytest.mark.parametrize("page", PAGES)
def test_pages_use_the_terms_of_the_field(page: str) -> None:
    assert violations((ROOT / page).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", PAGES)
def test_sentences_can_be_read(page: str) -> None:
    prose = re.sub(
        r"\]\([^)]*\)|<[^>]*>", "", without_code((ROOT / page).read_text(encoding="utf-8"))
    )
    prose = re.sub(
        r"^\|.*$|^#.*$|^[-\d].*?(?=^[-\d\n])", "\n\n", prose, flags=re.MULTILINE | re.DOTALL
    )
    sentences = re.split(r"(?<=[.:;?!])\s|\n\n", prose)
    assert [each for each in sentences if len(each.split()) > MAX_WORDS_A_SENTENCE] == []


def test_the_check_can_fail() -> None:
    found = violations("Whoever asks gets a stretch of `products` in [company](company.md).")
    assert [each.split("'")[1] for each in found] == ["stretch", "company", "Whoever"]


def test_the_readme_stays_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    prose = re.sub(
        r"\]\([^)]*\)|<[^>]*>",
        "",
        re.sub(r"`[^`\n]*`", "", re.sub(r"```.*?```", "", text, flags=re.DOTALL)),
    )
    numbers = re.findall(r"(?<![\w.-])\d[\d.,]*(?![\w-])", prose)
    assert len(text.splitlines()) <= 100 and len(text.split()) <= 750 and len(numbers) <= 14, (
        numbers,
        len(text.split()),
    )


def test_pages_exist() -> None:
    assert [page for page in PAGES if not Path(ROOT / page).is_file()] == []


def _prose(path: Path) -> Iterator[str]:
    """Yield the docstrings and comments of a file of Python or C++, if any of its words is one of
    CODE_TERMS: most files are not worth tokenizing."""
    text = path.read_text(encoding="utf-8")
    if not CODE_TERMS.search(" ".join(text.split())):
        return
    if path.suffix != ".py":
        yield from re.findall(r"//(.*)", text)
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


@pytest.mark.parametrize("folder", ["quire", "csrc", "benchmarks"])
def test_docstrings_and_comments_use_the_terms_of_the_field(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in sorted((ROOT / folder).rglob("*.*"))
        if path.suffix in (".py", ".cpp", ".hpp")
        for text in _prose(path)
        for match in CODE_TERMS.finditer(" ".join(text.split()))
    ]
    assert found == [], "TERMS says what to write instead"
