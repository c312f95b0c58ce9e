"""Read the story corpora and cut them into tales.

Owns the knowledge of how the raw text is laid out (documents, headings, verses) and of how much
each book counts. It never sees tokens, prompts or the model.
"""

import hashlib
import lzma
import re
from dataclasses import dataclass
from pathlib import Path

DOCUMENT_SEPARATOR = "<|endoftext|>"
STORYBOOKS_FILE = "open_storybooks_en.txt.xz"
CLASSICS_FILE = "children_classics.txt.xz"
ATTRIBUTION_FILE = "open_storybooks_attribution.tsv"
STORYBOOKS = "storybooks"
HELD_OUT_PERCENT = 4
MIN_TALE_CHARS = 220
PAGE_MERGE_CHARS = 160

# How often a book is read compared with its length: simple fairy tales count most, long or archaic
# prose little. Books that are not named count DEFAULT_BOOK_WEIGHT; a weight of 0 leaves a book out.
BOOK_WEIGHTS = {
    "Aesop's Fables": 5.0,
    "Grimms' Fairy Tales": 4.0,
    "Andersen's Fairy Tales": 2.5,
    "Great Big Treasury of Beatrix Potter": 4.0,
    "The Book of Dragons": 2.5,
    "The Happy Prince & Other Tales": 4.0,
    "The Little Mermaid": 3.0,
    "Aladdin and the Magic Lamp": 3.0,
    "A Kidnapped Santa Claus": 3.0,
    "The King of the Golden River": 2.0,
    "The Wonderful Wizard of Oz": 2.5,
    "The Marvelous Land of Oz": 1.5,
    "Ozma of Oz": 1.5,
    "Dorothy and the Wizard in Oz": 1.5,
    "The Life and Adventures of Santa Claus": 1.5,
    "Alice's Adventures in Wonderland": 1.5,
    "The Adventures of Pinocchio": 2.0,
    "The Story of Doctor Dolittle": 2.0,
    "The Princess and the Goblin": 2.0,
    "Heidi": 1.5,
    "Black Beauty": 1.0,
    "Five Children and It": 1.0,
    "Peter Pan": 1.0,
    "The Wind in the Willows": 1.0,
    "The Secret Garden": 0.8,
    "A Little Princess": 0.8,
    "The Jungle Book": 0.8,
    "The Railway Children": 0.8,
    "The Merry Adventures of Robin Hood": 0.4,
    "Treasure Island": 0.5,
    "Hawaiian Folk Tales": 0.4,
    "One Thousand and One Nights": 0.15,
    "Bulfinch's Mythology": 0.0,
    "The Other Wise Man": 0.3,
}
DEFAULT_BOOK_WEIGHT = 0.5
STORYBOOK_WEIGHT = 3.0
FABLES = frozenset({"Aesop's Fables"})
FAIRY_TALES = frozenset(
    {
        "Grimms' Fairy Tales",
        "Andersen's Fairy Tales",
        "The Happy Prince & Other Tales",
        "The Little Mermaid",
        "Great Big Treasury of Beatrix Potter",
        "The Book of Dragons",
        "Aladdin and the Magic Lamp",
    }
)

_QUOTES = str.maketrans(
    {"“": '"', "”": '"', "‘": "'", "’": "'", "—": "--", "–": "-", "\u00a0": " ", "…": "..."}
)
_HEADING_END = re.compile(r"""[.!?,;:"'\-)*\]]$""")
_CHAPTER = re.compile(
    r"^(?:#+ *)?(?:(?:the )?(?:\w+ )?(?:chapter|part|book)\b|[IVXL]+\b[. -]|\d+\b[. -])",
    re.IGNORECASE,
)
_NUMBERING = re.compile(
    r"^(?:#+ *)?(?:(?:the \w+ )?(?:chapter|part|book)\b *(?:[IVXLC]+\b|\d+|[a-z]+\b(?= -))?"
    r"|[IVXLC]+\b(?=[. -])|\d+\b)? *[.:-]* *",
    re.IGNORECASE,
)
_FRONT_MATTER = re.compile(
    r"^(?:Title|Author|Year|Translat\w*|Edited|Illustrat\w*|Published) ?(?::|by |\d)", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Tale:
    """One story or chapter: its title (may be empty), the book it is from,
    and its paragraphs in order."""

    title: str
    book: str
    paragraphs: tuple[str, ...]
    weight: float

    @property
    def num_chars(self) -> int:
        return sum(len(paragraph) + 2 for paragraph in self.paragraphs)

    @property
    def is_held_out(self) -> bool:
        """True for a fixed few percent of the tales, chosen by a hash of their words,
        never trained on."""
        digest = hashlib.sha256(
            f"{self.book}|{self.title}|{self.paragraphs[0][:200]}".encode()
        ).digest()
        return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT

    @property
    def is_tale_start(self) -> bool:
        """True where the first paragraph opens a story of its own,
        not the next chapter of a novel."""
        return self.book == STORYBOOKS or self.book in FABLES or self.book in FAIRY_TALES


def read_documents(path: Path) -> list[str]:
    """The documents of one ``.txt.xz`` corpus, quotes and dashes made plain ASCII."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        text = file.read().translate(_QUOTES)
    return [document.strip() for document in text.split(DOCUMENT_SEPARATOR) if document.strip()]


def _clean(paragraph: str) -> str:
    return re.sub(r"\s+", " ", paragraph.replace("_", "")).strip()


def _merge_pages(pages: list[str]) -> tuple[str, ...]:
    """Join the one-sentence pages of a picture book into paragraphs of a readable size."""
    merged: list[str] = []
    for page in pages:
        if merged and len(merged[-1]) < PAGE_MERGE_CHARS and not page.startswith('"'):
            merged[-1] = f"{merged[-1]} {page}"
        else:
            merged.append(page)
    return tuple(merged)


def read_storybooks(path: Path) -> list[Tale]:
    """One tale a document: the first line is the title."""
    tales = []
    for document in read_documents(path):
        title, _, body = document.partition("\n")
        pages = [_clean(page) for page in body.split("\n\n")]
        paragraphs = _merge_pages([page for page in pages if page])
        tale = Tale(_clean(title), STORYBOOKS, paragraphs, STORYBOOK_WEIGHT)
        if tale.num_chars >= MIN_TALE_CHARS and _is_prose(document):
            tales.append(tale)
    return tales


def _is_prose(text: str) -> bool:
    """Refuses texts that are mostly questions, lists, digits or letters beyond ASCII."""
    plain = sum(char.isascii() and not char.isdigit() for char in text) / len(text)
    sentences = len(re.findall(r"[.!?](?:\s|\"|'|$)", text))
    return plain > 0.985 and sentences >= 3


def _is_heading(paragraph: str) -> bool:
    if "\n" in paragraph or len(paragraph) > 90:
        return False
    is_capitals = paragraph.upper() == paragraph and any(char.isalpha() for char in paragraph)
    if paragraph[0] in "\"'":
        return False
    return is_capitals or bool(_CHAPTER.match(paragraph)) or not _HEADING_END.search(paragraph)


def _title_of(heading: str) -> str:
    """The heading without its number, in title case where it was in capitals."""
    title = _NUMBERING.sub("", heading).strip(" -.:")
    if title.upper() == title:
        title = re.sub(r"[A-Za-z][A-Za-z']*", lambda word: word.group().capitalize(), title)
    return title


def _verse(paragraph: str) -> bool:
    """Poems, letters and tables: several lines, none of them long."""
    lines = paragraph.split("\n")
    return len(lines) > 1 and max(map(len, lines)) < 58


def _split_book(document: str, book: str, weight: float) -> list[Tale]:
    tales: list[Tale] = []
    title, paragraphs = "", list[str]()

    def flush() -> None:
        tale = Tale(title, book, tuple(paragraphs), weight)
        if paragraphs and tale.num_chars >= MIN_TALE_CHARS:
            tales.append(tale)

    # this book is set in short lines throughout, so line breaks do not mean verse
    keeps_lines = "Potter" in book
    for raw in document.split("\n\n"):
        paragraph = raw.strip()
        if not paragraph or _FRONT_MATTER.match(paragraph):
            continue
        if _is_heading(paragraph):
            flush()
            title, paragraphs = _title_of(paragraph), []
        elif (keeps_lines or not _verse(paragraph)) and re.search(r"[A-Za-z]{2}", paragraph):
            paragraphs.append(_clean(paragraph))
    flush()
    return tales


def read_classics(path: Path) -> list[Tale]:
    """The chapters and tales of each book whose weight is above zero."""
    tales = []
    for document in read_documents(path):
        match = re.match(r"Title: (.*)", document)
        book = match.group(1).strip() if match else ""
        weight = BOOK_WEIGHTS.get(book, DEFAULT_BOOK_WEIGHT)
        if weight > 0:
            tales += _split_book(document, book, weight)
    return tales


def read_tales(folder: Path) -> list[Tale]:
    """All tales of both corpora in a fixed order."""
    return read_storybooks(folder / STORYBOOKS_FILE) + read_classics(folder / CLASSICS_FILE)
