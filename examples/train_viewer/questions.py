"""Questions about a scene and their answers.

Owns their wording and what is asked at all: never what the picture leaves open, such as the colour
of the circle where there are two.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .scenes import COLORS, SHAPES, Scene, Thing

NUMBERS = ("no", "one", "two", "three", "four")
ACROSS, DOWN = ("left", "middle", "right"), ("top", "middle", "bottom")
_DESCRIBE = (
    "What is in the picture?", "What is this?", "Describe the picture.", "What do you see?",
    "Describe this image.", "What is in this image?", "Tell me what is in the picture.",
)  # fmt: skip
_BACKGROUND = ("What colour is the background?", "What color is the background?")
_LIST = (
    "List the shapes as JSON.", "What is in the picture? Answer as JSON.",
    "Give me the shapes as JSON.",
)  # fmt: skip
_WITHOUT_PICTURE = (
    ("Hello!", "Hello! Show me a picture."),
    ("Hi", "Hello! Show me a picture."),
    ("What can you do?", "I name the shapes and colours in a picture."),
    ("Who are you?", "I am quire-viewer. I name the shapes and colours in a picture."),
    ("What is in the picture?", "There is no picture. Please show me one."),
    ("What is this?", "There is no picture. Please show me one."),
    ("Describe the picture.", "There is no picture. Please show me one."),
    ("Thank you!", "You are welcome."),
)


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its answer, and of which kind it is."""

    kind: str
    text: str
    answer: str


def describe(scene: Scene) -> str:
    """Name all shapes from left to right, and the background."""
    names = [f"a {thing.name}" for thing in scene.things]
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return f"{listed[0].upper()}{listed[1:]} on {_article(scene.background)} background."


def shapes_of(scene: Scene) -> list[dict[str, str]]:
    """Return the shapes from left to right, as the answer in JSON has them."""
    return [
        {"size": thing.size, "color": thing.color, "shape": thing.shape} for thing in scene.things
    ]


def _article(word: str) -> str:
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def _alone(scene: Scene) -> list[Thing]:
    """Return the shapes that are the only ones of their kind."""
    shapes = [thing.shape for thing in scene.things]
    return [thing for thing in scene.things if shapes.count(thing.shape) == 1]


def _describe(scene: Scene, rng: random.Random) -> Question:
    return Question("description", rng.choice(_DESCRIBE), describe(scene))


def _list(scene: Scene, rng: random.Random) -> Question:
    return Question("JSON", rng.choice(_LIST), json.dumps(shapes_of(scene)))


def _background(scene: Scene, rng: random.Random) -> Question:
    return Question("background", rng.choice(_BACKGROUND), f"The background is {scene.background}.")


def _count(scene: Scene, rng: random.Random) -> Question:
    number = len(scene.things)
    text = rng.choice(
        ("How many shapes are there?", "How many shapes do you see?", "Count the shapes.")
    )
    verb, noun = ("is", "shape") if number == 1 else ("are", "shapes")
    return Question("number", text, f"There {verb} {NUMBERS[number]} {noun}.")


def _count_of(scene: Scene, rng: random.Random) -> Question:
    shape = rng.choice([*(thing.shape for thing in scene.things), rng.choice(SHAPES)])
    number = sum(thing.shape == shape for thing in scene.things)
    plural = f"{shape}es" if shape == "cross" else f"{shape}s"
    verb, noun = ("is", shape) if number == 1 else ("are", plural)
    return Question(
        "number", f"How many {plural} are there?", f"There {verb} {NUMBERS[number]} {noun}."
    )


def _color(scene: Scene, rng: random.Random) -> Question | None:
    if not (alone := _alone(scene)):
        return None
    thing = rng.choice(alone)
    word = rng.choice(("colour", "color"))
    text = rng.choice(
        (f"What {word} is the {thing.shape}?", f"Which {word} has the {thing.shape}?")
    )
    return Question("colour", text, f"The {thing.shape} is {thing.color}.")


def _shape(scene: Scene, rng: random.Random) -> Question | None:
    colors = [thing.color for thing in scene.things]
    alone = [thing for thing in scene.things if colors.count(thing.color) == 1]
    if not alone:
        return None
    thing = rng.choice(alone)
    text = rng.choice((f"What shape is {thing.color}?", f"Which shape is {thing.color}?"))
    return Question("shape", text, f"The {thing.shape} is {thing.color}.")


def _is_there(scene: Scene, rng: random.Random) -> Question:
    if rng.random() < 0.5:
        thing = rng.choice(scene.things)
        shape, color = thing.shape, thing.color
    else:  # of what is there, half of it
        shape, color = rng.choice(SHAPES), rng.choice(tuple(COLORS))
        if rng.random() < 0.5:
            shape = rng.choice(scene.things).shape
        elif rng.random() < 0.5:
            color = rng.choice(scene.things).color
    is_there = any((thing.shape, thing.color) == (shape, color) for thing in scene.things)
    verb = "is" if is_there else "is not"
    return Question(
        "yes or no",
        f"Is there {_article(color)} {shape}?",
        f"{'Yes' if is_there else 'No'}, there {verb} {_article(color)} {shape}.",
    )


def place_of(thing: Thing) -> str | None:
    """Say in which ninth of the picture a shape is; None where it is near an edge of two."""
    across = _third(thing.x, ("left", "", "right"))
    down = _third(thing.y, ("top", "", "bottom"))
    if across is None or down is None:
        return None
    if not across and not down:
        return "in the middle"
    if not down:
        return f"on the {across}"
    return f"at the {down} {across}".rstrip()


def _third(share: float, names: tuple[str, str, str]) -> str | None:
    if share < 0.36:
        return names[0]
    if share > 0.64:
        return names[2]
    return names[1] if 0.42 < share < 0.58 else None


def _where(scene: Scene, rng: random.Random) -> Question | None:
    placed = [(thing, place) for thing in _alone(scene) if (place := place_of(thing))]
    if not placed:
        return None
    thing, place = rng.choice(placed)
    return Question("place", f"Where is the {thing.shape}?", f"The {thing.shape} is {place}.")


def _side(scene: Scene, rng: random.Random) -> Question | None:
    alone = _alone(scene)
    if len(alone) < 2:
        return None
    first, second = rng.sample(alone, 2)
    if rng.random() < 0.5:
        side, other, is_first = "left of", "right of", first.x < second.x
    else:
        side, other, is_first = "above", "below", first.y < second.y
        if abs(first.y - second.y) < 0.08:
            return None
    found = side if is_first else other
    answer = f"{'Yes' if is_first else 'No'}, the {first.shape} is {found} the {second.shape}."
    return Question("side", f"Is the {first.shape} {side} the {second.shape}?", answer)


def _bigger(scene: Scene, rng: random.Random) -> Question | None:
    alone = _alone(scene)
    if len({thing.size for thing in alone}) < 2:
        return None
    big, small = (
        rng.choice([thing for thing in alone if thing.size == size]) for size in ("big", "small")
    )
    pair = [big.shape, small.shape]
    rng.shuffle(pair)
    return Question(
        "size",
        f"Which is bigger, the {pair[0]} or the {pair[1]}?",
        f"The {big.shape} is bigger than the {small.shape}.",
    )


_Asker = Callable[[Scene, random.Random], Question | None]
_ASKERS: tuple[tuple[_Asker, float], ...] = (
    (_describe, 2.0), (_list, 1.5), (_background, 0.4), (_count, 1.0), (_count_of, 1.5),
    (_color, 2.0), (_shape, 1.0), (_is_there, 3.0), (_where, 2.5), (_side, 2.5), (_bigger, 1.0),
)  # fmt: skip


def ask(scene: Scene, rng: random.Random) -> Iterator[Question]:
    """Yield questions about a scene without end; rarely one with the same answer again."""
    askers, weights = zip(*_ASKERS, strict=True)
    said: set[str] = set()
    while True:
        [asker] = rng.choices(askers, weights)
        question = asker(scene, rng)
        if question is not None and (question.answer not in said or rng.random() < 0.1):
            said.add(question.answer)
            yield question


def ask_without_picture(rng: random.Random) -> Question:
    """Return what is said where there is no picture."""
    text, answer = rng.choice(_WITHOUT_PICTURE)
    return Question("no picture", text, answer)
