"""The Jinja environment that chat templates run in: what transformers offers them, metered and traced.

Owns three things that Jinja's immutable sandbox does not give. *Metering*: every loop turn, call, operator and filter
is charged to the render's `Meter`, sizes are checked before a large string or number is made, and a deadline is checked
on the way, so that no template loops or swells without end. *Tracing*: template text and string literals become
`TracedText`. And the dialect of Hugging Face templates: `{% generation %}`, loop controls, `tojson` without HTML
escapes.

Templates are the model's or the operator's, never a request's. This bounds the damage of a bad one; it does not aim to
make arbitrary hostile code useful.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import wraps
from string import Formatter
from typing import Any, Final, cast

from jinja2 import Environment, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import TemplateRuntimeError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import pass_environment
from markupsafe import Markup, escape

from quire.text.traced import Span, TracedText, join_traced, spans_of, trace

_TEMPLATE_LEVEL: Final = 2
_MAX_NUMBER_BITS: Final = 4096
_MAX_COUNT: Final = 1_000_000  # the largest width, length or count that a template may pass to a function
_MAX_INDENT: Final = 64
_MAX_WIDTH_DIGITS: Final = 6
_INDENTING: Final = frozenset({"indent", "tojson"})
_COUNTING: Final = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "wordwrap", "truncate", "batch", "slice"})
# Filters that pass a list on, or count it, without making its text.
_STRUCTURAL_FILTERS: Final = frozenset(
    {"length", "count", "first", "last", "list", "items", "dictsort", "select", "selectattr", "reject", "rejectattr"}
    | {"map", "sort", "unique", "reverse", "batch", "slice", "sum", "min", "max", "groupby", "default", "d", "attr"}
    | {"join", "metered"}
)
_REMOVED: Final = frozenset({"random", "urlize", "pprint", "xmlattr"})  # unrepeatable, or of use to HTML pages only

meter_in_use: ContextVar[Meter | None] = ContextVar("meter_in_use", default=None)


class LimitError(TemplateRuntimeError):
    """A template went past a limit of its render."""


class Meter:
    """What one render may still spend: steps, characters made, and time."""

    def __init__(self, *, max_steps: int, max_chars: int, deadline_s: float, clock: Callable[[], float]) -> None:
        self._num_steps_left = max_steps
        self._num_chars_left = 16 * max_chars  # intermediate strings, most of which are short-lived
        self.max_chars = max_chars
        self._deadline_s = deadline_s
        self._clock = clock

    def charge(self, num_chars: int = 0) -> None:
        """Pay for one step that makes a string of `num_chars`. Raises LimitError."""
        self._num_steps_left -= 1
        self._num_chars_left -= num_chars
        if num_chars > self.max_chars or self._num_chars_left < 0:
            raise LimitError(f"it makes more text than {self.max_chars} characters")
        if self._num_steps_left < 0:
            raise LimitError("it takes too many steps (an endless loop?)")
        if self._num_steps_left % 256 == 0 or num_chars > 1 << 16:
            self.check_time()

    def check_time(self) -> None:
        """Raises LimitError when the render has taken too long."""
        if self._clock() > self._deadline_s:
            raise LimitError("it takes too long")


def _charge(num_chars: int = 0) -> None:
    meter = meter_in_use.get()
    if meter is not None:  # none while a template is compiled
        meter.charge(num_chars)


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks what an assistant wrote, renders its contents."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TracingFormatter(SandboxedFormatter):
    """`str.format` that keeps the record of a format string trusted at `level`, and of the texts put into it."""

    def __init__(self, environment: Environment, level: int) -> None:
        super().__init__(environment)
        self._level = level

    def vformat(self, format_string: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        parts, num_auto = [], 0
        for literal, name, spec, conversion in self.parse(format_string):
            parts.append(trace(literal, self._level))
            if name is None:
                continue
            if not name or name[0] in ".[":
                name, num_auto = f"{num_auto}{name}", num_auto + 1
            value = self.convert_field(self.get_field(name, args, kwargs)[0], conversion)
            spec = super().vformat(spec or "", args, kwargs)
            parts.append(value if isinstance(value, str) and not spec else self.format_field(value, spec))
        return join_traced(parts)


class _TracingGenerator(CodeGenerator):
    """Compiles template text and string literals to traced text, and `~` to the traced join."""

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return self._literal("".join(group))

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData | nodes.Const):
            raise nodes.Impossible  # nothing is computed before the meter runs
        return super()._output_child_to_const(node, frame, finalize)

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        value = node.as_const(frame.eval_ctx)
        if isinstance(value, str):
            self.write(self._literal(value))
        else:
            super().visit_Const(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.join_values((")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write("))")

    def _literal(self, text: str) -> str:
        literals = cast(TemplateEnvironment, self.environment).literals
        literals.append(trace(text, _TEMPLATE_LEVEL))
        return f"environment.literals[{len(literals) - 1}]"


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment of one template. `now` answers `strftime_now(format)`."""

    code_generator_class = _TracingGenerator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, strftime_now: Callable[[str], str]) -> None:
        extensions = [_Generation, loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, finalize=_finalize, extensions=extensions)
        self.literals: list[str] = []
        self.concat = _metered_join  # type: ignore[method-assign]
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": strftime_now}
        for name in _REMOVED & self.filters.keys():
            del self.filters[name]
        self.filters |= {"tojson": _tojson, "join": _join}
        self.filters = {name: _metered_filter(name, function) for name, function in self.filters.items()}
        self.filters["metered"] = _metered

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        for loop in list(source.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "metered", [], [], None, None, lineno=loop.lineno)
        return super()._generate(source, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`"...".format(...)`, traced where the whole format string is."""
        wrapper = super().wrap_str_format(value)
        owner = getattr(value, "__self__", None)
        spans = spans_of(owner) if isinstance(owner, str) else ()
        if wrapper is None or value.__name__ != "format" or len(spans) != 1 or spans[0][:2] != (0, len(str(owner))):
            return wrapper
        formatter = _TracingFormatter(self, spans[0][2])

        def traced(*args: Any, **kwargs: Any) -> str:
            _check_arguments("format", owner, (*args, *kwargs.values()))
            return formatter.vformat(owner, args, kwargs)

        return traced

    def join_values(self, values: tuple[Any, ...]) -> str:
        """The operator `~`."""
        return _metered_join([_text(value) for value in values])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operands(operator, left, right)
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            if not isinstance(left, Markup) and not isinstance(right, Markup):
                return _metered_join((left, right))
            result: Any = _add_markup(left, right)
        else:
            result = super().call_binop(context, operator, left, right)
        _charge(len(result) if isinstance(result, str) else 0)
        return result

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805, RUF100
        _charge()
        if not isinstance(__obj, Macro):
            name, owner = getattr(__obj, "__name__", ""), getattr(__obj, "__self__", None)
            _check_arguments(name, owner, (*args, *kwargs.values()))
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, str):
            _charge(len(result))
        return result


class _TracedMarkup(Markup):
    """What `+` gives with a text marked safe: HTML-escaped text that keeps the record of what escaping left alone."""

    _spans: tuple[Span, ...] = ()

    def __str__(self) -> str:
        return TracedText("".join((self,)), self._spans)


def _add_markup(left: str, right: str) -> str:
    parts = []
    for part in (left, right):
        escaped = str(part) if isinstance(part, Markup) else "".join((escape(part),))
        parts.append(part if escaped == part and not isinstance(part, Markup) else escaped)
    text = join_traced(parts)
    markup = _TracedMarkup(text)
    markup._spans = spans_of(text)
    return markup


def _metered_join(parts: Iterable[str]) -> str:
    """Jinja's way to join output: the parts of a macro, a block or a whole template as they are produced."""
    collected, num_chars = [], 0
    meter = meter_in_use.get()
    for part in parts:
        collected.append(part)
        num_chars += len(part)
        if meter is not None and num_chars > meter.max_chars:
            meter.charge(num_chars)
    _charge(num_chars)
    return join_traced(collected)


def _text(value: Any) -> str:
    """`str(value)`, refused for a list or dictionary whose text would be huge (the same list many times over)."""
    if isinstance(value, list | tuple | dict):
        _measure(value)
    return str(value)


def _measure(value: Any) -> None:
    """Charge for the text of nested data before it is made."""
    meter = meter_in_use.get()
    num_left = meter.max_chars if meter is not None else 0
    stack = [value]
    while stack and num_left >= 0:
        item = stack.pop()
        num_left -= 2 + (len(item) if isinstance(item, str) else 0)
        if isinstance(item, dict):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            stack += item
    if meter is not None and num_left < 0:
        meter.charge(meter.max_chars + 1)


def _finalize(value: Any) -> Any:
    """What Jinja does to each value before it writes it."""
    return _text(value) if isinstance(value, list | tuple | dict) else value


def _metered(iterable: Iterable[Any]) -> Iterator[Any]:
    """The turns of a loop, each charged."""
    for item in iterable:
        _charge()
        yield item


def _metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    position = 1 if hasattr(function, "jinja_pass_arg") else 0  # of the value, after a context

    @wraps(function)  # keeps the mark by which Jinja passes a context
    def metered(*args: Any, **kwargs: Any) -> Any:
        value = args[position]
        _check_arguments(name, value, (*args[position + 1 :], *kwargs.values()))
        if name not in _STRUCTURAL_FILTERS and isinstance(value, list | tuple | dict):
            _measure(value)
        result = function(*args, **kwargs)
        _charge(len(result) if isinstance(result, str) else 0)
        return result

    return metered


def _check_operands(operator: str, left: Any, right: Any) -> None:
    """Refuse an operation whose result would be huge before it is made."""
    if operator == "+":
        return
    if isinstance(left, int) and isinstance(right, int):
        num_bits = left.bit_length() * max(right, 0) if operator == "**" else left.bit_length() + right.bit_length()
        if operator != "%" and num_bits > _MAX_NUMBER_BITS:
            raise LimitError(f"it computes a number of more than {_MAX_NUMBER_BITS} bits")
    elif operator == "*" and (isinstance(left, int) or isinstance(right, int)):
        count, sequence = (left, right) if isinstance(left, int) else (right, left)
        if hasattr(sequence, "__len__"):
            _charge(max(count, 0) * len(sequence))
    elif operator == "%" and isinstance(left, str):
        _check_arguments("format", left, right if isinstance(right, tuple) else (right,))


def _check_arguments(name: str, owner: Any, args: tuple[Any, ...]) -> None:
    """Refuse widths, counts and replacements that would make a huge string in one call of `name` on `owner`."""
    max_count = _MAX_INDENT if name in _INDENTING else _MAX_COUNT
    if name in _COUNTING | _INDENTING and any(isinstance(arg, int) and abs(arg) > max_count for arg in args):
        raise LimitError(f"it calls {name} with a number above {max_count}")
    texts = [arg for arg in args if isinstance(arg, str)]
    if name == "replace" and isinstance(owner, str) and len(texts) >= 2:
        _charge(owner.count(texts[0]) * len(texts[1]))
    elif name == "expandtabs" and isinstance(owner, str):
        _charge(owner.count("\t") * max((arg for arg in args if isinstance(arg, int)), default=8))
    elif name == "join":
        _check_join([*texts, *([owner] if isinstance(owner, str) else [])], (owner, *args))
    elif name in {"format", "format_map"} and isinstance(owner, str):
        _check_format(owner)


def _check_format(text: str) -> None:
    """Refuse formats with long or computed widths, of either kind (`%*d`, `{:{width}}`)."""
    num_digits = 0
    for char in text:
        num_digits = num_digits + 1 if char.isdigit() else 0
        if num_digits > _MAX_WIDTH_DIGITS:
            raise LimitError(f"it formats with a width of more than {_MAX_WIDTH_DIGITS} digits")
    is_computed = any(part.lstrip("-+#0123456789.").startswith("*") for part in text.split("%")[1:])
    with suppress(ValueError):  # not a format for braces
        is_computed |= any("{" in (spec or "") for _, _, spec, _ in Formatter().parse(text))
    if is_computed:
        raise LimitError("it formats with a computed width")


def _check_join(texts: list[str], args: tuple[Any, ...]) -> None:
    for items in args:
        if isinstance(items, list | tuple):
            num_between = len(items) * max((len(text) for text in texts), default=0)
            _charge(num_between + sum(len(item) for item in items if isinstance(item, str)))


def _raise_exception(message: str) -> None:
    raise TemplateRuntimeError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as it is: Jinja's own filter escapes characters for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@pass_environment
def _join(environment: Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    items = value if attribute is None else map(make_attrgetter(environment, attribute), value)
    parts: list[str] = []
    for item in items:
        if parts:
            parts.append(_text(d))
        parts.append(_text(item))
    return _metered_join(parts)
