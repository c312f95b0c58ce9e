"""The Jinja environment that chat templates run in: what transformers offers them, metered and
traced.

Owns three things that Jinja's immutable sandbox does not give. *Metering*: every loop turn, call,
operator, comparison, test and filter is charged to the render's `Meter` by the rules of `metering`,
before it is carried out, so that no template loops or swells without end. *Tracing*: template text
and string literals become `TracedText`. And the dialect of Hugging Face templates:
`{% generation %}`, loop controls, `tojson` without HTML escapes.

Templates are the model's or the operator's, never a request's. This bounds the damage of a bad one;
it does not aim to make arbitrary hostile code useful.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, Final, cast

from jinja2 import Environment, nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.exceptions import TemplateRuntimeError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import pass_environment
from markupsafe import Markup, escape

from quire.text.metering import (
    CONTAINERS,
    LimitError,
    charge,
    charge_result,
    check_arguments,
    check_operands,
    meter_in_use,
    metered,
    weigh,
    weighed,
)
from quire.text.traced import Span, TracedText, join_traced, spans_of, trace

_TEMPLATE_LEVEL: Final = 2
_MAX_REASON_CHARS: Final = 500
# of a date: the system's formatting may make 256 times as much of it
_MAX_FORMAT_CHARS: Final = 128
_MAX_SEPARATOR_CHARS: Final = 64
# Filters that pass a list on, or count it, without looking into what it holds.
_STRUCTURAL_FILTERS: Final = frozenset(
    {
        "length",
        "count",
        "first",
        "last",
        "list",
        "items",
        "select",
        "selectattr",
        "reject",
        "rejectattr",
    }
    | {"map", "reverse", "batch", "slice", "default", "d", "attr", "join", "metered"}
)
# Filters that compare what a list holds, for which an iterator is made one, to be weighed.
_COMPARING_FILTERS: Final = frozenset({"dictsort", "sort", "unique", "min", "max", "groupby"})
# Unrepeatable, of use to HTML pages only, or taking time that grows with the square of a text's
# length.
_REMOVED: Final = frozenset({"random", "urlize", "pprint", "xmlattr", "striptags", "wordwrap"})
_UNSAFE_METHODS: Final = frozenset({"encode", "translate", "maketrans", "to_bytes", "from_bytes"})
"""Of texts and numbers: their results may be huge, and no template needs them."""


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks what an assistant wrote,
    renders its contents."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TracingFormatter(SandboxedFormatter):
    """`str.format` that keeps the record of a format string trusted at `level`,
    and of the texts put into it."""

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
            parts.append(
                value if isinstance(value, str) and not spec else self.format_field(value, spec)
            )
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

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self.write("(")
        self._visit_weighed(node.expr, frame)
        for operand in node.ops:
            self.visit(operand, frame)
        self.write(")")

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:
        self.write(f" {operators[node.op]} ")
        self._visit_weighed(node.expr, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("{")
        for item in node.items:
            self._visit_weighed(item.key, frame)
            self.write(": ")
            self.visit(item.value, frame)
            self.write(", ")
        self.write("}")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        is_slice = isinstance(node.arg, nodes.Slice)  # which Jinja leaves to Python
        self.write("environment.charged(" if is_slice else "(")
        super().visit_Getitem(node, frame)
        self.write(")")

    def _visit_weighed(self, node: nodes.Expr, frame: Frame) -> None:
        """Weigh what will be compared or hashed."""
        is_small = isinstance(node, nodes.Const)
        self.write("(" if is_small else "environment.weighed(")
        self.visit(node, frame)
        self.write(")")

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
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_finalize,
            extensions=extensions,
        )
        self.literals: list[str] = []
        self.concat = _metered_join  # type: ignore[method-assign]
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _bounded_format(strftime_now),
        }
        for name in _REMOVED & self.filters.keys():
            del self.filters[name]
        self.filters |= {"tojson": _tojson, "join": _join, "sum": _sum}
        self.filters = {
            name: _metered_filter(name, function) for name, function in self.filters.items()
        }
        self.filters["metered"] = metered
        self.tests = {
            name: _metered_test(cast(Any, function)) for name, function in self.tests.items()
        }
        self.weighed = weighed

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        for loop in list(source.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "metered", [], [], None, None, lineno=loop.lineno)
        return super()._generate(source, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`"...".format(...)`, checked; traced where the whole format string is."""
        wrapper = super().wrap_str_format(value)
        owner = getattr(value, "__self__", None)
        if wrapper is None or not isinstance(owner, str):
            return wrapper
        spans = spans_of(owner)
        is_traced = (
            value.__name__ == "format" and len(spans) == 1 and spans[0][:2] == (0, len(owner))
        )
        formatter = _TracingFormatter(self, spans[0][2]) if is_traced else None

        def checked(*args: Any, **kwargs: Any) -> str:
            check_arguments("format", owner, (*args, *kwargs.values()))
            return (
                wrapper(*args, **kwargs)
                if formatter is None
                else formatter.vformat(owner, args, kwargs)
            )

        return checked

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return super().is_safe_attribute(obj, attr, value) and attr not in _UNSAFE_METHODS

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, weighed(argument))

    def charged(self, value: Any) -> Any:
        """`value`, a slice."""
        charge_result(value)
        return value

    def join_values(self, values: tuple[Any, ...]) -> str:
        """Return the operator `~`."""
        return _metered_join([_text(value) for value in values])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check_operands(operator, left, right)
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            if not isinstance(left, Markup) and not isinstance(right, Markup):
                return _metered_join((left, right))
            result: Any = _add_markup(left, right)
        else:
            result = super().call_binop(context, operator, left, right)
        charge(len(result) if isinstance(result, str) else 0)
        return result

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805, RUF100
        charge()
        if isinstance(__obj, Macro):
            return super().call(__context, __obj, *args, **kwargs)
        name, owner = getattr(__obj, "__name__", ""), getattr(__obj, "__self__", None)
        if name == "join":  # how much an iterator will give is not known before
            args = tuple(list(metered(arg)) if isinstance(arg, Iterator) else arg for arg in args)
        check_arguments(name, owner, (*args, *kwargs.values()))
        result = super().call(__context, __obj, *args, **kwargs)
        charge_result(result)
        return result


class _TracedMarkup(Markup):
    """What `+` gives with a text marked safe: HTML-escaped text that keeps the record
    of what escaping left alone."""

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
    """Jinja's way to join output: the parts of a macro,
    a block or a whole template as they are produced."""
    collected, num_chars = [], 0
    meter = meter_in_use.get()
    for part in parts:
        collected.append(part)
        num_chars += len(part)
        if meter is not None and num_chars > meter.max_chars:
            meter.charge(num_chars)
    charge(num_chars)
    return join_traced(collected)


def _text(value: Any) -> str:
    """`str(value)`, refused for a list or dictionary whose text would be huge (the
    same list many times over)."""
    if isinstance(value, CONTAINERS):
        weigh(value)
    return str(value)


def _finalize(value: Any) -> Any:
    """Return what Jinja does to each value before it writes it."""
    return _text(value) if isinstance(value, CONTAINERS) else value


def _metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    position = _position(function)

    @wraps(function)  # keeps the mark by which Jinja passes a context
    def metered_function(*args: Any, **kwargs: Any) -> Any:
        value = args[position]
        if name in _COMPARING_FILTERS and isinstance(value, Iterator):
            value = list(metered(value))
            args = (*args[:position], value, *args[position + 1 :])
        check_arguments(name, value, (*args[position + 1 :], *kwargs.values()))
        if name not in _STRUCTURAL_FILTERS and isinstance(value, CONTAINERS):
            weigh(value)
        result = function(*args, **kwargs)
        charge_result(result)
        return result

    return metered_function


def _metered_test(function: Callable[..., Any]) -> Callable[..., Any]:
    position = _position(function)

    @wraps(function)
    def metered_function(*args: Any) -> Any:
        if len(args) > position + 1:  # a comparison
            for arg in args[position:]:
                weighed(arg)
        return function(*args)

    return metered_function


def _position(function: Callable[..., Any]) -> int:
    """Return the position of the value that a filter or test is applied to: after a context, where
    it takes one."""
    return 1 if hasattr(function, "jinja_pass_arg") else 0


def _raise_exception(message: Any) -> None:
    raise TemplateRuntimeError(_text(message)[:_MAX_REASON_CHARS])


def _bounded_format(strftime_now: Callable[[str], str]) -> Callable[[str], str]:
    def bounded(format: str) -> str:
        if not isinstance(format, str) or len(format) > _MAX_FORMAT_CHARS:
            raise LimitError(
                f"it formats a date by other than a text of at most {_MAX_FORMAT_CHARS} characters"
            )
        return strftime_now(format)

    return bounded


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter escapes characters for HTML."""
    marks = [each for each in (separators or ()) if isinstance(each, str)]
    if any(
        len(mark) > _MAX_SEPARATOR_CHARS
        for mark in (*marks, indent if isinstance(indent, str) else "")
    ):
        raise LimitError(
            f"it writes JSON with separators of more than {_MAX_SEPARATOR_CHARS} characters"
        )
    width = len(indent) if isinstance(indent, str) else int(indent or 0)
    weigh(value, extra_chars=sum(map(len, marks)), indent=width)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@pass_environment
def _join(
    environment: Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    items = value if attribute is None else map(make_attrgetter(environment, attribute), value)
    parts: list[str] = []
    for item in items:
        if parts:
            parts.append(_text(d))
        parts.append(_text(item))
    return _metered_join(parts)


@pass_environment
def _sum(
    environment: Environment,
    iterable: Iterable[Any],
    attribute: str | int | None = None,
    start: Any = 0,
) -> Any:
    """Jinja's own, each addition charged: of lists, each makes a longer one."""
    total = start
    for item in (
        iterable if attribute is None else map(make_attrgetter(environment, attribute), iterable)
    ):
        check_operands("+", total, item)
        total = total + item
        charge_result(total)
    return total
