"""Composed tales have all that their request names, vary, and keep what is held out apart."""

from __future__ import annotations

import random

import pytest

from examples.train_storyteller.abilities import repeated_share
from examples.train_storyteller.grammar import StoryGrammar
from examples.train_storyteller.tales import COMPOSED, THEMES, TaleComposer

NOUNS = ("teaspoon", "ostrich", "bagpipe")


def test_a_tale_names_all_that_is_in_its_request() -> None:
    composer, rng = TaleComposer(NOUNS), random.Random(1)
    tales = [composer.draw(rng) for _ in range(500)]
    assert [tale.topic for tale in tales if not tale.is_named_in(tale.text)] == []
    assert {tale.plot for tale in tales} == {COMPOSED}
    assert sum(len(tale.named) >= 3 for tale in tales) > 200
    for noun in NOUNS:
        assert any(noun in tale.topic for tale in tales)


@pytest.mark.slow
def test_requests_are_for_themes_for_many_and_for_whatever_may_stand_beside_a_hero() -> None:
    composer, rng = TaleComposer(NOUNS), random.Random(5)
    tales = {tale.topic: tale for tale in (composer.draw(rng) for _ in range(3000))}
    themes = [topic for topic in tales if topic.startswith("being ")]
    assert len(themes) > 30
    assert all(f"about {topic}." in tales[topic].text for topic in themes)
    assert len(tales.keys() & set(THEMES)) > 60
    for part in (
        "and the moon",
        "a contest between",
        "how a",
        " who lived ",
        "ostriches",
        " loves ",
    ):
        assert any(part in topic for topic in tales), part


def test_tales_are_whole_sentences_without_slots() -> None:
    composer, rng = TaleComposer(), random.Random(2)
    for _ in range(300):
        tale = composer.draw(rng)
        assert not set("{}[]|") & set(tale.text + tale.topic)
        assert tale.text[0].isupper() and tale.text[-1] in '.!?"', tale.text
        assert "  " not in tale.text and ".." not in tale.text and ",." not in tale.text


def test_composed_tales_repeat_each_other_less_than_plots_do() -> None:
    rng = random.Random(3)
    composed = [TaleComposer().draw(rng).text for _ in range(60)]
    plots = [StoryGrammar().draw(rng).text for _ in range(60)]
    assert repeated_share(composed) < 0.8 * repeated_share(plots)


def test_held_out_combinations_are_drawn_by_themselves() -> None:
    rng = random.Random(4)
    assert all(TaleComposer(is_held_out=True).draw(rng).is_held_out for _ in range(20))
    assert not any(TaleComposer().draw(rng).is_held_out for _ in range(200))


def test_the_same_random_state_gives_the_same_tale() -> None:
    first, second = (TaleComposer(NOUNS).draw(random.Random(7)) for _ in range(2))
    assert first == second
