"""A bad template is stopped: it reaches no Python internals, does not run without end,
and makes no huge strings."""

from __future__ import annotations

import resource
import time

import pytest
from timing import timed

from quire.errors import ConfigError, QuireError, RequestError
from quire.text.chat import ChatTemplate, RenderLimits

MESSAGES = [{"role": "user", "content": "hello"}]

REACHING = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''['__class__'] }}",
    "{{ messages|attr('__class__') }}",
    "{{ messages[0].content.__class__.__base__.__subclasses__() }}",
    "{{ messages[0].content._spans.x }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ raise_exception.__globals__['json'] }}",
    "{{ strftime_now.__closure__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "{{ messages|map(attribute='__class__')|list|first.__name__ }}",
    "{{ messages|join(',', attribute='__class__.__name__') }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ messages[0].__setitem__('a', 1) }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ lipsum.__globals__ }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends 'x' %}",
]


@pytest.mark.parametrize("source", REACHING)
def test_templates_reach_no_internals(source: str) -> None:
    try:
        text = ChatTemplate(source).render(MESSAGES)
    except QuireError as error:
        assert "0x" not in str(error) and "/" not in str(error).replace("/etc/passwd", "")
        assert not isinstance(error, RequestError) or error.__cause__ is None
    else:
        assert text == "", "an unsafe attribute may be undefined, and then shows nothing"


SPINNING = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "{% for i in [[1, 1], [1, 1]] recursive %}{{ loop([i, i]) }}{% endfor %}",
    "{% for i in range(10**9) %}{% endfor %}",
    "{{ 9 ** 99999999 }}",
    (
        "{% set ns = namespace(n=7) %}{% for i in range(999) %}{% set ns.n = ns.n * ns.n %}{% "
        "endfor %}"
    ),
    "{{ 1.5|round(10**9) }}",
    "{{ ('1' * 1000000)|int }}",
    "{{ ('f' * 1000000)|int(base=16) }}",
    "{{ ('1' * 1000000)|float }}",
    "{{ (['x'] * 99999)|map('list')|sum(start=[]) }}",
]

# A list that holds another twice, which holds a third twice, ...: comparing, hashing or writing it
# takes exponential time.
NEST = (
    "{% set ns = namespace(a=(1,), b=(1,)) %}"
    "{% for i in range(60) %}{% set ns.a = (ns.a, ns.a) %}{% set ns.b = (ns.b, ns.b) %}{% endfor %}"
)
MANY = "{% set ns = namespace(s=[]) %}{% set x = [1] * 1000000 %}{% for i in range(9999) %}"
SPINNING += [
    NEST + use
    for use in (
        "{{ ns.a == ns.b }}",
        "{{ ns.a < ns.b }}",
        "{{ ns.a in [ns.b] }}",
        "{{ ns.a is eq(ns.b) }}",
        "{{ [ns.a]|select('eq', ns.b)|list }}",
        "{{ [ns.a, ns.b]|sort }}",
        "{{ [ns.a, ns.b]|map('list')|max }}",
        "{{ [ns.a, ns.b]|unique|list }}",
        "{{ [ns.b].index(ns.a) }}",
        "{{ ns.b.count(ns.a) }}",
        "{{ {ns.a: 1} }}",
        "{{ messages[0][ns.a] }}",
        "{{ messages[0].get(ns.a) }}",
        "{% for i in [1, 2] %}{{ loop.changed(ns.a) }}{% endfor %}",
        "{{ '%s' % (ns.a,) }}",
        "{{ '%s'|format(ns.a) }}",
        "{{ '{}'.format(ns.a) }}",
        "{{ '{x}'.format_map({'x': ns.a}) }}",
        "{{ ns.a ~ 'x' }}",
        "{{ ns }}",
        "{{ {'a': ns.a}.items() }}",
        "{{ {'a': ns.a}.values()|string }}",
        "{{ ns.a|tojson }}",
        "{{ raise_exception(ns.a) }}",
    )
]

SWELLING = [
    (
        "{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% "
        "endfor %}"
    ),
    MANY + "{% set ns.s = ns.s + [x[:]] %}{% endfor %}",
    MANY + "{% set ns.s = ns.s + [x|list] %}{% endfor %}",
    "{{ strftime_now('%Y' * 1000000) }}",
    "{{ strftime_now('%999999999d' * 100) }}",
    "{{ ('\\n' * 100000)|indent('x' * 100000) }}",
    "{% set a = 'x' * 1000000 %}{{ a|replace(new=a, old='x') }}",
    "{% set a = '1' * 1000000 %}{{ a|replace(1, a) }}",
    "{% set a = 'x' * 1000000 %}{{ a.translate({120: a}) }}",
    "{% set a = ('x' * 1000000).encode() %}{{ a.replace('x'.encode(), a) }}",
    "{{ (1).to_bytes(10**10) }}",
    "{{ '{:>999999}' * 1000 }}{{ ('{:>999999}' * 1000).format(*range(1000)) }}",
    "{{ ('%999999s' * 1000) % range(1000)|list }}",
    "{% set a = 'x' * 1000000 %}{{ ('%(a)s' * 1000) % {'a': a} }}",
    "{% set a = 'x' * 1000000 %}{{ ('{0[a]}' * 1000).format({'a': a}) }}",
    "{% set a = 'x' * 1000000 %}{{ a.join(range(99999)|map('string')) }}",
    (
        "{% set a = 'x' * 1000000 %}{{ a.join(dict.fromkeys('abcdefgh' * 9)) }}{{ a.join({'a': "
        "1, 'b': 1}.keys()) * 9 }}"
    ),
    "{{ ([1] * 100000)|tojson(indent='x' * 1000000) }}",
    "{{ ([1] * 100000)|tojson(separators=('x' * 1000000, 'y')) }}",
    "{% set ns = namespace(s=[1] * 100000) %}{% for i in range(500) %}{% set ns.s = [ns.s] "
    "%}{% endfor %}"
    "{{ ns.s|tojson(indent=64) }}",
    (
        "{% set ns = namespace(s='xx') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% "
        "endfor %}"
    ),
    (
        "{% set ns = namespace(s='xx') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% "
        "endfor %}"
    ),
    "{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = ns.s * 99 %}{% endfor %}",
    "{{ 'x' * 10**10 }}",
    "{{ ['x'] * 10**10 }}",
    "{{ 'x'|center(10**10) }}",
    "{{ 'x'.ljust(10**10) }}",
    "{{ '%010000000000d' % 1 }}",
    "{{ '%*d' % (10**10, 1) }}",
    "{{ '%-*d' % (10**10, 1) }}",
    "{{ '{:10000000000}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=10**10) }}",
    "{{ 'x%9999999999s'|format('y') }}",
    "{{ messages|tojson(indent=10**7) }}",
    "{{ ('\\n' * 9999)|indent(10**6) }}",
    "{% set a = 'x' * 1000000 %}{{ a.replace('x', a) }}",
    "{% set a = 'x' * 1000000 %}{{ a|replace('x', a) }}",
    "{% set a = 'x' * 1000000 %}{{ a.join([a] * 1000) }}",
    "{% set a = 'x' * 1000000 %}{{ ([a] * 1000)|join }}",
    "{% set a = ['x' * 1000] * 1000 %}{{ ([a] * 1000)|tojson }}",
    "{% set a = ['x' * 1000] * 1000 %}{{ [a] * 1000 }}",
    "{% set a = ['x' * 1000] * 1000 %}{{ ([a] * 1000)|string|length }}",
    "{% set a = ['x' * 1000] * 1000 %}{{ 'a' ~ ([a] * 1000) }}",
    "{{ ('\\t' * 100000).expandtabs(100000) }}",
    "{% set a = 'x' * 100000 %}{% for i in range(99999) %}{{ a }}{% endfor %}",
    (
        "{% macro f() %}{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}{% endmacro %}{{ "
        "f()|length }}"
    ),
    "{% set a %}{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}{% endset %}",
]


@pytest.mark.slow_except("{{*", "{% s*", "{% for*", "source13", "source16")
@timed
@pytest.mark.parametrize("source", SPINNING + SWELLING)
def test_templates_are_stopped_in_time_and_space(source: str) -> None:
    start, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    template = ChatTemplate(source, limits=RenderLimits(max_steps=200_000))
    with pytest.raises(RequestError, match="chat template"):
        template.render(MESSAGES)
    assert time.process_time() - start < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 256 << 10, "KiB"


@pytest.mark.parametrize("name", ["wordwrap", "striptags", "random", "pprint"])
def test_filters_of_no_use_to_chats_are_absent(name: str) -> None:
    with pytest.raises(ConfigError, match=f"No filter named '{name}'"):
        ChatTemplate("{{ messages|" + name + " }}")


def test_reasons_are_short() -> None:
    for source in ("{{ raise_exception('x' * 1000000) }}", "{{ messages['x' * 1000000].y }}"):
        with pytest.raises(RequestError) as refusal:
            ChatTemplate(source).render(MESSAGES)
        assert len(str(refusal.value)) < 1000


def test_ordinary_comparisons_slices_sums_and_dates_are_unchanged() -> None:
    source = """
    {%- set x = [3, 1, 2] -%}{{ x[1:]|sum }} {{ [[1], [2]]|sum(start=[]) }} {{ x|sort|join(',') }} {{ x|max }}
    {{- 1 < 2 < 3 }} {{ 'a' in 'abc' }} {{ {'a': 1, 'b': [2]} }} {{ messages[0]['role'] == 'user' }} {{ x is contains_all }}
    """.replace(
        " {{ x is contains_all }}",
        "{{ 2 is eq(2) }} {{ 2.345|round(2) }} {{ '12'|int + 1 }} {{ strftime_now('%Y') }}",
    )
    from datetime import UTC, datetime

    template = ChatTemplate(source, now=lambda: datetime(2026, 1, 2, tzinfo=UTC))
    assert template.render(MESSAGES).split() == (
        "3 [1, 2] 1,2,3 3True True {'a': 1, 'b': [2]} TrueTrue 2.35 13 2026".replace(
            "2.35", str(round(2.345, 2))
        ).split()
    )


@pytest.mark.slow
@timed
def test_the_default_limits_end_an_endless_loop() -> None:
    start = time.process_time()
    with pytest.raises(RequestError, match="stopped: it takes too"):
        ChatTemplate(SPINNING[0]).render(MESSAGES)
    assert time.process_time() - start < 15


@timed
def test_the_time_limit_holds() -> None:
    template = ChatTemplate(SPINNING[0], limits=RenderLimits(max_steps=10**12, max_render_s=0.05))
    with pytest.raises(RequestError, match="takes too long"):
        template.render(MESSAGES)


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ 1 +", "{% generation %}", "{{" + "(" * 5000 + ")" * 5000 + "}}"]
)
def test_what_is_no_template_is_refused(source: str) -> None:
    with pytest.raises(ConfigError, match="chat template"):
        ChatTemplate(source)


def test_the_dialect_of_hugging_face_templates() -> None:
    source = """
    {%- for m in messages -%}
        {%- if loop.index0 == 1 -%}{%- continue -%}{%- endif -%}
        {%- generation -%}{{ m|tojson }}{%- endgeneration -%}
        {{- loop.length ~ loop.last -}}
    {%- endfor %}
    {% if true %}
x
    {% endif %}
"""
    text = ChatTemplate(source).render([{"role": "user", "content": "é<b>"}])
    assert text == '{"role": "user", "content": "é<b>"}1Truex\n'


def test_large_numbers_in_messages_are_ordinary_values() -> None:
    source = (
        "{{ m|tojson }} {{ m|string }} {{ '{}'.format(m) }} {{ '%d' % m }} {{ [m]|join }} {{ m "
        "// 2 }} {{ m + 1 }}"
    )
    text = ChatTemplate("{% set m = messages[0].at %}" + source).render(
        [{"role": "user", "at": 1_700_000_000_000}]
    )
    assert text == " ".join(["1700000000000"] * 5 + ["850000000000", "1700000000001"])


def test_formats_with_colons_and_percents_are_ordinary() -> None:
    source = (
        "{{ 'User: {} {:>4}|100%'.format(messages[0].role, 'x') }} {{ '%5.1f%%: {%s}' % (2.5, "
        "'y') }}"
    )
    assert ChatTemplate(source).render(MESSAGES) == "User: user    x|100%   2.5%: {y}"
