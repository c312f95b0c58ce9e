"""What the embedder is trained on, and what it finds."""

from __future__ import annotations

import random

import numpy as np
import torch

from examples.train_embedder.cooccurrence import token_vectors
from examples.train_embedder.evaluate import QUESTIONS, bm25, embedded, ranks_of
from examples.train_embedder.passages import Passage, Queries, _cut, words_of
from quire import LLM

SENTENCES = tuple(f"The {who} {did} in the {place} for a long time." for who, did, place in [
    ("fox", "slept", "forest"), ("king", "reigned", "castle"), ("girl", "sang", "garden"),
    ("sailor", "waited", "harbour"), ("baker", "worked", "kitchen"), ("bird", "sat", "tree"),
])  # fmt: skip
PASSAGES = [Passage(SENTENCES[start : start + 2]) for start in range(5)]


def test_passages_are_sentences_in_their_order() -> None:
    text = "Too short. " + " ".join(SENTENCES * 3)
    passages = list(_cut(text))
    assert passages and "Too short." not in passages[0].text
    assert [each for passage in passages for each in passage.sentences] == [*SENTENCES * 3][
        : sum(len(each.sentences) for each in passages)
    ]
    assert all(len(words_of(each.text)) >= 60 for each in passages)


def test_a_query_is_of_its_passage() -> None:
    queries, rng = Queries(PASSAGES), random.Random(2)
    kinds = set[bool]()
    for _ in range(200):
        passage = rng.choice(PASSAGES)
        query, text = queries.draw(passage, rng)
        assert text in (passage.text, *passage.sentences) and query
        kinds.add(query.endswith("?"))
        named = set(words_of(query)) & {"fox", "king", "girl", "sailor", "baker", "bird"}
        assert all(name in passage.text for name in named)
    assert kinds == {True, False}


def test_tokens_in_like_company_have_like_vectors() -> None:
    rng = random.Random(0)
    texts = [
        [rng.choice(group) for _ in range(12)]
        for group in ([1, 2, 3, 4], [5, 6, 7, 8]) for _ in range(200)
    ]  # fmt: skip
    vectors = torch.nn.functional.normalize(token_vectors(texts, 9, 4)[1:], dim=1)
    likeness = vectors @ vectors.T
    assert likeness[:4, :4].min() > likeness[:4, 4:].max()


def test_a_rank_counts_the_texts_before_ones_own() -> None:
    assert ranks_of(np.array([[0.5, 0.9, 0.1], [0.2, 0.3, 0.1], [1, 1, 0]])).tolist() == [1, 0, 2]
    texts = list(SENTENCES)
    assert (
        ranks_of(bm25(["the fox", "a reigning king", "girl sang"], texts[:3])).tolist() == [0] * 3
    )


def test_the_shipped_embedder_finds_what_questions_are_about() -> None:
    asked = [line.split("\t") for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
    queries, texts = [each[0] for each in asked], [each[1] for each in asked]
    with LLM("quire-embedder") as llm:
        ranks = ranks_of(embedded(llm, queries, texts))
    assert (ranks == 0).mean() > (ranks_of(bm25(queries, texts)) == 0).mean()
