"""Word lists and a noun lexicon learnt from the corpus itself.

Owns what is known about single words: which are things, which describe, which may stand for one
another. No files, no tokens.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

WORD = re.compile(r"[A-Za-z]+(?:-[a-z]+)?|[^\sA-Za-z]")


def _list(text: str) -> tuple[str, ...]:
    return tuple(text.split())


DETERMINERS = frozenset(
    _list("a an the his her their my your our this that some every no another each its")
)
_FUNCTION_WORDS = frozenset(
    _list(
        """
    was is are were had has have did does will would could should can may might must and or but of in on at to from
    by with for who whom which that as than then when where while if so because into upon over under after before until
    came went said asked told saw took gave made got began lived stood sat ran looked thought knew cried called
    . , ; : ! ? " - )"""
    )
)
_ABSTRACT = frozenset(
    _list(
        """
    time way day days thing things one ones other others first last same more most little good great old man's part
    end side place moment hand hands head face eyes eye word words life world year years night morning evening voice
    people rest lot kind sort matter heart mind fact reason case name number people bit back left right deal while
    whole next second minute hour hours week middle top bottom front course sight sound question answer idea chance
    story chapter tale use own nothing something everything anything truth love arms arm feet foot hair mouth legs leg
    side sides sake pair piece body home work turn order point body fellow person pleasure trouble ground
    manner means length distance air company sense feeling thought thoughts pain joy care state nature power"""
    )
)

ANIMALS = _list(
    """fox wolf lion bear dog cat mouse rabbit hare tortoise frog crow owl goat sheep donkey ass horse cow ox pig monkey
    elephant crocodile snake spider bee ant duck goose hen cock rooster eagle sparrow squirrel hedgehog tiger deer stag
    lamb hyena jackal leopard swan dragon bird fish turtle lizard bat mole rat puppy kitten chicken parrot camel giraffe
    hippo zebra butterfly snail whale penguin dinosaur unicorn bull calf pony peacock pigeon raven worm beetle toad
    kangaroo dolphin"""
)
MEN = _list(
    """king prince knight boy farmer woodman soldier sailor fisherman wizard miller shepherd tailor hunter giant pirate
    robot baker cook shoemaker merchant thief robber doctor gardener blacksmith captain woodcutter beggar dwarf emperor
    magician carpenter goblin ogre ghost troll elf monster astronaut snowman juggler driver policeman painter"""
)
WOMEN = _list(
    "queen princess girl witch fairy mermaid nurse maid goddess nymph dancer teacher giantess"
)
CLASSES = (ANIMALS, MEN, WOMEN)
UNIQUE_HEROES = _list("moon sun wind sea")
FAVOURITES = _list(
    """knight princess king queen dragon prince fox rabbit cat dog bear mouse wolf lion owl frog elephant bird fish boy girl
    witch wizard giant pirate robot fairy mermaid unicorn farmer moon sun wind sea"""
)
ADJECTIVES = _list(
    """brave little clever kind lazy greedy lonely happy sad old young hungry silly proud poor shy tiny big gentle
    curious sleepy wise naughty foolish cunning friendly strong small"""
)
_IRREGULAR_PLURALS = {
    "mouse": "mice", "goose": "geese", "wolf": "wolves", "sheep": "sheep", "deer": "deer",
    "fish": "fish",
    "ox": "oxen", "fairy": "fairies", "thief": "thieves", "dwarf": "dwarfs", "elf": "elves",
    "calf": "calves", "fox": "foxes", "ass": "asses", "witch": "witches", "princess": "princesses",
    "giantess": "giantesses", "butterfly": "butterflies", "puppy": "puppies", "pony": "ponies",
    "donkey": "donkeys", "monkey": "monkeys", "fisherman": "fishermen", "woodman": "woodmen",
    "snowman": "snowmen", "policeman": "policemen", "goddess": "goddesses", "child": "children",
    "city": "cities", "daisy": "daisies", "leaf": "leaves", "body": "bodies", "rhino": "rhinos",
    "human": "humans", "cherry": "cherries", "ladybird": "ladybirds", "firefly": "fireflies",
    "dragonfly": "dragonflies",
}  # fmt: skip


def plural(noun: str) -> str:
    """The plural of a noun; of several words ("old man", "oak tree") the last one changes."""
    head, _, last = noun.rpartition(" ")
    if last in _IRREGULAR_PLURALS:
        return f"{head} {_IRREGULAR_PLURALS[last]}".strip()
    if last.endswith(("man", "fish")):
        return noun[:-3] + "men" if last.endswith("man") else noun
    return noun + ("es" if last.endswith(("s", "x", "ch", "sh")) else "s")


def with_article(phrase: str) -> str:
    return f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}"


@dataclass(frozen=True, slots=True)
class Lexicon:
    """Nouns and adjectives (lower case) of a corpus,
    with the inverse passage frequency of each noun (>= 0)."""

    nouns: dict[str, float]
    adjectives: frozenset[str]
    lower_words: frozenset[str]

    @classmethod
    def learn(cls, passages: Iterable[list[str]]) -> "Lexicon":
        """Learn from passages given as lists of words.

        A noun stands after a determiner and before a function word or a stop; an adjective stands
        between a determiner and a noun.
        """
        total, closed, middle, spread = (
            Counter[str](),
            Counter[str](),
            Counter[str](),
            Counter[str](),
        )
        lower_case = Counter[str]()
        num_passages = 0
        triples = Counter[tuple[str, str]]()
        for words in passages:
            num_passages += 1
            lower_case.update(word for word in words if word.islower())
            lowered = [word.lower() for word in words]
            total.update(lowered)
            spread.update(set(lowered))
            for before, word, after in zip(lowered, lowered[1:], lowered[2:], strict=False):
                if before in DETERMINERS:
                    closed[word] += after in _FUNCTION_WORDS
                    triples[word, after] += 1
        nouns = {
            w
            for w, n in closed.items()
            if n >= 4 and n / total[w] > 0.16 and len(w) > 2 and w.isalpha()
        }
        nouns -= _ABSTRACT | DETERMINERS
        for (word, after), count in triples.items():
            if after in nouns:
                middle[word] += count
        adjectives = {
            w for w, n in middle.items() if n >= 4 and n / total[w] > 0.12 and w.isalpha()
        } - nouns
        rarity = {noun: 1.0 - spread[noun] / num_passages for noun in nouns}
        common = frozenset(word for word, count in lower_case.items() if count >= 3)
        return cls(
            rarity, frozenset(adjectives - DETERMINERS - {"own", "other", "same", "very"}), common
        )
