"""Beginnings of texts, of so many tokens: never more, and no fewer than whole characters allow."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from quire.text.backend import beginning_of, encode_bare
from quire.text.tokenizer import Tokenizer
from quire.weights.folder import resolve_model

TEXTS = (
    "Once upon a time there was an unbelievably happy dragon, who (sometimes) sang.",
    "caf\u00e9 \U0001f600\U0001f680 na\u00efve \u4f60\u597d  two  spaces\n\nlines ",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467" * 3,
    "a",
    "",
)


def _word_pieces() -> Backend:
    pieces = ["[UNK]", "un", "##aff", "##able", "unaff", "a", "##b", "##c", "##a", "b", "c"]
    model = models.WordPiece({each: n for n, each in enumerate(pieces)}, unk_token="[UNK]")
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


def _unigram() -> Backend:
    """A beginning of "abcabc" is best encoded into more tokens than it has within the text."""
    scored = [("<unk>", -9.0), ("a", -5.0), ("b", -5.0), ("c", -5.0), ("ab", -12.0), ("bc", -1.0)]
    scored += [("abcab", -2.0), ("d", -4.0)]
    return Backend(models.Unigram(scored, unk_id=0))


@pytest.mark.parametrize("make", [_word_pieces, _unigram])
def test_a_beginning_has_no_more_tokens_by_itself(make: Any) -> None:
    backend, rng = make(), random.Random(2)
    for text in ["unaffable ab", *("".join(rng.choices("abc d", k=12)) for _ in range(300))]:
        for count in range(1, 10):
            kept = beginning_of(backend, text, count)
            assert text.startswith(kept) and len(encode_bare(backend, kept)) <= count
            if len(encode_bare(backend, text)) <= count:
                assert kept == text


@pytest.mark.parametrize("name", ["quire-storyteller", "quire-embedder"])
def test_a_beginning_has_the_first_tokens_of_its_text(name: str) -> None:
    tokenizer = Tokenizer.from_folder(resolve_model(name))

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    num_whole = 0
    for text in TEXTS:
        ids = encode(text)
        for count in range(1, len(ids) + 2):
            kept = tokenizer.beginning(text, count)
            assert text.startswith(kept)
            found = encode(kept)
            assert found == ids[: len(found)] and len(found) <= count
            num_whole += len(found) == min(count, len(ids))
    assert num_whole > 30


def test_what_spells_a_control_token_is_text_in_beginnings_too() -> None:
    tokenizer = Tokenizer.from_folder(resolve_model("quire-storyteller"))
    control = next(text for text in tokenizer.control_level if len(text) > 4)
    num_tokens = len(tokenizer.encode(control, add_special_tokens=False))
    assert num_tokens > 1
    kept = tokenizer.beginning(f"{control} and more", num_tokens)
    assert kept == control and tokenizer.beginning(control, 1) != control
