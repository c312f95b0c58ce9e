"""Requests that are no stories: a tool to call, a JSON object to fill, a result to put into words.

Owns their wording and what a right answer is. The tools' names, arguments and values are drawn
anew for each request out of words, so that they must be read in it. 5 % of the tools (by a hash of
the name) are never trained on.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

from . import prompts
from .grammar import is_held_out_pair
from .kinds import ADJECTIVE_TRAITS, HABITATS, KINDS, NAMES_HE, NAMES_SHE, THINGS, word_list
from .words import with_article

NAMES = NAMES_HE + NAMES_SHE
HEROES = tuple(kind for kind in KINDS if kind.group in ("animal", "bird", "person"))
TOWNS = word_list(
    """Paris, London, Berlin, Rome, Oslo, Cairo, Madrid, Lima, Vienna, Athens, Boston, Dublin, Tokyo, Prague, Delhi,
        Nairobi, Lagos, Sydney, Warsaw, Lisbon, Accra, Kyoto, Geneva, Moscow, Chicago, Toronto, Zurich, Bergen"""
)
CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
OTHER_TOOLS_SHARE = 0.6
PLAIN_ANSWER_SHARE = 0.2
FREE_SHARE = 0.4


@dataclass(frozen=True, slots=True)
class Tool:
    """A function: what it does, the name of its argument and what the argument is."""

    name: str
    description: str
    argument: str
    values: tuple[str, ...]
    requests: tuple[str, ...]

    @property
    def is_held_out(self) -> bool:
        return is_held_out_pair(f"tool {self.name}")

    @property
    def signature(self) -> str:
        """As the chat template shows it."""
        return f"{self.name}({self.argument}): {self.description}"

    def call(self, value: str) -> str:
        """As the model writes it."""
        call = json.dumps({"name": self.name, "arguments": {self.argument: value}})
        return f"{CALL_BEGIN}\n{call}\n{CALL_END}"


@dataclass(frozen=True, slots=True)
class Exchange:
    """What comes before the answer, in the chat format, and the answer."""

    head: str
    answer: str
    named: tuple[str, ...] = ()


_ANIMALS = tuple(kind.noun for kind in HEROES if kind.group == "animal")
_PEOPLE = tuple(kind.noun for kind in HEROES if kind.group == "person")
# kind of value: (argument's names, values)
_VALUES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "city": (("city", "town", "place", "location"), TOWNS),
    "name": (("name", "person", "who", "to"), NAMES),
    "animal": (("animal", "kind", "topic", "query"), _ANIMALS),
    "thing": (("thing", "item", "object", "query"), THINGS),
    "person": (("person", "role", "topic", "query"), _PEOPLE),
}
# (kind of value, verb of the name, object of the name, description, requests)
_TOOLS = (
    ("city", ("get", "look_up", "fetch", "read"), ("weather", "forecast", "temperature"), "{Verb} the {noun} of a city.",
     ("What is the {noun} in {}?", "How is the {noun} in {} today?", "Tell me the {noun} of {}.", "I go to {}. What {noun} is there?")),
    ("city", ("find", "get", "show", "book"), ("train", "map", "hotel", "road", "time", "flight"), "{Verb} the {noun} for a city.",
     ("{Verb} a {noun} for {}.", "I need a {noun} in {}, please.", "Which {noun} is there for {}?", "I want to go to {}. {Verb} me a {noun}.")),
    ("name", ("call", "send", "write", "make"), ("letter", "message", "phone_call", "gift", "song"), "{Verb} a {noun} to somebody.",
     ("{Verb} a {noun} to {}.", "Please {verb} {} a {noun}.", "I want to {verb} a {noun} to {}.", "Can you {verb} a {noun} for {}?")),
    ("name", ("find", "look_up", "get", "tell"), ("birthday", "age", "address", "number", "house"), "{Verb} the {noun} of a person.",
     ("What is the {noun} of {}?", "{Verb} the {noun} of {}.", "Do you know the {noun} of {}?", "I forgot the {noun} of {}.")),
    ("animal", ("find", "search", "get", "tell"), ("story", "picture", "fact", "book", "poem", "tale"), "{Verb} a {noun} about an animal.",
     ("{Verb} a {noun} about the {}.", "I would like a {noun} about the {}.", "Is there a {noun} about the {}?", "Show me a {noun} of the {}.")),
    ("thing", ("buy", "sell", "find", "order", "get", "count"), ("thing", "item", "stock", "price", "shelf"), "{Verb} the {noun} of a thing.",
     ("{Verb} the {}, please.", "I want to {verb} the {}.", "Can you {verb} me the {}?", "What is the {noun} of the {}?")),
    ("person", ("draw", "paint", "name", "describe", "search"), ("hero", "picture", "role", "card"), "{Verb} a {noun} for a story.",
     ("{Verb} the {} for my story.", "I need a {noun} of the {}.", "Please {verb} me the {}.", "{Verb} a {noun} with the {}.")),
)  # fmt: skip
_CHATTER = (
    ("Hello!", "Hello! What can I do for you?"),
    ("Good morning.", "Good morning! What can I do for you?"),
    ("Thank you!", "You are welcome."),
    ("Hi, how are you?", "I am well, thank you. What can I do for you?"),
    ("Good night.", "Good night! Sleep well."),
    ("Who are you?", "I am a little storyteller."),
    ("What can you do?", "I can tell a story, and I can call a tool."),
)
_RESULTS = (
    ("sunny", "rainy", "cold", "windy", "21 degrees", "snow", "warm and dry"),
    (
        "at ten o'clock",
        "tomorrow",
        "in May",
        "number 7",
        "on the hill",
        "12 years",
        "3 coins",
        "two",
    ),
    ("It is done.", "ok", "sent", "not found", "ready"),
)


def draw_tool(rng: random.Random, *, is_held_out: bool) -> Tool:
    """A tool of a random name that is, or is not, one of those held out."""
    while True:
        kind, verbs, nouns, description, requests = rng.choice(_TOOLS)
        verb, noun = rng.choice(verbs), rng.choice(nouns)
        arguments, values = _VALUES[kind]
        said, called = verb.replace("_", " "), noun.replace("_", " ")

        def fill(text: str, said: str = said, called: str = called) -> str:
            text = text.replace("{Verb}", said.capitalize()).replace("{verb}", said)
            return text.replace("{noun}", called)

        style = rng.random()
        name = f"{verb}_{noun}" if style < 0.8 else noun if style < 0.9 else f"{noun}_{verb}"
        tool = Tool(
            name, fill(description), rng.choice(arguments), values, tuple(map(fill, requests))
        )
        if tool.is_held_out == is_held_out:
            return tool


def tools_turn(tools: Sequence[Tool]) -> str:
    """The system turn that the chat template makes of the tools."""
    return prompts.turn(
        "system", prompts.TOOLS_INTRODUCTION + "\n".join(tool.signature for tool in tools)
    )


def draw_call(
    rng: random.Random, nouns: Sequence[str] = (), *, is_held_out: bool = False
) -> tuple[list[Tool], str, Tool, str]:
    """Tools, a request, the tool that it needs and the argument's value."""
    tool = draw_tool(rng, is_held_out=is_held_out)
    tools = [tool]
    while rng.random() < OTHER_TOOLS_SHARE and len(tools) < 3:
        other = draw_tool(rng, is_held_out=False)
        if other.name.split("_")[-1] not in tool.name and other.name not in [
            each.name for each in tools
        ]:
            tools.append(other)
    rng.shuffle(tools)
    value = rng.choice(tool.values)
    if nouns and rng.random() < FREE_SHARE:
        noun = rng.choice(nouns)
        value = noun.capitalize() if value[0].isupper() else noun
    return tools, rng.choice(tool.requests).format(value), tool, value


class TaskSource:
    """Draws exchanges for the training. `nouns` are further values of arguments and keys."""

    def __init__(self, nouns: Sequence[str] = ()) -> None:
        self._nouns = nouns

    def draw(self, rng: random.Random) -> Exchange:
        return self._tools(rng) if rng.random() < 0.55 else draw_object(rng, self._nouns)[0]

    def _tools(self, rng: random.Random) -> Exchange:
        tools, request, tool, value = draw_call(rng, self._nouns)
        head = tools_turn(tools)
        if rng.random() < PLAIN_ANSWER_SHARE:
            request, answer = rng.choice(_CHATTER)
            return Exchange(head + prompts.turn("user", request) + prompts.reply_start(), answer)
        head += prompts.turn("user", request) + prompts.reply_start()
        if rng.random() < 0.25:
            result = rng.choice(rng.choice(_RESULTS))
            head += (
                tool.call(value)
                + prompts.TURN_END
                + "\n"
                + prompts.turn("tool", result)
                + prompts.reply_start()
            )
            return Exchange(head, f"{value[0].upper()}{value[1:]}: {result}", (value, result))
        return Exchange(head, tool.call(value), (value,))


# key: (values, how a text says it)
_SAYINGS = {
    "name": ("{hero} is called {}.", "The name is {}.", "Everyone says {} to {him}."),
    "home": ("{hero} lives {}.", "You find {him} {}.", "The house is {}."),
    "food": ("{hero} likes {}.", "There is {} for supper.", "{He} eats {}."),
    "color": ("{hero} is {}.", "{He} is all {}.", "Look, how {}!"),
    "thing": ("{hero} has {a}.", "{He} carries {a}.", "There is {a} on the table."),
    "age": ("{hero} is {} years old.", "{He} is {}."),
    "friend": ("The best friend is {a}.", "{hero} plays with {a}.", "{He} visits {a}."),
    "mood": ("{hero} is very {}.", "Today {hero} is {}."),
    "city": ("{hero} comes from {}.", "{He} wants to see {}."),
}  # fmt: skip
_COLORS = word_list("red, blue, green, yellow, white, black, brown, grey, golden, pink")
_ASKS = (
    "{text} Answer as JSON with {keys}.",
    "{text} Give me {keys} as JSON.",
    "Read this: {text} Fill in {keys} as JSON.",
    "{text}\nJSON with {keys}:",
)
_MADE_ASKS = (
    "Make up {a_hero} for a story, as JSON with {keys}.",
    "Describe {a_hero} as JSON with {keys}.",
    "Give me {a_hero} as JSON: {keys}.",
)


def _key_value(
    key: str,
    hero_food: Sequence[str],
    homes: Sequence[str],
    nouns: Sequence[str],
    rng: random.Random,
) -> str | int:
    usual: dict[str, Sequence[str]] = {
        "name": NAMES, "home": homes, "food": hero_food, "color": _COLORS, "thing": THINGS,
        "friend": [kind.noun for kind in HEROES], "mood": tuple(ADJECTIVE_TRAITS), "city": TOWNS,
    }  # fmt: skip
    if key == "age":
        return rng.randint(2, 99)
    if nouns and key in ("thing", "friend", "food") and rng.random() < FREE_SHARE:
        return rng.choice(nouns)
    return rng.choice(usual[key])


def draw_object(
    rng: random.Random, nouns: Sequence[str] = (), *, is_made_up: bool | None = None
) -> tuple[Exchange, dict[str, str | int]]:
    """A request for a JSON object, and the object: read from a text, or invented for a hero."""
    kind = rng.choice(HEROES)
    hero = rng.choice(nouns) if nouns and rng.random() < FREE_SHARE else kind.noun
    habitat = HABITATS[kind.habitat]
    chosen = rng.sample(tuple(_SAYINGS), rng.randint(1, 4))
    values: dict[str, str | int] = {
        key: _key_value(key, habitat.foods, habitat.homes, nouns, rng) for key in chosen
    }
    pronoun = rng.choice(kind.pronouns)
    sentences = []
    for key, value in values.items():
        text = (
            rng.choice(_SAYINGS[key])
            .replace("{a}", with_article(str(value)))
            .replace("{}", str(value))
        )
        text = text.replace("{hero}", f"the {hero}").replace("{He}", pronoun.he.capitalize())
        text = text.replace("{him}", pronoun.him)
        sentences.append(text[0].upper() + text[1:])
    rng.shuffle(sentences)
    wanted = ["kind", *values] if rng.random() < 0.5 else list(values)
    rng.shuffle(wanted)
    record = {key: values.get(key, hero) for key in wanted}
    keys = _join([f'"{key}"' if rng.random() < 0.5 else key for key in wanted])
    if is_made_up or (is_made_up is None and rng.random() < 0.3):
        request = (
            rng.choice(_MADE_ASKS).replace("{a_hero}", with_article(hero)).replace("{keys}", keys)
        )
    else:
        text = f"This is {with_article(hero)}. " + " ".join(sentences)
        request = rng.choice(_ASKS).replace("{text}", text).replace("{keys}", keys)
    head = prompts.turn("user", request) + prompts.reply_start()
    return Exchange(head, json.dumps(record), tuple(map(str, record.values()))), record


def _join(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
