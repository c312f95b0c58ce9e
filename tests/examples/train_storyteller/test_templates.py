"""The template language: choices, slots, and the last touch on articles and capitals."""

import random

import pytest

from examples.train_storyteller.templates import TemplateError, expand, polish


def _expand(text: str, seed: int = 0, **values: str) -> str:
    return expand(text, values.__getitem__, random.Random(seed))


def test_slots_are_filled_and_capitalised() -> None:
    assert (
        _expand("{Hero} saw {other}.", hero="the fox", other="the moon") == "The fox saw the moon."
    )


def test_choices_nest_may_be_empty_and_all_come_up() -> None:
    found = {_expand("[a|b[c|d]|]!", seed) for seed in range(60)}
    assert found == {"a!", "bc!", "bd!", "!"}


@pytest.mark.parametrize("text", ["[a|b", "a]", "a|b", "{a", "a}", "{a b}"])
def test_broken_templates_are_refused(text: str) -> None:
    with pytest.raises(TemplateError):
        _expand(text, a="x")


@pytest.mark.parametrize(
    ("raw", "polished"),
    [
        ("a owl met an fox and a unicorn.", "An owl met a fox and a unicorn."),
        ("a honest man waited a hour.", "An honest man waited an hour."),
        (
            'he ran. the end! "who?" asked tom. "me." so it was.',
            'He ran. The end! "who?" asked tom. "me." So it was.',
        ),
        ("one  fox , two .\n\n the end", "One fox, two.\n\nThe end"),
        ("and then ... nothing", "And then... nothing"),
        ('"why?. no!." said x', '"why? No!" said x'),
    ],
)
def test_polish(raw: str, polished: str) -> None:
    assert polish(raw) == polished
