"""Read the corpora as passages, and make pairs of a query and a passage from them.

A passage is a few sentences that follow one another in one document. Its query is a sentence that
was taken out of it (the inverse cloze task of Lee, Chang and Toutanova, 2019), some of its rarer
words, or these words as a question. One passage in fifty, by a hash, is never trained on.
"""

import hashlib
import lzma
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CORPORA = (
    "children_classics.txt.xz",
    "english_novels.txt.xz",
    "open_storybooks_en.txt.xz",
    "python_peps.txt.xz",
)
ATTRIBUTION_FILE = "open_storybooks_attribution.tsv"
SEPARATOR = "<|endoftext|>"
PASSAGE_WORDS = 60
HELD_OUT = 50
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+")
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
_QUESTIONS = (
    "who", "what", "where", "when", "why", "how", "what is", "who is", "where is", "how does",
    "what does", "where did", "who did", "why did", "what did", "when did", "which", "what about",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Passage:
    """Sentences that follow one another."""

    sentences: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join(self.sentences)

    @property
    def is_held_out(self) -> bool:
        digest = hashlib.sha256(self.text.encode()).digest()
        return int.from_bytes(digest[:4], "big") % HELD_OUT == 0


def read_passages(folder: Path) -> list[Passage]:
    """Return the passages of all corpora in a folder."""
    found = list[Passage]()
    for name in CORPORA:
        text = lzma.decompress((folder / name).read_bytes()).decode("utf-8")
        for document in text.split(SEPARATOR):
            found.extend(_cut(document))
    return found


def _cut(document: str) -> Iterator[Passage]:
    sentences, num_words = list[str](), 0
    for sentence in _SENTENCE_END.split(" ".join(document.split())):
        words = len(sentence.split())
        if not 3 <= words <= 80:
            continue
        sentences.append(sentence)
        num_words += words
        if num_words >= PASSAGE_WORDS and len(sentences) > 1:
            yield Passage(tuple(sentences))
            sentences, num_words = [], 0


class Queries:
    """Draws queries for passages. Words count the less, the more often they occur."""

    def __init__(self, passages: list[Passage]) -> None:
        counts = Counter[str]()
        for passage in passages:
            counts.update(set(words_of(passage.text)))
        self._counts = counts

    def draw(self, passage: Passage, rng: random.Random) -> tuple[str, str]:
        """Return a query, and the text that it is to find."""
        place = rng.randrange(len(passage.sentences))
        sentence = passage.sentences[place]
        kind = rng.random()
        if kind < 0.45:
            kept = passage.sentences
            if rng.random() < 0.85:
                kept = kept[:place] + kept[place + 1 :]
            return sentence, " ".join(kept)
        source = sentence if kind < 0.8 else passage.text
        chosen = self.keywords(source, rng)
        query = " ".join(chosen)
        if rng.random() < 0.6:
            query = f"{rng.choice(_QUESTIONS)} {query}?"
        return query or sentence, passage.text

    def keywords(self, text: str, rng: random.Random) -> list[str]:
        """Draw some words of a text, rare ones rather, in its order."""
        words = list(dict.fromkeys(words_of(text)))
        count = min(len(words), rng.randint(2, 6))
        keys = {word: rng.random() ** (self._counts[word] ** 0.5 / 10) for word in words}
        chosen = set(sorted(words, key=keys.__getitem__, reverse=True)[:count])
        return [word for word in words if word in chosen]


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return [word.lower() for word in _WORD.findall(text)]
