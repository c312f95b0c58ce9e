"""How tokens spell the marks around thoughts:
what the sampler makes of token ids is what the text says, however it is cut."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from quire.core.plan import ThinkingBudget
from quire.engine.front.think_tags import tokens_of_tags
from quire.errors import InvalidParameterError
from quire.sampling.thinking import ThinkingWatch
from quire.text.files import TextConfig
from quire.text.tokenizer import Tokenizer
from quire.weights.folder import resolve_model

BEGIN, END = MARKS = ("<think>", "</think>")
SHIPPED = Tokenizer.from_folder(resolve_model("quire-storyteller"))
WORDS = [
    "<",
    "/",
    "th",
    "t",
    "h",
    "ink",
    "in",
    "i",
    "n",
    "k",
    ">",
    "\n",
    " ",
    "  ",
    "a",
    " the",
    "hi",
    "thin",
    "é",
]


def tokenizer_of(
    texts: list[str], special: tuple[str, ...] = (), added: tuple[str, ...] = ()
) -> Tokenizer:
    backend = Backend(
        WordLevel({text: token_id for token_id, text in enumerate(texts)}, unk_token=texts[0])
    )
    backend.add_special_tokens(list(special))
    backend.add_tokens(list(added))
    return Tokenizer(backend.to_str(), TextConfig())


def is_thinking(data: bytes, *, is_open: bool) -> tuple[bool, bytes]:
    """By the text: whether it is among thoughts, and what follows the first mark."""
    if not is_open:
        rest = data.lstrip(b" \n\r\t")
        if not rest.startswith(BEGIN.encode()):
            return False, b""
        data = rest[len(BEGIN) :]
    return END.encode() not in data, data


@settings(max_examples=100, deadline=None)
@given(
    words=st.lists(st.sampled_from([*WORDS, BEGIN, END, "</", "think>"]), max_size=14),
    starts=st.booleans(),
    is_open=st.booleans(),
)
def test_the_watch_follows_the_text(words: list[str], starts: bool, is_open: bool) -> None:
    """With no budget at all a token is forced exactly while the text is among thoughts,
    and what is forced ends them."""
    token_ids = [
        token_id
        for word in ([BEGIN] if starts else []) + words
        for token_id in SHIPPED.encode(word, add_special_tokens=False)
    ]
    marks = tokens_of_tags(SHIPPED, MARKS, SHIPPED.vocab_size)
    watch, data = ThinkingWatch(ThinkingBudget(0, is_open, marks)), b""
    for place in range(len(token_ids) + 1):
        inside, thoughts = is_thinking(data, is_open=is_open)
        # What follows a first mark within the same token is not looked at; the shipped tokenizer
        # has no such token.
        assert (watch.forced(token_ids[:place]) is not None) == inside
        fresh = ThinkingWatch(ThinkingBudget(0, is_open, marks))
        assert fresh.forced(token_ids[:place]) == watch.forced(token_ids[:place])
        if inside:
            partly = max(size for size in range(len(END)) if thoughts.endswith(END[:size].encode()))
            forced, more = b"", list(token_ids[:place])
            while (token_id := fresh.forced(more)) is not None:
                forced += SHIPPED.read_bytes(token_id)
                more.append(token_id)
                assert len(more) <= place + len(END)
            assert forced == END[partly:].encode(), "no more than what is missing"
        data += b"" if place == len(token_ids) else SHIPPED.read_bytes(token_ids[place])


def test_the_budget_counts_what_stands_between_the_marks() -> None:
    think, end, word, line = 1, 2, 3, 4
    tokenizer = tokenizer_of(["?", "<think>", "</think>", "word", "\n"])
    marks = tokens_of_tags(tokenizer, MARKS, 5)
    assert marks.end_token_ids[0] == end

    def forced(budget: int, *token_ids: int, is_open: bool = False) -> int | None:
        return ThinkingWatch(ThinkingBudget(budget, is_open, marks)).forced(token_ids)

    assert forced(0) is None and forced(0, think) == end and forced(0, is_open=True) == end
    assert (
        forced(2, think, word) is None
        and forced(2, think, word, word) == end
        and forced(1, word, is_open=True) == end
    )
    assert forced(2, line, line, think, word, word) == end, "white space may come first"
    assert forced(0, word, think) is None, "behind an answer's beginning a mark is text"
    assert (
        forced(2, think, word, end, word, word, word) is None
        and forced(0, think, end, think) is None
    )
    watch = ThinkingWatch(ThinkingBudget(1, True, marks))
    assert watch.forced([word]) == end and watch.forced([]) is None and watch.forced([end]) is None
    assert watch.forced([word]) == end


def test_rejected_drafts_leave_no_trace_where_the_last_of_them_came_true() -> None:
    tokenizer = tokenizer_of(["?", "<think>", "</think>", "word", "\n"])
    marks = tokens_of_tags(tokenizer, MARKS, 5)
    end, word = 2, 3
    watch = ThinkingWatch(ThinkingBudget(2, True, marks))
    assert watch.forced([word, word, word, word]) == end, "the third and fourth are drafts"
    assert watch.forced([word, word, end, word]) is None, "the third was another"


def test_special_marks_are_these_tokens_alone() -> None:
    tokenizer = tokenizer_of(["?", "<", "/", "think", ">", "\n"], special=MARKS)
    begin, end = tokenizer.token_to_id(BEGIN), tokenizer.token_to_id(END)
    marks = tokens_of_tags(tokenizer, MARKS, 8)
    watch = ThinkingWatch(ThinkingBudget(3, False, marks))
    assert watch.forced([5, begin, 1, 2]) is None and watch.forced([5, begin, 1, 2, 3, 4]) == end  # type: ignore[list-item]
    spelt = ThinkingWatch(ThinkingBudget(0, False, marks))
    assert spelt.forced([1, 3, 4]) is None, "pieces that spell a special mark are text"


def test_added_tokens_and_pieces_both_count_where_marks_are_no_special_tokens() -> None:
    tokenizer = tokenizer_of(["?", "<", "/", "think", ">", "a"], added=MARKS)
    begin, end = tokenizer.token_to_id(BEGIN), tokenizer.token_to_id(END)
    marks = tokens_of_tags(tokenizer, MARKS, 8)
    for opening in ([begin], [1, 3, 4]):
        for closing in ([end], [1, 2, 3, 4]):
            budget = ThinkingBudget(1, False, marks)
            assert ThinkingWatch(budget).forced([*opening, 5]) == end
            assert ThinkingWatch(budget).forced([*opening, *closing, 5, 5]) is None
    assert ThinkingWatch(ThinkingBudget(1, True, marks)).forced([1]) == 2, (
        "a mark that is half there is not begun anew"
    )


def test_a_vocabulary_that_cannot_spell_the_mark_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="no tokens for '</think>'"):
        tokens_of_tags(tokenizer_of(["?", "<think>", "word"]), MARKS, 3)
    with pytest.raises(InvalidParameterError, match="no tokens"):
        # the model has fewer tokens than the tokenizer
        tokens_of_tags(tokenizer_of(["?", "a", "</think>"]), MARKS, 2)


@pytest.mark.parametrize(
    "name", ["gpt2", "phi-3-mini", pytest.param("qwen3", marks=pytest.mark.slow)]
)
def test_real_vocabularies_spell_the_marks(name: str, shared: Path, tmp_path: Path) -> None:
    """In pieces, in pieces of a vocabulary that puts spaces before words, and in one token."""
    source = shared / "data/tokenizers" / name
    (tmp_path / "tokenizer.json").write_bytes(
        lzma.decompress((source / "tokenizer.json.xz").read_bytes())
    )
    tokenizer = Tokenizer.from_folder(tmp_path)
    marks = tokens_of_tags(tokenizer, MARKS, tokenizer.vocab_size)
    watch = ThinkingWatch(ThinkingBudget(0, True, marks))
    spelt: list[int] = []
    while (token_id := watch.forced(spelt)) is not None:
        spelt.append(token_id)
    assert b"".join(map(tokenizer.read_bytes, spelt)) == END.encode()
    assert len(marks.begin_steps) + len(marks.end_steps) < 5000, (
        "they travel with every request that has a budget"
    )
