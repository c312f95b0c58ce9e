"""Pictures of coloured shapes, and what is in them.

Owns the shapes, colours and sizes, how they are drawn, and which pairs of shape and colour are held
out of the training.
"""

import io
import math
import random
import zlib
from dataclasses import dataclass

from PIL import Image, ImageDraw

SHAPES = ("circle", "square", "triangle", "star", "heart", "cross")
COLORS: dict[str, tuple[int, int, int]] = {
    "red": (214, 30, 36), "orange": (245, 132, 20), "yellow": (248, 222, 50),
    "green": (36, 148, 52), "blue": (34, 78, 206), "purple": (122, 40, 150),
    "pink": (250, 150, 190), "brown": (116, 68, 32), "black": (16, 16, 18),
    "white": (248, 248, 246), "grey": (136, 136, 140),
}  # fmt: skip
SIZES: dict[str, tuple[float, float]] = {"small": (0.105, 0.13), "big": (0.18, 0.25)}
"""Half of a shape's width, as a share of the picture's."""
MAX_SHAPES = 4
IMAGE_SIZE, PATCH_SIZE = 64, 8
"""Pixels along an edge of what the model reads, and of each piece that it reads it in."""
NUM_PATCHES = (IMAGE_SIZE // PATCH_SIZE) ** 2
_DRAWN_SIZE = 192
_COLOR_NOISE = 14
_MIN_STEP = 0.07
"""Between the centres of two shapes, from left to right, so that their order is plain."""
_HELD_OUT_SHARE = 12
"""One in so many pairs of shape and colour is held out."""


def is_held_out(shape: str, color: str) -> bool:
    """Tell whether no picture of the training has a shape of this colour."""
    return zlib.crc32(f"{color} {shape}".encode()) % _HELD_OUT_SHARE == 0


@dataclass(frozen=True, slots=True)
class Thing:
    """A shape in a picture. Places are shares of the picture's edges, from the upper left."""

    shape: str
    color: str
    size: str
    x: float
    y: float
    radius: float

    @property
    def name(self) -> str:
        return f"{self.size} {self.color} {self.shape}"


@dataclass(frozen=True, slots=True)
class Scene:
    """A picture's colour and its shapes from left to right."""

    background: str
    things: tuple[Thing, ...]


def draw_scene(
    rng: random.Random, *, has_held_out: bool = False, most_shapes: int = MAX_SHAPES
) -> Scene:
    """Invent a scene of one shape to `most_shapes`; with `has_held_out` the first that is drawn is
    of a pair that is held out."""
    background = rng.choice(tuple(COLORS))
    things: list[Thing] = []
    for _ in range(rng.randint(1, most_shapes)):
        pair = _draw_pair(rng, background, held_out=has_held_out and not things)
        placed = _place(rng, things, *pair)
        if placed is not None:
            things.append(placed)
    return Scene(background, tuple(sorted(things, key=lambda thing: thing.x)))


def _draw_pair(rng: random.Random, background: str, *, held_out: bool) -> tuple[str, str]:
    while True:
        shape, color = rng.choice(SHAPES), rng.choice(tuple(COLORS))
        if color != background and is_held_out(shape, color) == held_out:
            return shape, color
        if held_out and rng.random() < 0.02:  # the background may be the only colour held out
            held_out = False


def _place(rng: random.Random, things: list[Thing], shape: str, color: str) -> Thing | None:
    """Find a place that touches no other shape; None where there seems to be none."""
    for _ in range(40):
        size = rng.choice(tuple(SIZES))
        radius = rng.uniform(*SIZES[size])
        x, y = (rng.uniform(radius + 0.02, 0.98 - radius) for _ in range(2))
        if all(
            math.hypot(x - other.x, y - other.y) > 1.15 * (radius + other.radius)
            and abs(x - other.x) > _MIN_STEP
            for other in things
        ):
            return Thing(shape, color, size, x, y, radius)
    return None


def paint(scene: Scene, rng: random.Random, size: int = _DRAWN_SIZE) -> Image.Image:
    """Draw the scene with colours, outlines and turns that vary, sometimes through JPEG."""
    image = Image.new("RGB", (size, size), _shade(scene.background, rng))
    canvas = ImageDraw.Draw(image)
    has_outline = rng.random() < 0.15
    for thing in scene.things:
        outline = _shade("black", rng) if has_outline and thing.color != "black" else None
        points = [(x * size, y * size) for x, y in _outline_of(thing, rng)]
        canvas.polygon(points, fill=_shade(thing.color, rng), outline=outline, width=size // 64)
    if rng.random() < 0.3:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=rng.randint(60, 95))
        image = Image.open(buffer)
        image.load()
    return image


def _shade(color: str, rng: random.Random) -> tuple[int, int, int]:
    red, green, blue = (
        min(255, max(0, channel + rng.randint(-_COLOR_NOISE, _COLOR_NOISE)))
        for channel in COLORS[color]
    )
    return red, green, blue


def _outline_of(thing: Thing, rng: random.Random) -> list[tuple[float, float]]:
    """Return the corners of the shape's outline, turned and stretched a little."""
    turn = math.radians(rng.uniform(-12, 12))
    wide, high = (thing.radius * rng.uniform(0.92, 1.0) for _ in range(2))
    return [
        (
            thing.x + wide * x * math.cos(turn) - high * y * math.sin(turn),
            thing.y + wide * x * math.sin(turn) + high * y * math.cos(turn),
        )
        for x, y in _UNIT_OUTLINES[thing.shape]
    ]


def _on_circle(count: int, radii: tuple[float, ...] = (1.0,)) -> list[tuple[float, float]]:
    """Return points from the top on clockwise, whose distances from the centre take turns."""
    angles = (2 * math.pi * number / count for number in range(count))
    return [
        (
            radii[number % len(radii)] * math.sin(angle),
            -radii[number % len(radii)] * math.cos(angle),
        )
        for number, angle in enumerate(angles)
    ]


def _heart() -> list[tuple[float, float]]:
    """Return the curve x = 16 sin^3 t, y = 13 cos t - 5 cos 2t - 2 cos 3t - cos 4t, scaled."""
    angles = [2 * math.pi * number / 48 for number in range(48)]
    return [
        (
            math.sin(t) ** 3,
            -(13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)) / 15,
        )
        for t in angles
    ]


_THIRD = 0.32
_UNIT_OUTLINES: dict[str, list[tuple[float, float]]] = {
    "circle": _on_circle(48),
    "square": [(-0.88, -0.88), (0.88, -0.88), (0.88, 0.88), (-0.88, 0.88)],
    "triangle": [(0.0, -0.95), (0.95, 0.8), (-0.95, 0.8)],
    "star": _on_circle(10, (1.05, 0.42)),
    "heart": _heart(),
    "cross": [
        (-_THIRD, -1.0), (_THIRD, -1.0), (_THIRD, -_THIRD), (1.0, -_THIRD), (1.0, _THIRD),
        (_THIRD, _THIRD), (_THIRD, 1.0), (-_THIRD, 1.0), (-_THIRD, _THIRD), (-1.0, _THIRD),
        (-1.0, -_THIRD), (-_THIRD, -_THIRD),
    ],
}  # fmt: skip
"""Corners within a square of two by two around the centre, y downwards."""
