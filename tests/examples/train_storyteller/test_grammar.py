"""The story grammar: the same tale for a seed, on the topic, in clean English."""

import random
import re
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from examples.train_storyteller.grammar import GrammarTale, StoryGrammar, compose
from examples.train_storyteller.kinds import ADJECTIVE_TRAITS
from examples.train_storyteller.plots import read_plots

pytestmark = pytest.mark.slow

NUM_TALES = 2000


@cache
def _tales() -> tuple[GrammarTale, ...]:
    grammar, rng = StoryGrammar(), random.Random(2026)
    return tuple(grammar.draw(rng) for _ in range(NUM_TALES))


def test_the_same_seed_gives_the_same_tales() -> None:
    grammar = StoryGrammar()
    first, second, other = (
        [grammar.draw(rng) for _ in range(20)] for rng in map(random.Random, (5, 5, 6))
    )
    assert first == second != other


def test_every_tale_names_all_that_its_topic_asks_for() -> None:
    missed = [
        (tale.topic, tale.plot)
        for tale in _tales()
        if not tale.named or not tale.is_named_in(tale.text)
    ]
    assert not missed


def test_the_first_sentences_name_the_hero_of_the_topic() -> None:
    """A request for two heroes finds both in the first 250 characters."""
    pairs = [tale for tale in _tales() if re.fullmatch(r"an? \w+ and an? \w+", tale.topic)]
    assert len(pairs) > 50
    assert all(tale.is_named_in(tale.text[:250]) for tale in pairs)


@pytest.mark.parametrize(
    ("fault", "pattern"),
    [
        ("an unfilled slot", r"[{}\[\]|]"),
        ("a before a vowel", r"\b[Aa] (?!uni|one|use)[aeiouAEIOU]"),
        ("an before a consonant", r"\b[Aa]n (?!hour|honest)[^aeiouAEIOU]"),
        ("two articles", r"\b(?:an?|the) (?:an?|the)\b"),
        ("a doubled word", r"\b(\w+) \1\b"),
        ("a sentence without a capital", r"(?:^|\n\n|(?<!\.)[.!?] )[a-z]"),
        ("two stops", r"[.,!?][,.!?](?!\.)(?<!\.\.)"),
        ("loose spaces", r"  |[ \n][.,!?]| \n|\n "),
    ],
)
def test_no_tale_has(fault: str, pattern: str) -> None:
    found = [
        (tale.plot, match.group(), tale.text)
        for tale in _tales()
        if (match := re.search(pattern, tale.text))
    ]
    assert not found, f"{fault}: {found[0]}"


def test_quotes_are_closed_in_every_paragraph() -> None:
    assert all(part.count('"') % 2 == 0 for tale in _tales() for part in tale.text.split("\n\n"))


def test_tales_are_short() -> None:
    num_words = [len(tale.text.split()) for tale in _tales()]
    assert min(num_words) >= 90
    assert max(num_words) <= 240


def test_tales_and_requests_differ() -> None:
    assert len({tale.text for tale in _tales()}) > 0.98 * NUM_TALES
    assert len({tale.topic for tale in _tales()}) > 0.8 * NUM_TALES
    openings = Counter(" ".join(tale.text.split()[:3]) for tale in _tales())
    assert openings.most_common(1)[0][1] < 0.2 * NUM_TALES


def test_every_plot_is_drawn_and_can_be_told() -> None:
    rng = random.Random(1)
    assert {tale.plot for tale in _tales()} == {plot.name for plot in read_plots()}
    for plot in read_plots():
        wordings = {compose(plot, rng).text for _ in range(5)}
        assert len(wordings) == 5, plot.name


def test_no_held_out_combination_is_trained_on() -> None:
    rng, grammar = random.Random(3), StoryGrammar(is_held_out=True)
    held_out = [grammar.draw(rng) for _ in range(60)]
    seen = {pair for tale in _tales() for pair in tale.pairs}
    assert all(tale.is_held_out for tale in held_out)
    assert not any(tale.is_held_out for tale in _tales())
    assert all(set(tale.pairs) - seen for tale in held_out)


def test_every_plot_can_be_cast_with_every_preferred_word() -> None:
    """No list of words to choose from is ever empty, however rare the combination."""
    for plot in read_plots():
        assert set(plot.prefers) - set(plot.avoids) or not plot.prefers, plot.name
        for word in ADJECTIVE_TRAITS:
            compose(replace(plot, needs=(word,)), random.Random(word))
