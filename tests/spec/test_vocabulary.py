"""Token ids of a target and a draft model whose vocabularies differ."""

from __future__ import annotations

import math

import numpy as np
import torch

from quire.spec.vocabulary import TokenMap, common_tokens, map_tokens

TARGET = {"a": 0, "b": 1, "ab": 2, "c": 3, "cab": 4, "<end>": 5}
DRAFT = {"<end>": 0, "ab": 1, "b": 2, "a": 3, "x": 4}


def _inputs(tokens: TokenMap) -> list[int]:
    return [int(each) for each in tokens.inputs(np.arange(6))]


def test_tokens_are_the_same_where_their_texts_are() -> None:
    tokens = map_tokens(TARGET, DRAFT, 6, 7)
    assert _inputs(tokens) == [3, 2, 1, 0, 1, 0]  # "c" has no end that the draft model knows
    logits = tokens.logits(torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]))
    assert logits.tolist() == [[3.0, 2.0, 1.0, -math.inf, -math.inf, 0.0]]


def test_vocabularies_that_agree_need_no_map() -> None:
    smaller = {text: each for text, each in TARGET.items() if each < 4}
    tokens = map_tokens(TARGET, smaller, 6, 4)
    assert _inputs(tokens) == [0, 1, 2, 3, 0, 0]
    assert tokens.logits(torch.ones(1, 4)).tolist() == [[1.0] * 4 + [-math.inf] * 2]
    larger = map_tokens(smaller, TARGET, 4, 6)
    assert larger.logits(torch.ones(2, 6)).shape == (2, 4)
    same = map_tokens(TARGET, TARGET, 6, 6)
    logits = torch.ones(2, 6)
    assert same.logits(logits) is logits


def test_what_vocabularies_share_is_counted_by_the_smaller_one() -> None:
    assert common_tokens(TARGET, DRAFT) == 4 / 5
    assert common_tokens(DRAFT, TARGET) == 4 / 5
    assert common_tokens(TARGET, {"y": 0}) == 0.0
