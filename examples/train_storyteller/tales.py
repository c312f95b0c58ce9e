"""Tales composed sentence by sentence: an opening, a wish, a trouble, a helper, an outcome, an end.

Owns what the parts are and which words of a request they bring in: a hero, a companion, a thing, a
place, the weather. Each part has several wordings, so that two tales of one request share few
sentences; whole plots, which tell better and repeat themselves, are in `grammar`. The same random
state gives the same tale. Nouns may come from anywhere, so that a request must be read: a hero
learnt by heart is of no use.
"""

import random
from collections.abc import Sequence

from .grammar import PRESENT_SHARE, GrammarTale, in_present, topic_words
from .kinds import (
    ADJECTIVE_TRAITS,
    GOING,
    HABITATS,
    HE,
    HELPER_ADJECTIVES,
    HELPERS,
    IT,
    KINDS,
    NAMES_HE,
    NAMES_SHE,
    SHE,
    THING_ADJECTIVES,
    THING_TRAITS,
    THINGS,
    UNIQUE,
    Kind,
    Pronouns,
)
from .plots import read_plots
from .templates import expand, polish
from .words import plural

LIVING = ("animal", "bird", "person", "water")
HEROES = tuple(kind for kind in KINDS if kind.group in LIVING)
SKY = tuple(kind for kind in KINDS if kind.group == "sky")
LIFELESS = frozenset(kind.noun for kind in KINDS if kind.group in ("thing", "sky", "place"))
PLACES = tuple(kind.noun for kind in KINDS if kind.group == "place")
WEATHERS = (
    "a storm", "a rainy night", "a foggy morning", "a snowy day", "a hot summer", "a full moon",
    "a strong wind", "a starry night", "a rainbow", "a cold winter",
)  # fmt: skip
THEMES = tuple(sorted({theme for plot in read_plots() for theme in plot.themes}))
COMPOSED = "composed"
"""What such a tale has for a plot's name."""
FREE_SHARE = 0.3
"""Of heroes, companions, things and places: drawn from all nouns of the books."""
NAMED_SHARE = 0.25
ADJECTIVE_SHARE = 0.5
PAIR_SHARE = 0.25
"""Of requests for two and nothing else."""
SKY_SHARE, ANY_OTHER_SHARE = 0.2, 0.4
"""Of companions from the sky (the moon, the snow, a star), and of those or of any kind."""
THEME_SHARE = 0.1
"""Of requests for no hero but for what a tale is about: "being lonely", "courage", "rain"."""
HERO_SHARE = 0.2
"""Of requests that name the hero alone: by name, as many, or by where he lives."""
_LEADS = "[This is a story about|Here is a story about|This is a tale about] {theme}."
_AT_HOME = (
    "{Once} there [was|lived] {a_hero}{named}, {home}. {trait}",
    "{A_hero}{named} lived {home}. {trait}",
    "{Home}, {once}, lived {a_hero}{named}. {trait}",
    "{Once} there was {a_hero}{named} who lived {home}. {trait}",
)
_OPENINGS: tuple[str, ...] = (
    *_AT_HOME[:3],
    "[Not far from here|Behind the seven hills|Where the road ends] lived {a_hero}{named}. {trait}",
    "Everybody [in the valley|for miles around|who came by] knew {a_hero}{named}. {trait}",
    "[Have you heard of|Do you know] {a_hero}{named}? {trait}",
    "This is about {a_hero}{named}. {trait}",
    "There was never {a_hero}{named} [like this one|quite like the one in this story]. {trait}",
    "[My grandmother told me of|People still talk about|I once heard of] {a_hero}{named}. {trait}",
)
_PAIR_OPENINGS = (
    "{Once} there were two friends, {a_hero}{named} and {a_other}. {trait}",
    "This is [the story of|a story about] {a_hero}{named} and {a_other}. {trait}",
    "{A_hero}{named} and {a_other} lived {home}. {trait}",
    "{Once} {a_hero}{named} and {a_other} met [on the road|by the well|at the market]. {trait}",
    "Nobody knew why {a_hero}{named} liked {a_other} so much. {trait}",
)
"""Where two are asked for: both are named at once."""
_TWO_HEROES = (
    "{a_hero} and {a_other} {clause}",
    "a contest between {a_hero} and {a_other}",
    "how {a_hero} met {a_other}",
    "{a_hero}, {a_other} and their [friends|secret|home]",
)
_COMPANIONS = (
    "{Hero} had one good friend, {a_other}.",
    "Next door lived {a_other}, and the two were [always together|good friends|never apart].",
    "{A_other} lived near by and [came to visit every day|often stopped for a talk].",
    "With {him} lived {a_other}.",
    "{Hero} and {a_other} did [everything|almost everything] together.",
)
_WEATHERS = (
    "It was {a_weather}, and {hero} could not [sleep|sit still].",
    "Then came {a_weather}.",
    "[That day|This was the time when] there was {a_weather}, and [everything looked new|nobody went out].",
    "{Oneday} there was {a_weather}.",
)
_THINGS = (
    "{He} had {a_thing}, which {he} [loved more than anything|never let out of sight|had from {his} mother].",
    "On the table lay {a_thing}.",
    "{Hero} always carried {a_thing}.",
    "By the door stood {a_thing}, [old and dusty|and nobody knew whose it was].",
)
_PLACES = (
    "Not far away was {a_place}.",
    "{Hero} often [went|looked over] to {a_place} near by.",
    "From {his} window {he} saw {a_place}.",
    "Every [morning|week] {his} way led past {a_place}.",
)

# What is wished for: (what it takes up, what it is called in a request, how it begins, how it ends).
_WISHES: tuple[tuple[tuple[str, ...], str, tuple[str, ...], tuple[str, ...]], ...] = (
    (
        ("thing",),
        "who lost {his} {bare_thing}",
        (
            "{Oneday} {his} {bare_thing} was gone. {Hero} looked [under the bed|in every corner|high and low], but it was nowhere.",
            '{Oneday} {hero} lost {his} {bare_thing} [on the way home|at the market|in the tall grass]. "Without it I am only half myself," {he} said.',
            '{Oneday} {hero} woke up and could not find {his} {bare_thing}. "It was here last night!" {he} {cry}.',
        ),
        (
            "And there, behind a stone, lay {his} {bare_thing}. {Hero} held it tight.",
            "{He} looked up, and there it was: {his} {bare_thing}, hanging on a branch.",
            '"Is this what you are looking for?" asked a small voice. It was {his} own {bare_thing}.',
        ),
    ),
    (
        ("thing",),
        "who found {a_thing}",
        (
            '{Oneday} {hero} found {a_thing} [in the grass|on the road|by the well]. "Whose can it be?" {he} wondered.',
            "{Oneday} {a_thing} lay [before the door|in the middle of the road]. {Hero} picked it up and wanted to bring it back.",
        ),
        (
            'At last {he} met the one who had lost {the_thing}. "Keep it," said the stranger. "You have come so far."',
            "A little child saw {the_thing} and laughed for joy, and {hero} knew whose it was.",
        ),
    ),
    (
        ("thing",),
        "who wanted {a_thing}",
        (
            "There was only one thing {hero} wanted: {a_thing}. {He} dreamed of it [every night|day and night].",
            "{Oneday} {hero} saw {a_thing} in a window. From then on {he} [could think of nothing else|saved every penny].",
        ),
        (
            "In the end {he} made {a_thing} with {his} own {hands}, and it was better than any that can be bought.",
            'And when {he} came home, {a_thing} stood before the door, with a note: "For you."',
        ),
    ),
    (
        ("place",),
        "who wanted to see the {bare_place}",
        (
            "All {his} life {hero} had wanted to see the {bare_place}. {Oneday} {he} [packed some {food}|shut the door behind {him}] and set out.",
            '{Oneday} a traveller told {hero} about the {bare_place}. "I must see it," said {hero}, and {he} {went} off.',
        ),
        (
            "And then {he} stood before the {bare_place}. It was [bigger|smaller and quieter|more beautiful] than {he} had thought.",
            "At last {he} reached the {bare_place}. {He} sat down and looked until the sun set.",
        ),
    ),
    (
        ("other",),
        "who looked for {a_other}",
        (
            '{Oneday} {hero} heard that {a_other} was [in trouble|ill|all alone]. "Then I must go," {he} said.',
            "{Oneday} {hero} set out to find {a_other}, of whom everyone told a different tale.",
        ),
        (
            'There sat {the_other}, [tired but glad|and could not believe it]. "You came!" {ohe} {cry}.',
            "{Hero} found {the_other} at last, and they had so much to tell that it grew dark.",
        ),
    ),
    (
        ("other", "thing"),
        "who brought {a_thing} to {a_other}",
        (
            "{Oneday} {hero} had to bring {a_thing} to {a_other}, [a long way off|before the sun went down].",
            '"Who will take {a_thing} to {a_other}?" people asked. "I will," said {hero}.',
        ),
        (
            '{The_other} took {the_thing} and smiled. "Nobody ever brought me anything," {ohe} said.',
            "So {the_other} got {the_thing} after all, and {hero} was asked to stay for supper.",
        ),
    ),
    (
        (),
        "who wanted to learn to {skill}",
        (
            "{Hero} could do many things, but {he} could not {skill}. {Oneday} {he} decided to learn it.",
            '"Everyone can {skill} but me," said {hero} {oneday}. "That must change."',
        ),
        (
            "{He} tried once more, and this time {he} could {skill}. {He} {cry} out for joy.",
            "After a week {he} could {skill} a little. After a month {he} could {skill} better than anyone.",
        ),
    ),
    (
        (),
        "who looked for a friend",
        (
            '{Oneday} {hero} thought: "I should like to have a friend." So {he} [set out|put on {his} best coat and went] to find one.',
            "The days were long for {hero}, because there was nobody to talk to. {Oneday} {he} {went} out to find a friend.",
        ),
        (
            '"I have looked for a friend all this time," said {hero}, "and there you are."',
            "{He} had not noticed it, but on the way {he} had found a friend.",
        ),
    ),
    (
        ("thing",),
        "whose {bare_thing} was stolen",
        (
            "{Oneday} somebody stole {his} {bare_thing}. {Hero} [ran after the thief|followed the footprints].",
            '{Oneday} {hero} came home, and {his} {bare_thing} was not there. "A thief!" {he} {cry}.',
        ),
        (
            'There sat the thief with {his} {bare_thing}. "I only wanted to look at it," said the thief, and gave it back.',
            "The thief was asleep, and {hero} took {his} {bare_thing} and tiptoed away.",
        ),
    ),
    (
        ("other",),
        "who [loved|admired] {a_other}",
        (
            "{Hero} loved {a_other} more than anything in the world, but {he} had never dared to say so.",
            '{Oneday} {hero} saw {a_other} and could not look away. "How beautiful!" {he} thought. {He} wanted to come closer to {the_other}.',
        ),
        (
            'And {the_other} was not far away at all. "I have waited for you," it seemed to say.',
            "{Hero} sat beside {the_other} until evening, and was happy.",
        ),
    ),
    (
        ("other",),
        "who was afraid of {a_other}",
        (
            "{Hero} was afraid of one thing only: {a_other}. When {he} heard of {the_other}, {he} hid.",
            '{Oneday} {hero} had to pass {a_other}. "I cannot," {he} said, and trembled.',
        ),
        (
            "And {the_other}? {The_other} was [quite friendly|just as much afraid]. They both had to laugh.",
            "{Hero} looked {the_other} in the face, and nothing happened. Then {he} was not afraid any more.",
        ),
    ),
    (
        ("other",),
        "who [waited for|dreamed of|talked to|wrote to] {a_other}",
        (
            "Day after day {hero} waited for {a_other}. People said that {the_other} would never come.",
            "{Oneday} {hero} dreamed of {a_other}, and the dream would not leave {him} alone.",
            '{Hero} talked to {a_other} every evening. {Oneday} {he} asked, "Can you hear me?"',
        ),
        (
            "Then, early in the morning, there was {the_other}. {Hero} {cry} out for joy.",
            'And {the_other} answered at last. "I heard every word."',
        ),
    ),
    (
        ("other",),
        "who [fought|helped|saved|followed|played with] {a_other}",
        (
            "{Oneday} {a_other} came, and everybody ran away. Only {hero} stayed where {he} was.",
            "{Oneday} {hero} heard a cry. It came from {a_other}, [down by the water|behind the hill], and {he} {went} there at once.",
        ),
        (
            "In the end {hero} and {the_other} shook hands. Neither of them had lost.",
            '"Without you I would be gone," said {the_other}.',
        ),
    ),
    (
        ("place",),
        "who built {a_place}",
        (
            '{Oneday} {hero} said, "I will build {a_place}." People [shook their heads|laughed], but {he} began at once.',
            "{Hero} wanted to build {a_place}. {He} [drew it in the sand|brought stones and wood] and began.",
        ),
        (
            "When the leaves fell, the {bare_place} was ready, and everyone came to look.",
            "One stone after another, and there it stood: the {bare_place}. It was a little crooked, and all the nicer.",
        ),
    ),
    (
        (),
        "who gave a feast",
        (
            "{Oneday} {hero} wanted to give a feast with {food} for everybody. But there was [not enough on the table|nobody to help].",
            "It was {his} birthday, and {hero} asked everyone to a feast. There should be music and {food}.",
        ),
        (
            "In the evening everyone came, and each brought something. It was the best feast in years.",
            "They ate {food} and danced until the stars went out.",
        ),
    ),
)
SKILLS = (
    "swim", "dance", "sing", "whistle", "read", "bake bread", "juggle", "paint", "play the drum",
    "ride", "ice skate", "keep a secret", "tell jokes", "say no", "count to a hundred", "sew",
)  # fmt: skip

_TROUBLES = (
    "But a river [was in the way|crossed the road], deep and cold. [There was no bridge|The bridge was broken].",
    "Soon thick fog came down, and {he} could not see {his} own {hands}.",
    "Then {he} came to a gate, and the gate was locked.",
    "But a big stone had rolled onto the path.",
    "Half way there it began to rain, and {he} was wet to the skin.",
    "But the wind blew so hard that {he} could hardly stand.",
    "Soon {he} was lost. All the trees looked the same.",
    'But everyone {he} asked said, "That is impossible."',
    'Then a grumpy guard stood there. "Nobody may pass," he said.',
    "But it was further than {he} had thought, and {his} {food} was soon eaten.",
    "The first try went wrong. The second try was even worse.",
    "Then it grew dark, and something rustled in the bushes.",
    "But {he} fell into a hole, and the walls were too steep.",
    "But the hill was steep, and {he} slid down again and again.",
    '"You are too late," said the people. "It is all over."',
    "Then {he} was tired and wanted to give up.",
)
_HELPERS = (
    '{A_helper} saw it and came closer. "{advice}" said {helper}.',
    'Just then {a_helper} came by. "[Why so sad|What is the matter|Can I help]?" {helper} asked. Then {helper} thought. "{advice}" {helper} said.',
    '"{advice}" said a voice. It was {a_helper}.',
    '{He} sat down and sighed. {A_helper} sat down beside {him} and said, "{advice_end}"',
    '{A_helper} had watched it all. "{advice}" said {helper}, and winked.',
    '{Hero} asked {a_helper}. {Helper} thought for a while and said, "{advice_end}"',
)
_OTHER_HELPS = (
    '"{advice}" said {the_other}, who had come after {him}.',
    'But {the_other} was there. "{advice}" {ohe} said.',
    'Then {the_other} had an idea. "{advice}" {ohe} {cry}.',
)
_ADVICE = (
    "Let us try it together.", "Come, I know another way.", "Go slowly, and look at the ground.",
    "Wait until morning. Then it is easy.", "You only have to ask politely.", "Take my stick.",
    "Listen! The water tells you the way.", "Two are stronger than one.", "Try it once more.",
    "First eat something.", "Climb on my back.", "Close your eyes and count to ten.",
    "It is not as bad as it looks.", "Follow the stars.", "Sing, and you will not be afraid.",
    "What you cannot lift, you can roll.", "Start with a small step.", "I have a long rope.",
)  # fmt: skip
_TURNS = (
    "And that is what they did.",
    "{Hero} did so, and it worked.",
    "It took a while, but it helped.",
    '{Hero} laughed. "Why did I not think of that?"',
    "So {he} took heart and went on.",
    '"Thank you," said {hero}, and {he} tried it at once.',
    "It was not easy, but {he} did not stop.",
    "One, two, three, and the worst was behind {him}.",
)
_ENDS = (
    "And since then {hero} was never sad again.",
    "That night {hero} slept very well.",
    "{Hero} never forgot that day.",
    "And if nobody has told {him} otherwise, {he} is there still.",
    '"It was worth it," said {hero}, and that was true.',
    "Then they all went home, and the moon shone on the roofs.",
    "And {hero} and {helper} stayed friends [for ever|all their lives].",
    "Since that day everyone says good morning to {hero}.",
    '"Tomorrow we will do it again," said {hero}, and yawned.',
    "Nobody laughed at {him} any more.",
    "And {he} told the story again and again, and each time it was a little longer.",
    "{Hero} smiled. Sometimes it is enough to ask.",
    "That is how it was, and not otherwise.",
    "And {helper}? {Helper} got {food}, of course.",
)


class TaleComposer:
    """Draws tales. `nouns` are further words for heroes, things and places; `is_held_out` says
    whether only held-out combinations of hero and others are drawn, or none of them."""

    def __init__(self, nouns: Sequence[str] = (), *, is_held_out: bool = False) -> None:
        self._nouns = tuple(nouns)
        self._is_held_out = is_held_out

    def draw(self, rng: random.Random) -> GrammarTale:
        while True:
            tale = _Tale(self._nouns, rng).compose()
            if tale.is_held_out == self._is_held_out:
                return tale


class _Tale:
    """One tale in the making: the values of its slots, and which of them the request names."""

    def __init__(self, nouns: Sequence[str], rng: random.Random) -> None:
        self._nouns, self._rng = nouns, rng
        self._values: dict[str, str] = {}

    def _noun(self, usual: Sequence[str]) -> str:
        is_free = self._nouns and self._rng.random() < FREE_SHARE
        return self._rng.choice(self._nouns if is_free else usual)

    def _lookup(self, name: str) -> str:
        if name == "hero":
            return self._rng.choice(self._hero_forms)
        return self._values[name]

    def _expand(self, template: str) -> str:
        return expand(template, self._lookup, self._rng)

    def compose(self) -> GrammarTale:
        rng = self._rng
        self._cast()
        takes, clause, begins, ends = rng.choice(_WISHES)
        extras = [part for part in ("other", "thing", "place", "weather") if part not in takes]
        brought = [part for part in extras if rng.random() < (0.45 if not takes else 0.3)][:2]
        choice = rng.random()
        lead, openings = "", _OPENINGS
        if choice < THEME_SHARE:
            topic = asked = self._values["theme"] = self._theme()
            lead = self._expand(_LEADS)
        elif choice < THEME_SHARE + HERO_SHARE:
            (topic, asked), openings = self._hero_topic(), _AT_HOME
        elif choice < THEME_SHARE + HERO_SHARE + PAIR_SHARE:
            takes, clause, begins, ends = rng.choice([each for each in _WISHES if not each[0]])
            brought, openings = ["other"], _PAIR_OPENINGS
            pair = [self._values["a_hero"], self._values["a_other"]]
            topic = asked = " and ".join(pair if rng.random() < 0.7 else pair[::-1])
        else:
            topic, asked = self._topic(takes, clause, brought)
            topic = in_present(topic) if rng.random() < PRESENT_SHARE else topic
        opening = f"{lead} {rng.choice(openings)}"
        text = self._tell(opening, rng.choice(begins), rng.choice(ends), takes, brought)
        polished = polish(topic)
        topic = topic[0] + polished[1:] if topic[0].islower() else polished
        named = tuple(dict.fromkeys(topic_words(asked)))
        return GrammarTale(topic, named, polish(text), COMPOSED, self._pairs(takes, brought))

    def _tell(
        self, opening: str, begin: str, end: str, takes: Sequence[str], brought: Sequence[str]
    ) -> str:
        rng, extra = (
            self._rng,
            {"other": _COMPANIONS, "thing": _THINGS, "place": _PLACES, "weather": _WEATHERS},
        )
        first = [self._expand(opening)]
        first += [self._expand(rng.choice(extra[part])) for part in brought]
        helps = _OTHER_HELPS if "other" in brought and rng.random() < 0.6 else _HELPERS
        middle = [begin, rng.choice(_TROUBLES)]
        last = [rng.choice(helps), rng.choice(_TURNS), end, rng.choice(_ENDS)]
        if "thing" in brought and rng.random() < 0.5:
            last.insert(2, "And {the_thing} [helped, too|came in handy|was of great use].")
        paragraphs = [
            " ".join(first),
            " ".join(map(self._expand, middle)),
            " ".join(map(self._expand, last)),
        ]
        return "\n\n".join(paragraphs) if rng.random() < 0.7 else " ".join(paragraphs)

    def _topic(self, takes: Sequence[str], clause: str, brought: Sequence[str]) -> tuple[str, str]:
        """What the request asks for, and the words in it that must be named."""
        rng, values = self._rng, self._values
        parts = [values["a_hero"] + (values["named"] if rng.random() < 0.5 else "")]
        bare = {part: values[f"a_{part}"] for part in (*takes, *brought)}
        choice = rng.random()
        if "other" in bare and choice < 0.2:
            values["clause"] = "" if "other" in takes else self._expand(clause)
            asked = " ".join([values["a_hero"], *(bare[part] for part in ("other", *takes))])
            phrase = self._expand(rng.choice(_TWO_HEROES)).strip()
            return phrase, f"{asked} {self._skill_of(phrase)}"
        if choice < 0.55:
            phrase = self._expand(f"{parts[0]} {clause}")
            more = [bare[part] for part in brought if rng.random() < 0.4]
            phrase += f", and {more[0]}" if more else ""
            return phrase, " ".join(
                [parts[0], *(bare[part] for part in takes), *more[:1], self._skill_of(clause)]
            )
        parts += [bare[part] for part in bare if rng.random() < 0.85]
        if rng.random() < 0.25:
            rng.shuffle(parts)
        phrase = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
        return phrase, " ".join(parts)

    def _hero_topic(self) -> tuple[str, str]:
        """A request for the hero alone, and the words in it that must be named."""
        values, choice = self._values, self._rng.random()
        noun, name = values["hero_noun"], values["hero_name"]
        if name and choice < 0.4:
            return name, name
        if choice < 0.4 and not values["hero_adjective"] and values["a_hero"].startswith("a "):
            return plural(noun), noun
        if choice < 0.5:
            return values["a_hero"], values["a_hero"]
        home = self._expand("{a_hero} [|who lived ]{home}")
        return home, home.replace("who lived", "")

    def _theme(self) -> str:
        rng, choice = self._rng, self._rng.random()
        if choice < 0.6:
            return rng.choice(THEMES)
        if choice < 0.8:
            return f"being {rng.choice(tuple(ADJECTIVE_TRAITS))}"
        noun = self._noun(THINGS)
        return noun if choice < 0.9 else f"a {noun}"

    def _skill_of(self, clause: str) -> str:
        return self._values["skill"] if "{skill}" in clause else ""

    def _pairs(self, takes: Sequence[str], brought: Sequence[str]) -> tuple[str, ...]:
        values, hero = self._values, self._values["hero_noun"]
        pairs = [f"{values['hero_adjective']} {hero}"] if values["hero_adjective"] else []
        return (*pairs, *(f"{hero}+{values[f'bare_{part}']}" for part in (*takes, *brought)))

    def _cast(self) -> None:
        rng, values = self._rng, self._values
        kind = self._hero_kind()
        pronouns = rng.choice(kind.pronouns)
        traits = tuple(ADJECTIVE_TRAITS) if kind.group in LIVING else THING_TRAITS
        adjective = rng.choice(traits) if rng.random() < ADJECTIVE_SHARE else ""
        adjective = "" if adjective in kind.noun.split() else adjective
        name = self._name(pronouns) if rng.random() < NAMED_SHARE and not kind.is_unique else ""
        full = f"{adjective} {kind.noun}".strip()
        the = f"the {kind.noun}"
        self._hero_forms = (name, the, name) if name else (the, the, the, f"the {full}")
        went, go, going = rng.choice(GOING[kind.group])
        values |= {
            "hero_noun": kind.noun,
            "hero_adjective": adjective,
            "hero_name": name,
            "went": went,
            "go": go,
            "going": going,
        }
        values |= {
            "a_hero": f"the {full}" if kind.is_unique else f"a {full}",
            "named": f" named {name}" if name else "",
        }
        values |= _pronoun_slots("", pronouns)
        values |= {
            "home": rng.choice(HABITATS[kind.habitat].homes),
            "food": rng.choice(HABITATS[kind.habitat].foods),
        }
        values["once"] = rng.choice(
            ("once upon a time", "once", "long ago", "many years ago", "one summer")
        )
        values["oneday"] = rng.choice(
            ("one day", "one morning", "one evening", "on a Sunday", "one fine day", "that spring")
        )
        values["cry"] = rng.choice(("cried", "called", "shouted", "said"))
        values["skill"], values["advice_end"] = rng.choice(SKILLS), rng.choice(_ADVICE)
        values["advice"] = values["advice_end"].removesuffix(".") + ","
        values["hands"] = {"animal": "paws", "bird": "wings"}.get(kind.group, "hands")
        traits = ADJECTIVE_TRAITS.get(adjective, ())
        trait = rng.choice(traits) if traits and rng.random() < 0.7 else ""
        values["trait"] = polish(self._expand(trait)) if trait else ""
        self._cast_others(kind)

    def _hero_kind(self) -> Kind:
        rng = self._rng
        if self._nouns and rng.random() < FREE_SHARE:
            group, habitat = rng.choice(
                (("person", "village"), ("animal", "forest"), ("thing", "room"), ("thing", "field"))
            )
            return Kind(
                rng.choice(self._nouns), group, habitat, (HE,) if rng.random() < 0.3 else (IT,)
            )
        return rng.choice(KINDS if rng.random() < 0.3 else HEROES)

    def _name(self, pronouns: Pronouns) -> str:
        return self._rng.choice(
            NAMES_HE
            if pronouns is HE
            else NAMES_SHE
            if pronouns is not IT
            else NAMES_HE + NAMES_SHE
        )

    def _cast_others(self, hero: Kind) -> None:
        rng, values = self._rng, self._values
        taken = {hero.noun}

        def draw(usual: Sequence[str]) -> str:
            noun = self._noun(usual)
            while any(noun in each or each in noun for each in taken):
                noun = self._noun(usual)
            taken.add(noun)
            return noun

        def described(noun: str, adjectives: Sequence[str], share: float) -> str:
            return f"{rng.choice(adjectives)} {noun}" if rng.random() < share else noun

        choice = rng.random()
        others = SKY if choice < SKY_SHARE else KINDS if choice < ANY_OTHER_SHARE else HEROES
        other, thing, place, helper = (
            draw([kind.noun for kind in others]),
            draw(THINGS),
            draw(PLACES),
            draw(HELPERS),
        )
        weather = rng.choice(WEATHERS)
        traits = THING_TRAITS if other in LIFELESS else tuple(ADJECTIVE_TRAITS)
        full = {
            "other": described(other, traits, 0.0 if other in UNIQUE else 0.35),
            "thing": described(thing, THING_ADJECTIVES, 0.3),
            "place": described(place, ("old", "big", "quiet", "green", "strange", "little"), 0.2),
        }
        for part, noun in (("other", other), ("thing", thing), ("place", place)):
            values |= {
                f"a_{part}": f"{'the' if noun in UNIQUE else 'a'} {full[part]}",
                f"bare_{part}": full[part],
                f"the_{part}": f"the {noun}",
            }
        values |= {"a_weather": weather, "bare_weather": weather[2:], "helper": f"the {helper}"}
        values["a_helper"] = f"a {described(helper, HELPER_ADJECTIVES, 0.6)}"
        values |= _pronoun_slots("o", rng.choice((HE, SHE)))


def _pronoun_slots(prefix: str, pronouns: Pronouns) -> dict[str, str]:
    forms = {
        "he": pronouns.he,
        "him": pronouns.him,
        "his": pronouns.his,
        "himself": pronouns.himself,
    }
    return {f"{prefix}{form}": value for form, value in forms.items()}
