"""The plots of the story grammar: a reader of the text files beside it.

Owns the layout of those files. A file holds blocks: ``== name``, then header lines ``key: value``,
a blank line, and paragraphs of templates divided by blank lines (line breaks inside a paragraph are
spaces). The block ``== common`` holds templates that every plot may use, as ``let`` lines.
"""

from dataclasses import dataclass, field
from pathlib import Path

_FOLDER = Path(__file__).parent
_LISTS = frozenset(
    ("groups", "other", "themes", "prefers", "needs", "avoids", "places", "things", "other_prefers")
)


@dataclass(frozen=True, slots=True)
class Plot:
    """How one kind of tale goes. Groups (or single kinds) say who may play;
    adjectives who should and who may not."""

    name: str
    groups: tuple[str, ...] = ("animal", "bird", "person")
    other: tuple[str, ...] = ()
    themes: tuple[str, ...] = ()
    prefers: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    avoids: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    things: tuple[str, ...] = ()
    other_prefers: tuple[str, ...] = ()
    asks: tuple[str, ...] = ()
    lets: tuple[tuple[str, str], ...] = ()
    weight: float = 1.0
    paragraphs: tuple[str, ...] = field(default=())

    @property
    def names_thing(self) -> bool:
        return "_thing}" in self.paragraphs[0] or "{thing}" in self.paragraphs[0]

    @property
    def introduces_name(self) -> bool:
        return any(
            slot in self.paragraphs[0] for slot in ("{named}", "{open}", "{open_two}", "{meet_two}")
        )

    @property
    def opens_at_home(self) -> bool:
        return self.paragraphs[0].startswith("{open}")


def _plot(block: str) -> Plot:
    head, _, body = block.partition("\n\n")
    name, *lines = head.splitlines()
    fields: dict[str, object] = {}
    lets: list[tuple[str, str]] = []
    for line in lines:
        key, _, value = (part.strip() for part in line.partition(":"))
        if key.startswith("let "):
            lets.append((key[4:].strip(), value))
        elif key in _LISTS:
            fields[key] = tuple(word.strip() for word in value.split(","))
        elif key == "asks":
            fields[key] = tuple(ask.strip() for ask in value.split("//"))
        elif key == "weight":
            fields[key] = float(value)
        else:
            raise ValueError(f"plot {name!r} has the unknown header {key!r}")
    paragraphs = tuple(" ".join(part.split()) for part in body.split("\n\n") if part.strip())
    return Plot(name.strip(), lets=tuple(lets), paragraphs=paragraphs, **fields)  # type: ignore[arg-type]


def _blocks() -> list[str]:
    texts = [path.read_text(encoding="utf-8") for path in sorted(_FOLDER.glob("*.txt"))]
    return [block.strip() for text in texts for block in f"\n{text}".split("\n== ")[1:]]


_ALL = [_plot(block) for block in _blocks()]
COMMON = {name: text for plot in _ALL if plot.name == "common" for name, text in plot.lets}


def read_plots() -> list[Plot]:
    """All plots in the order of the files."""
    return [plot for plot in _ALL if plot.name != "common"]
