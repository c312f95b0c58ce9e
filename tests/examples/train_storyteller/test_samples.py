"""Samples of the story grammar: the request is read, the tale is learnt,
and the mix has the share that was asked for."""

import random
from functools import cache
from unittest.mock import Mock

from tokenizers import Tokenizer

from examples.train_storyteller.answers import STRANGE_HEROES, count, strange_tales
from examples.train_storyteller.grammar import StoryGrammar
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


def test_whole_tales_fit_the_context() -> None:
    source, _ = _source()
    rng = random.Random(4)
    samples = [source.draw(rng) for _ in range(200)]
    assert all(len(sample.ids) == len(sample.is_target) <= MAX_LEN for sample in samples)
    # only pairs of long tales are cut
    assert sum(len(sample.ids) == MAX_LEN for sample in samples) < 6


def test_the_mix_has_the_share_of_the_grammar() -> None:
    tale, passage = Sample([1], [True]), Sample([2], [True])
    mixed = MixedSource(Mock(draw=lambda rng: tale), Mock(draw=lambda rng, progress: passage), 0.7)
    rng = random.Random(5)
    drawn = [mixed.draw(rng, 0.5) for _ in range(2000)]
    assert 0.66 < drawn.count(tale) / len(drawn) < 0.74


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
