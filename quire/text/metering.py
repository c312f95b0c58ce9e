"""What the render of a template may cost, and what each operation is charged before it is carried
out.

Owns the `Meter` and the rules by which sizes are known beforehand: of formats, replacements, joins,
indents, repeated and nested data. A rule refuses with `LimitError`; nothing here computes what it
measures. Knows nothing of Jinja's environment, which `sandbox` wires to these rules.

Data may be nested so that its text is exponentially longer than what it takes in memory (a list
that holds another twice, which holds a third twice, ...). Whatever would go through all of it
(text, comparison, hashing, sorting) is weighed first, as if each part were written out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from itertools import chain
from string import Formatter
from typing import Any, Final

from jinja2.exceptions import TemplateRuntimeError
from jinja2.utils import Namespace

_VIEWS: Final[tuple[type, ...]] = (type({}.keys()), type({}.values()), type({}.items()))
CONTAINERS: Final[tuple[type, ...]] = (list, tuple, dict, Namespace, *_VIEWS)
"""What holds other values, and shows or compares them."""
SLOT_CHARS: Final = 8
"""A place in a list is charged as so many characters."""
_MAX_PARTS: Final = 500_000
"""Of nested data that is gone through at once."""
_MAX_NUMBER_BITS: Final = 4096
# the largest width, length or count that a template may pass to a function
_MAX_COUNT: Final = 1_000_000
_MAX_INDENT: Final = 64
_MAX_WIDTH_DIGITS: Final = 6
_MAX_DIGITS: Final = 4300  # as Python's own limit for decimal numbers
_CHECK_STEPS: Final = 256
_CHARS_PER_STEP: Final = 4096
_COUNTING: Final = frozenset(
    {"center", "ljust", "rjust", "zfill", "expandtabs", "truncate", "batch", "slice", "round"}
)
_INDENTING: Final = frozenset({"indent", "tojson", "round"})
_COMPARING: Final = frozenset({"count", "index"})
_NUMBER: Final = re.compile(r"\d+")

meter_in_use: ContextVar[Meter | None] = ContextVar("meter_in_use", default=None)


class LimitError(TemplateRuntimeError):
    """A template went past a limit of its render."""


class Meter:
    """What one render may still spend: steps, characters made, and time."""

    def __init__(
        self, *, max_steps: int, max_chars: int, deadline_s: float, clock: Callable[[], float]
    ) -> None:
        self._num_steps_left = max_steps
        self._num_chars_left = 16 * max_chars  # intermediate strings, most of which are short-lived
        self._num_unchecked = 0
        self.max_chars = max_chars
        self._deadline_s = deadline_s
        self._clock = clock

    def charge(self, num_chars: int = 0, num_steps: int = 1) -> None:
        """Pay for `num_steps` that make a string of `num_chars`. Raises LimitError."""
        self._num_steps_left -= num_steps
        self._num_chars_left -= num_chars
        if num_chars > self.max_chars or self._num_chars_left < 0:
            raise LimitError(f"it makes more text than {self.max_chars} characters")
        if self._num_steps_left < 0:
            raise LimitError("it takes too many steps (an endless loop?)")
        self._num_unchecked += num_steps
        if self._num_unchecked >= _CHECK_STEPS or num_chars > 1 << 16:
            self._num_unchecked = 0
            self.check_time()

    def check_time(self) -> None:
        """Raises LimitError when the render has taken too long."""
        if self._clock() > self._deadline_s:
            raise LimitError("it takes too long")


def charge(num_chars: int = 0, num_steps: int = 1) -> None:
    """`Meter.charge` of the render that runs, if one does: none while a template is compiled."""
    meter = meter_in_use.get()
    if meter is not None:
        meter.charge(num_chars, num_steps)


def charge_result(value: Any) -> None:
    """Pay for a value that an operation has made: what it holds was paid for when that was made."""
    if isinstance(value, str):
        charge(len(value))
    elif isinstance(value, list | tuple | dict):
        charge(SLOT_CHARS * len(value))
    else:
        charge()


def weigh(value: Any, *, extra_chars: int = 0, indent: int = 0) -> int:
    """Return the length, more or less, of the text of nested data; charged as steps, and refused
    where it is huge.

    `extra_chars` come with each part, and `indent` with each level that a part lies below.
    """
    meter = meter_in_use.get()
    limit = meter.max_chars if meter is not None else 1 << 30
    total, num_parts = 0, 0
    level: list[Any] = [value]
    depth = 0
    while level and total <= limit and num_parts + len(level) <= _MAX_PARTS:
        num_parts += len(level)
        total += (extra_chars + indent * depth) * len(level) + sum(map(_own_chars, level))
        containers = [item for item in level if isinstance(item, CONTAINERS)]
        if sum(map(_num_parts, containers)) > _MAX_PARTS:
            break
        level = [part for item in containers for part in _parts(item)]
        depth += 1
    else:
        containers = level
    if meter is not None:
        meter.charge(0, 1 + num_parts // 16 + total // _CHARS_PER_STEP)
        if total > limit or containers:
            meter.charge(limit + 1)
    return total


def weighed(value: Any) -> Any:
    """`value`, about to be compared or hashed."""
    if isinstance(value, CONTAINERS):
        weigh(value)
    elif isinstance(value, str) and len(value) > _CHARS_PER_STEP:
        charge(0, len(value) // _CHARS_PER_STEP)
    return value


def _own_chars(item: Any) -> int:
    if isinstance(item, str):
        return 2 + len(item)
    if isinstance(item, int):
        return 2 + item.bit_length() // 3
    return 2 if isinstance(item, CONTAINERS) else 32


def _num_parts(item: Any) -> int:
    if isinstance(item, Namespace):
        return 0
    return 2 * len(item) if isinstance(item, dict) else len(item)


def _parts(item: Any) -> Iterable[Any]:
    if isinstance(item, Namespace):
        item = object.__getattribute__(item, "_Namespace__attrs")
    return chain(item.keys(), item.values()) if isinstance(item, dict) else item


def metered(iterable: Any) -> Iterator[Any]:
    """Yield the turns of a loop, each charged."""
    for item in iterable:
        charge()
        yield item


def check_operands(operator: str, left: Any, right: Any) -> None:
    """Refuse an operation whose result would be huge before it is made."""
    if operator == "+":
        if isinstance(left, list | tuple) and isinstance(right, list | tuple):
            charge(SLOT_CHARS * (len(left) + len(right)))
    elif isinstance(left, int) and isinstance(right, int):
        num_bits = (
            left.bit_length() * max(right, 0)
            if operator == "**"
            else left.bit_length() + right.bit_length()
        )
        if operator != "%" and num_bits > _MAX_NUMBER_BITS:
            raise LimitError(f"it computes a number of more than {_MAX_NUMBER_BITS} bits")
    elif operator == "*" and (isinstance(left, int) or isinstance(right, int)):
        count, sequence = (left, right) if isinstance(left, int) else (right, left)
        if hasattr(sequence, "__len__"):
            weight = 1 if isinstance(sequence, str) else SLOT_CHARS
            charge(max(count, 0) * len(sequence) * weight)
    elif operator == "%" and isinstance(left, str):
        check_arguments("format", left, right if isinstance(right, tuple) else (right,))


def check_arguments(name: str, owner: Any, args: tuple[Any, ...]) -> None:
    """Refuse what would make a huge result, or take long, in one call of `name` on `owner`,
    a filter's or a method's."""
    most = _MAX_INDENT if name in _INDENTING else _MAX_COUNT
    if name in _COUNTING | _INDENTING and any(
        isinstance(arg, int) and abs(arg) > most for arg in args
    ):
        raise LimitError(f"it calls {name} with a number above {most}")
    for value in (owner, *args) if name in _COMPARING else args:
        weighed(value)
    if name in _RULES:
        _RULES[name](owner, args)


def _check_replace(owner: Any, args: tuple[Any, ...]) -> None:
    texts = [str(arg) for arg in args if isinstance(arg, str | int | float)][:2]
    if len(texts) == 2 and isinstance(owner, str):
        old, new = texts  # by position, or in whatever order they were named
        charge(max(owner.count(old) * len(new), 0 if old == "" else owner.count(new) * len(old)))


def _check_tabs(owner: Any, args: tuple[Any, ...]) -> None:
    if isinstance(owner, str):
        charge(owner.count("\t") * max((arg for arg in args if isinstance(arg, int)), default=8))


def _check_indent(owner: Any, args: tuple[Any, ...]) -> None:
    width = max(
        (len(arg) if isinstance(arg, str) else arg for arg in args if isinstance(arg, str | int)),
        default=4,
    )
    if isinstance(owner, str):
        charge((1 + len(owner.splitlines())) * max(width, 0))


def _check_join(owner: Any, args: tuple[Any, ...]) -> None:
    separator = max((len(each) for each in (owner, *args) if isinstance(each, str)), default=0)
    for items in (owner, *args):
        if isinstance(items, CONTAINERS):
            charge(
                _num_parts(items) * separator
                + sum(len(item) for item in _parts(items) if isinstance(item, str))
            )


def _check_number(owner: Any, args: tuple[Any, ...]) -> None:
    if isinstance(owner, str) and len(owner) > _MAX_DIGITS:
        raise LimitError(f"it reads a number of more than {_MAX_DIGITS} characters")


def _check_format(owner: Any, args: tuple[Any, ...]) -> None:
    """Refuse formats with long or computed widths, of either kind (`%*d`, `{:{width}}`),
    and what adds up to much."""
    if not isinstance(owner, str):
        return
    widths = _NUMBER.findall(owner)
    if any(len(width) > _MAX_WIDTH_DIGITS for width in widths):
        raise LimitError(f"it formats with a width of more than {_MAX_WIDTH_DIGITS} digits")
    is_computed = any(
        part.lstrip("-+#0123456789.").startswith("*") for part in owner.split("%")[1:]
    )
    with suppress(ValueError):  # not a format for braces
        is_computed |= any("{" in (spec or "") for _, _, spec, _ in Formatter().parse(owner))
    if is_computed:
        raise LimitError("it formats with a computed width")
    num_fields = max(owner.count("%"), owner.count("{"))
    largest = max((weigh(arg) for arg in args), default=0)
    charge(len(owner) + sum(map(int, widths)) + num_fields * largest)


_RULES: Final[Mapping[str, Callable[[Any, tuple[Any, ...]], None]]] = {
    "replace": _check_replace,
    "expandtabs": _check_tabs,
    "indent": _check_indent,
    "join": _check_join,
    "format": _check_format,
    "format_map": _check_format,
    "int": _check_number,
    "float": _check_number,
}
