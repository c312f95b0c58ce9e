"""The story grammar: composes very many little tales from plots and kinds of heroes, each with the
request it answers.

Owns the casting (who plays, with which describing word and pronouns), the choice of the request,
and what may not be trained on (held-out pairs of hero and plot, hero and describing word, hero and
hero). The same random state gives the same tale. It knows nothing of tokens or of the chat format.
"""

import hashlib
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from .kinds import (
    ADJECTIVE_TRAITS,
    FAVOURITES,
    GOING,
    HABITATS,
    HE,
    HELPER_ADJECTIVES,
    HELPERS,
    IT,
    KINDS,
    NAMES_HE,
    NAMES_SHE,
    PRESENT,
    SLOW,
    SLOW_GOING,
    THING_ADJECTIVES,
    THING_TRAITS,
    THINGS,
    WATER_HELPERS,
    Kind,
    Pronouns,
    word_list,
)
from .plots import COMMON, Plot, read_plots
from .templates import expand, polish
from .words import plural

HELD_OUT_PERCENT = 5
FAVOURITE_SHARE = 0.4
FREE_SHARE = 0.25
"""Of heroes who are any noun of the books: they must be read in the request."""
NAMED_SHARE = 0.3
NAMED_GROUPS = frozenset(("animal", "bird", "person", "water", "thing"))
ADJECTIVE_SHARE = 0.55
PRESENT_SHARE = 0.35
SECOND_ADJECTIVE_SHARE = 0.08
OTHER_ADJECTIVE_SHARE = 0.25
PREFERRED_SHARE = 0.7
_SMALL_WORDS = frozenset(
    word_list(
        """in, on, at, to, of, by, an, it, he, the, and, for, with, from, who, his, her, its, had, was, were, that, about,
        how, not, one, two"""
    )
)


@dataclass(slots=True)
class Character:
    """One who plays in a tale, and how the tale may call them."""

    kind: Kind
    pronouns: Pronouns
    adjectives: tuple[str, ...] = ()
    name: str = ""

    @property
    def full(self) -> str:
        return " ".join((*self.adjectives, self.kind.noun))

    @property
    def indefinite(self) -> str:
        return f"the {self.full}" if self.kind.is_unique else f"a {self.full}"

    def definite(self, rng: random.Random) -> str:
        if self.name and rng.random() < 0.5:
            return self.name
        return (
            f"the {self.full}"
            if self.adjectives and rng.random() < 0.25
            else f"the {self.kind.noun}"
        )


@dataclass(frozen=True, slots=True)
class GrammarTale:
    """A tale and what the request asks for, as a noun phrase.

    `named` are the words of the topic that mean somebody or something, lower case: a tale on the
    topic names them all. `pairs` are the combinations by which a tale is held out.
    """

    topic: str
    named: tuple[str, ...]
    text: str
    plot: str
    pairs: tuple[str, ...]

    @property
    def is_held_out(self) -> bool:
        return any(is_held_out_pair(pair) for pair in self.pairs)

    def is_named_in(self, text: str) -> bool:
        """Whether the text names all that the topic asks for, endings of words aside."""
        lowered = text.lower()
        return all(re.search(rf"\b{re.escape(stem(word))}", lowered) for word in self.named)


def topic_words(phrase: str) -> list[str]:
    return [
        word
        for word in re.findall(r"[a-z]+", phrase.lower())
        if word not in _SMALL_WORDS and len(word) > 1
    ]


def _named(topic: str, scene: "Scene") -> tuple[str, ...]:
    """The words of the topic that name its hero, the other, a thing, a place or a theme."""
    if topic in scene.plot.themes:
        return tuple(topic_words(topic))
    if topic == plural(scene.hero.kind.noun):
        return tuple(topic_words(scene.hero.kind.noun))
    other = scene.other.full if scene.other is not None else ""
    thing = scene.values["bare_thing"] if scene.values["thing_noun"] in topic else ""
    phrases = (scene.hero.full, scene.hero.name, other, thing, scene.values["home"])
    known = {word for phrase in phrases for word in topic_words(phrase)}
    return tuple(word for word in topic_words(topic) if word in known) or tuple(topic_words(topic))


def stem(word: str) -> str:
    for plural_end, end in (("ies", ""), ("ves", ""), ("es", ""), ("s", "")):
        if (
            word.endswith(plural_end)
            and len(word) - len(plural_end) >= 3
            and not word.endswith("ss")
        ):
            return word[: -len(plural_end)] + end
    return word


@cache
def is_held_out_pair(pair: str) -> bool:
    return (
        int.from_bytes(hashlib.sha256(pair.encode()).digest()[:4], "big") % 100 < HELD_OUT_PERCENT
    )


@cache
def _kinds_of(groups: tuple[str, ...]) -> tuple[tuple[Kind, ...], tuple[Kind, ...]]:
    """The kinds of these groups or of these names, and the favourites among them."""
    found = tuple(kind for kind in KINDS if kind.group in groups or kind.noun in groups)
    assert found, groups
    return found, tuple(kind for kind in found if kind.noun in FAVOURITES) or found


def _draw_kind(groups: tuple[str, ...], rng: random.Random) -> Kind:
    every, favourites = _kinds_of(groups)
    return rng.choice(favourites if rng.random() < FAVOURITE_SHARE else every)


@dataclass(slots=True)
class Scene:
    """One tale in the making: its cast and the values of its slots."""

    plot: Plot
    rng: random.Random
    hero: Character
    other: Character | None
    values: dict[str, str] = field(default_factory=dict)

    def lookup(self, name: str) -> str:
        """The value of a slot: a fixed word, a form of a character,
        or a template of the plot or of all plots."""
        if name in self.values:
            return self.values[name]
        if name == "hero":
            return self.hero.definite(self.rng)
        if name == "other" and self.other is not None:
            return self.other.definite(self.rng)
        if name in COMMON:
            return expand(COMMON[name], self.lookup, self.rng)
        raise KeyError(f"plot {self.plot.name!r} has the unknown slot {{{name}}}")

    def expand(self, text: str) -> str:
        return expand(text, self.lookup, self.rng)


class StoryGrammar:
    """Draws tales. `is_held_out` chooses whether only held-out combinations
    are drawn or none of them."""

    def __init__(self, nouns: Sequence[str] = (), *, is_held_out: bool = False) -> None:
        """`nouns` are further heroes, who play in the place of one of the same sort."""
        self._nouns = tuple(nouns)
        self._plots = read_plots()
        self._weights = [plot.weight for plot in self._plots]
        self._is_held_out = is_held_out

    def draw(self, rng: random.Random) -> GrammarTale:
        while True:
            tale = compose(rng.choices(self._plots, self._weights)[0], rng, self._nouns)
            if tale.is_held_out == self._is_held_out:
                return tale


def compose(plot: Plot, rng: random.Random, nouns: Sequence[str] = ()) -> GrammarTale:
    """One tale of the plot."""
    hero = _cast(plot, rng)
    other = _cast_other(plot, hero, rng) if plot.other else None
    for character in (hero, other):
        if character is not None and nouns and rng.random() < FREE_SHARE:
            character.kind = replace(character.kind, noun=rng.choice(nouns))
    scene = Scene(plot, rng, hero, other)
    _fill(scene)
    for name, template in plot.lets:
        scene.values[name] = scene.expand(template)
    topic, lead = _topic(scene)
    paragraphs = [scene.expand(paragraph) for paragraph in plot.paragraphs]
    text = polish("\n\n".join([f"{lead} {paragraphs[0]}", *paragraphs[1:]]))
    polished = polish(topic)
    # polish gives a sentence a capital letter
    topic = topic[0] + polished[1:] if topic[0].islower() else polished
    return GrammarTale(topic, _named(topic, scene), text, plot.name, _pairs(scene))


def _cast(plot: Plot, rng: random.Random) -> Character:
    kind = _draw_kind(plot.groups, rng)
    pronouns = rng.choice(kind.pronouns)
    adjectives = _adjectives(plot, kind, rng)
    name = ""
    if (
        plot.introduces_name
        and kind.group in NAMED_GROUPS
        and not kind.is_unique
        and rng.random() < NAMED_SHARE
    ):
        name = rng.choice(
            NAMES_HE
            if pronouns is HE
            else NAMES_SHE
            if pronouns is not IT
            else NAMES_HE + NAMES_SHE
        )
    return Character(kind, pronouns, adjectives, name)


def _adjectives(plot: Plot, kind: Kind, rng: random.Random) -> tuple[str, ...]:
    if plot.needs and kind.group not in ("thing", "sky", "place"):
        first = rng.choice(plot.needs)
    elif rng.random() < ADJECTIVE_SHARE:
        allowed = (
            THING_TRAITS if kind.group in ("thing", "sky", "place") else tuple(ADJECTIVE_TRAITS)
        )
        pool = plot.prefers if plot.prefers and rng.random() < PREFERRED_SHARE else allowed
        first = rng.choice([adjective for adjective in pool if adjective not in plot.avoids])
    else:
        return ()
    if first in kind.noun.split():
        return ()
    if (
        rng.random() < SECOND_ADJECTIVE_SHARE
        and first not in ("little", "tiny", "big", "small")
        and kind.noun[:3] != "old"
    ):
        return (first, "little")
    return () if first in ("old", "young") and kind.noun[:3] in ("old", "gra", "bab") else (first,)


def _cast_other(plot: Plot, hero: Character, rng: random.Random) -> Character:
    kind = hero.kind
    while kind.noun in hero.kind.noun or hero.kind.noun in kind.noun:
        kind = _draw_kind(plot.other, rng)
    adjectives: tuple[str, ...] = ()
    if rng.random() < OTHER_ADJECTIVE_SHARE and kind.group not in ("sky", "place"):
        pool = plot.other_prefers or tuple(ADJECTIVE_TRAITS)
        allowed = [
            each
            for each in pool
            if each not in (*hero.adjectives, *kind.noun.split(), "lost", "old", "young")
        ]
        adjectives = (rng.choice(allowed),) if allowed else ()
    return Character(kind, rng.choice(kind.pronouns), adjectives)


def _fill(scene: Scene) -> None:
    """The slots that are fixed for the whole tale."""
    rng, hero, values = scene.rng, scene.hero, scene.values
    habitat = HABITATS[hero.kind.habitat]
    values["home"] = rng.choice(scene.plot.places or habitat.homes)
    values["food"] = rng.choice(habitat.foods)
    pasts = SLOW_GOING if hero.kind.noun in SLOW else GOING[hero.kind.group]
    values["went"], values["go"], values["going"] = rng.choice(pasts)
    values["kind"], values["a_kind"] = hero.kind.noun, f"a {hero.kind.noun}"
    values["hands"] = _hands(hero.kind)
    values["full_hero"], values["a_hero"] = f"the {hero.full}", hero.indefinite
    values["bare_hero"] = hero.full
    values |= _pronoun_slots("", hero.pronouns)
    values["named"] = f" {rng.choice(('named', 'called'))} {hero.name}" if hero.name else ""
    if scene.other is not None:
        values["bare_other"] = scene.other.full
        values["full_other"], values["a_other"] = f"the {scene.other.full}", scene.other.indefinite
        values |= _pronoun_slots("o", scene.other.pronouns)
    _fill_helpers(scene)
    _fill_thing(scene)
    traits = ADJECTIVE_TRAITS.get(hero.adjectives[0], ()) if hero.adjectives else ()
    trait = rng.choice(traits) if traits and rng.random() < 0.8 else ""
    if not scene.plot.opens_at_home:  # somebody else was named, so a pronoun would be unclear
        trait = re.sub(r"\{(?:he|him)\}", "{hero}", trait, count=1)
    values["trait"] = polish(scene.expand(trait))


def _hands(kind: Kind) -> str:
    if kind.group != "animal":
        return "wings" if kind.group == "bird" else "hands"
    return "paws" if kind.habitat in ("forest", "house", "ice") else "feet"


def _pronoun_slots(prefix: str, pronouns: Pronouns) -> dict[str, str]:
    return {
        f"{prefix}he": pronouns.he,
        f"{prefix}him": pronouns.him,
        f"{prefix}his": pronouns.his,
        f"{prefix}himself": pronouns.himself,
        f"{prefix}He": pronouns.he.capitalize(),
    }


def _fill_helpers(scene: Scene) -> None:
    taken = scene.hero.kind.noun + (f" {scene.other.kind.noun}" if scene.other else "")
    pool = [
        noun
        for noun in (WATER_HELPERS if scene.hero.kind.group == "water" else HELPERS)
        if noun not in taken
    ]
    nouns = scene.rng.sample(pool, 3)
    for slot, noun, adjective in zip(
        ("helper", "second", "third"), nouns, scene.rng.sample(HELPER_ADJECTIVES, 3), strict=True
    ):
        scene.values[slot] = f"the {noun}"
        scene.values[f"a_{slot}"] = (
            f"a {adjective} {noun}" if scene.rng.random() < 0.7 else f"a {noun}"
        )


def _fill_thing(scene: Scene) -> None:
    cast = scene.hero.kind.noun + (scene.other.kind.noun if scene.other else "")
    noun = scene.rng.choice([noun for noun in scene.plot.things or THINGS if noun not in cast])
    adjective = (
        scene.rng.choice(THING_ADJECTIVES)
        if scene.rng.random() < 0.5 and not scene.plot.things
        else ""
    )
    full = f"{adjective} {noun}".strip()
    scene.values |= {
        "thing": f"the {noun}",
        "bare_thing": full,
        "a_thing": f"a {full}",
        "full_thing": f"the {full}",
    }
    scene.values |= {"thing_noun": noun}


def _topic(scene: Scene) -> tuple[str, str]:
    """What the request asks for, and a lead sentence where the topic is a theme."""
    plot, rng, hero = scene.plot, scene.rng, scene.hero
    choice = rng.random()
    if plot.themes and choice < 0.07:
        theme = rng.choice(plot.themes)
        return theme, scene.expand(
            f"[This is a story about|Here is a story about|This is a tale about] {theme}."
        )
    if plot.asks and choice < 0.45:
        ask = scene.expand(rng.choice(plot.asks))
        return in_present(ask) if rng.random() < PRESENT_SHARE else ask, ""
    if scene.other is not None and choice < 0.9:
        first, second = (hero, scene.other) if rng.random() < 0.8 else (scene.other, hero)
        return f"{first.indefinite} and {second.indefinite}", ""
    if plot.names_thing and choice < 0.75:
        return scene.expand("{a_hero} and [{his} {bare_thing}|{a_thing}]"), ""
    return _hero_topic(scene), ""


def in_present(topic: str) -> str:
    """ "A fox who lost his hat" as "a fox who loses his hat"."""
    past, dot, clause = topic.partition(" who ")
    return (
        past
        + dot
        + re.sub(
            r"^(?:\w+ not|\w+)", lambda match: PRESENT.get(match.group(), match.group()), clause
        )
    )


def _hero_topic(scene: Scene) -> str:
    hero, rng = scene.hero, scene.rng
    choice = rng.random()
    if hero.kind.is_unique:
        return hero.kind.noun if choice < 0.15 and not hero.adjectives else hero.indefinite
    if hero.name and choice < 0.5:
        return (
            f"{hero.indefinite} {rng.choice(('named', 'called'))} {hero.name}"
            if choice < 0.35
            else hero.name
        )
    if choice < 0.57 and not hero.adjectives:
        return plural(hero.kind.noun)
    if choice < 0.72 and scene.plot.opens_at_home and scene.other is None:
        return f"{hero.indefinite} {rng.choice(('', 'who lived '))}{scene.values['home']}"
    return f"the {hero.full}" if choice < 0.75 else hero.indefinite


def _pairs(scene: Scene) -> tuple[str, ...]:
    noun = scene.hero.kind.noun
    pairs = [f"{noun}|{scene.plot.name}"]
    pairs += [f"{adjective} {noun}" for adjective in scene.hero.adjectives]
    if scene.other is not None:
        pairs.append("+".join(sorted((noun, scene.other.kind.noun))))
    return tuple(pairs)
