"""Samples of the story grammar: the request is read, the tale is learnt,
and the mix has the share that was asked for."""

import random
from functools import cache
from unittest.mock import Mock

import pytest
from tokenizers import Tokenizer

from examples.train_storyteller.answers import count, strange_tales
from examples.train_storyteller.batches import NAMED_WEIGHT, collate
from examples.train_storyteller.grammar import StoryGrammar
from examples.train_storyteller.kinds import STRANGE_HEROES
from examples.train_storyteller.samples import MAX_LEN, Encoder, GrammarSource, MixedSource, Sample
from quire.weights.folder import resolve_model


@cache
def _source() -> tuple[GrammarSource, Tokenizer]:
    tokenizer = Tokenizer.from_file(str(resolve_model("quire-storyteller") / "tokenizer.json"))
    return GrammarSource(StoryGrammar(), Encoder(tokenizer)), tokenizer


def test_only_the_tale_and_its_end_are_learnt() -> None:
    source, tokenizer = _source()
    sample = source.draw(random.Random(3))
    learnt = [
        token for token, is_target in zip(sample.ids, sample.is_target, strict=True) if is_target
    ]
    read = tokenizer.decode(sample.ids[: sample.is_target.index(True)], skip_special_tokens=False)
    assert read.startswith("<|im_start|>user\n") and read.endswith(
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(learnt[-1:], skip_special_tokens=False) == "<|im_end|>"
    assert len(tokenizer.decode(learnt).split()) > 90


@pytest.mark.slow
def test_whole_tales_fit_the_context() -> None:
    source, _ = _source()
    rng = random.Random(4)
    samples = [source.draw(rng) for _ in range(200)]
    assert all(len(sample.ids) == len(sample.is_target) <= MAX_LEN for sample in samples)
    # only pairs of long tales are cut
    assert sum(len(sample.ids) == MAX_LEN for sample in samples) < 6


def test_the_mix_has_the_share_of_the_grammar() -> None:
    tale, passage = Sample([1], [True]), Sample([2], [True])
    composed = Sample([3], [True])
    sources = [(Mock(draw=lambda rng: tale), 0.5), (Mock(draw=lambda rng: composed), 0.2)]
    mixed = MixedSource(sources, Mock(draw=lambda rng, progress: passage))
    rng = random.Random(5)
    drawn = [mixed.draw(rng, 0.5) for _ in range(2000)]
    assert 0.46 < drawn.count(tale) / len(drawn) < 0.54
    assert 0.17 < drawn.count(composed) / len(drawn) < 0.23
    with pytest.raises(ValueError, match=r"\[0.7, 0.4\] add up to more than 1"):
        MixedSource([(Mock(), 0.7), (Mock(), 0.4)], Mock())


def test_words_of_the_request_are_marked_in_the_answer() -> None:
    _, tokenizer = _source()
    encoder = Encoder(tokenizer)
    sample = encoder.join(
        [("Tell me of ponies.", "Two ponies and a pony met an owl.")], True, ["pony"]
    )
    marked = [
        token for token, is_named in zip(sample.ids, sample.is_named, strict=True) if is_named
    ]
    assert tokenizer.decode(marked) == " pony"
    sample = encoder.join(
        [("A fox.", "The fox ran."), ("An owl.", "An owl.")], True, ["fox", "owl"]
    )
    named = [token for token, is_named in zip(sample.ids, sample.is_named, strict=True) if is_named]
    assert tokenizer.decode(named) == " fox owl"
    batch = collate([sample, Sample([5, 6, 7], [False, True, True])])
    weights = batch.weights[0][: len(sample.ids) - 1]
    assert weights.tolist() == [NAMED_WEIGHT if named else 1.0 for named in sample.is_named[1:]]
    assert set(batch.weights[1].tolist()) == {1.0}


def test_strange_heroes_are_in_no_tale() -> None:
    grammar, rng = StoryGrammar(), random.Random(6)
    text = " ".join(
        f"{tale.topic} {tale.text}".lower() for tale in (grammar.draw(rng) for _ in range(800))
    )
    assert not [hero for hero in STRANGE_HEROES if hero in text]


def test_answers_are_counted_by_what_they_name() -> None:
    tales = strange_tales()[:2]
    assert count(tales, ["A pineapple sang.", "A drum sang."]) == {
        "a hero that was never seen": (1, 2)
    }
