"""What a passage is about, and stories retold with other heroes.

Owns the choice of the topic phrase of a passage and the consistent renaming of its heroes. Never
sees prompts' wording or tokens.
"""

import random
import re
from collections import Counter

from .words import (
    ADJECTIVES,
    CLASSES,
    DETERMINERS,
    FAVOURITES,
    UNIQUE_HEROES,
    WOMEN,
    WORD,
    Lexicon,
    plural,
    with_article,
)

OPENING_CHARS = 160
_UNIQUE_THINGS = frozenset(
    ("moon", "sun", "sea", "sky", "wind", "rain", "snow", "stars", "earth", "world")
)
_HERO_CLASS = {hero: heroes for heroes in CLASSES for hero in heroes}
_PLURAL_OF = {plural(hero): hero for hero in _HERO_CLASS}


def _names(text: str, lexicon: Lexicon) -> Counter[str]:
    """Capitalised words inside sentences that are not common words:
    the names of people and places."""
    inside = re.findall(r"(?<=[a-z,;] )([A-Z][a-z]{2,})\b", text)
    return Counter(name for name in inside if name.lower() not in lexicon.lower_words)


def _phrase(noun: str, words: list[str], lexicon: Lexicon) -> str:
    """The noun with its article, and with its first describing word if the passage gives it one."""
    if noun in _UNIQUE_THINGS:
        return f"the {noun}"
    if noun.endswith("s") and noun[:-1] in lexicon.nouns:
        return noun
    for before, adjective, word in zip(words, words[1:], words[2:], strict=False):
        if word == noun and before in DETERMINERS and adjective in lexicon.adjectives:
            return with_article(f"{adjective} {noun}")
    return with_article(noun)


def topics_of(text: str, lexicon: Lexicon, limit: int = 4) -> list[str]:
    """Up to `limit` topic phrases of a passage, best first;
    those that the opening names rank highest."""
    words = [word.lower() for word in WORD.findall(text)]
    opening = set(WORD.findall(text[:OPENING_CHARS].lower()))
    counts = Counter(word for word in words if word in lexicon.nouns or word in _HERO_CLASS)
    scores: dict[str, float] = {}
    for noun, count in counts.items():
        weight = 4.0 if noun in opening else 1.0
        hero = 2.5 if noun in _HERO_CLASS else 1.0
        scores[_phrase(noun, words, lexicon)] = (
            weight * hero * min(count, 5) * lexicon.nouns.get(noun, 1.0) ** 4
        )
    for name, count in _names(text, lexicon).items():
        scores[name] = (3.0 if name.lower() in opening else 0.8) * min(count, 5)
    ranked = sorted(scores, key=lambda topic: (-scores[topic], topic))
    return [topic for topic in ranked[:limit] if scores[topic] > 1.2]


def lower_nouns(text: str, lexicon: Lexicon) -> str:
    """Write common nouns in small letters where an old book sets them in
    capitals (``a hungry Fox``)."""

    def fix(match: re.Match[str]) -> str:
        word = match.group()
        return word.lower() if word.lower() in lexicon.lower_words else word

    return re.sub(r"(?:(?<=[a-z,;] )|(?<=\bA )|(?<=\bThe ))[A-Z][a-z]+", fix, text)


def _fix_articles(text: str, hero: str) -> str:
    article = "an" if hero[0] in "aeiou" else "a"
    text = re.sub(rf"\ban? (?={hero}\b)", f"{article} ", text)
    return re.sub(rf"\bAn? (?={hero}\b)", f"{article.capitalize()} ", text)


def _rename(text: str, old: str, new: str) -> str:
    pairs = ((plural(old), plural(new)), (old, new))
    for before, after in pairs:
        text = re.sub(rf"\b{before}\b", after, text)
        text = re.sub(rf"\b{before.capitalize()}\b", after.capitalize(), text)
        text = re.sub(rf"\b{before.upper()}\b", after.upper(), text)
    return _fix_articles(text, new)


def heroes_of(text: str) -> list[str]:
    """The known heroes (animals and persons) of a text, most frequent first, singular."""
    words = [word.lower() for word in WORD.findall(text)]
    counts = Counter(_PLURAL_OF.get(word, word) for word in words)
    found = [hero for hero in counts if hero in _HERO_CLASS and counts[hero] >= 2]
    return sorted(found, key=lambda hero: (-counts[hero], hero))


def retell(text: str, rng: random.Random) -> str:
    """The same tale with one or two of its heroes replaced by others of their kind,
    each everywhere alike."""
    heroes = heroes_of(text)
    for old in heroes[: rng.choice((1, 1, 2))]:
        if old == "fish" or old == "bird":  # too often food or scenery
            continue
        others = [
            hero for hero in _HERO_CLASS[old] if hero not in heroes and hero not in text.lower()
        ]
        text = _rename(text, old, rng.choice(others))
    return text


def _rename_to_unique(text: str, old: str, new: str) -> str:
    """As `_rename`, for a hero of whom there is only one: `a fox` becomes `the moon`."""
    text = re.sub(rf"\b(?:an?|another|one) (?={old}\b)", "the ", text)
    text = re.sub(rf"\b(?:An?|Another|One) (?={old}\b)", "The ", text)
    return _rename(text, old, new)


_TO_FEMALE = {"he": "she", "him": "her", "his": "her", "himself": "herself"}
_TO_MALE = {"she": "he", "herself": "himself", "hers": "his"}


def _as_female(text: str, is_female: bool) -> str:
    """Pronouns of one sex turned into the other's; `her` is `him` before a pause or a short word,
    else `his`."""
    pairs = _TO_FEMALE if is_female else _TO_MALE
    if not is_female:
        follows = r"(?= (?:to|and|in|on|at|with|for|by|from|as|that|up|down|out|away|back|the|a|so|if|but|into)\b|[^ \w])"
        text = re.sub(rf"\bher\b{follows}", "him", text)
        text = re.sub(rf"\bHer\b{follows}", "Him", text)
        pairs = {**pairs, "her": "his"}
    words = "|".join(re.escape(word) for word in pairs)

    def swap(match: re.Match[str]) -> str:
        word = match.group()
        other = pairs[word.lower()]
        return other.capitalize() if word[0].isupper() else other

    return re.sub(rf"\b(?:{words})\b", swap, text, flags=re.IGNORECASE)


def recast(text: str, rng: random.Random) -> tuple[str, str]:
    """The same tale with its first hero played by anybody, of whatever kind; returns the text and
    the new hero.

    Without a hero that it knows, the text comes back as it is, with "". Pronouns follow where the
    sex changes.
    """
    heroes = [hero for hero in heroes_of(text) if hero not in ("fish", "bird")]
    if not heroes:
        return text, ""
    old = heroes[0]
    pool = FAVOURITES if rng.random() < 0.6 else tuple(_HERO_CLASS)
    lowered = text.lower()
    others = [hero for hero in pool if hero not in lowered]
    if not others:
        return text, ""
    new = rng.choice(others)
    text = _rename_to_unique(text, old, new) if new in UNIQUE_HEROES else _rename(text, old, new)
    was_female, is_female = old in WOMEN, new in WOMEN
    if was_female != is_female:
        text = _as_female(text, is_female)
    return text, new


def hero_phrase(hero: str, text: str, lexicon: Lexicon) -> str:
    """A hero as a request names it: with its article,
    and with its describing word if the text gives it one."""
    return _phrase(hero, [word.lower() for word in WORD.findall(text)], lexicon)


def describe(text: str, rng: random.Random) -> str:
    """Give the first hero that has no describing word one, where it is first named."""
    match = re.search(rf"\b([Aa])n? (?=({'|'.join(_HERO_CLASS)})\b)", text[:OPENING_CHARS])
    if match is None:
        return text
    adjective = rng.choice(ADJECTIVES)
    article = with_article(adjective).split()[0]
    article = article.capitalize() if match.group(1) == "A" else article
    return f"{text[: match.start()]}{article} {adjective} {text[match.end() :]}"
