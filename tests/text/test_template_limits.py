"""A template of a hostile model ends with an error that names the limit, soon and in little memory."""

import resource
import time

import pytest

from jaxserve.text.chat_template import ChatTemplate, ChatTemplateError, ChatTemplateLimitError
from jaxserve.text.template_limits import QUICK_UNITS, quick_rendering

USER = {"role": "user", "content": "hi"}
MAX_S = 20.0
"""Of processor time: far above what any of them takes, far below what they ask for."""
DOUBLED = "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = %s %}{% endfor %}"
SHARED = "{% set a = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9] %}{% for i in range(1) %}{% endfor %}" + "".join(
    f"{{% set a = [{', '.join('a' * 10)}] %}}" for _ in range(12)
)
NESTED = "{% set ns = namespace(x=()) %}{% for i in range(90000) %}{% set ns.x = (ns.x,) %}{% endfor %}"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}%s{% endfor %}" + (
    "{% endfor %}{% endfor %}"
)
BOMBS = {
    "a long string": "{{ 'a' * 10**9 }}",
    "a long string the other way": "{{ 10**9 * 'a' }}",
    "a long list": "{{ [0] * 10**9 }}",
    "a large number": "{{ 10 ** (10 ** 10) }}",
    "a large product": DOUBLED.replace("'ab'", "3").replace("%s", "ns.x * ns.x"),
    "a large range": "{% for i in range(10**9) %}{% endfor %}",
    "nested loops": LOOPS.replace("%s", ""),
    "loops of text": LOOPS.replace("%s", "x" * 1000),
    "loops with a test": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "a loop that calls itself": "{% for x in [[1]] recursive %}{{ loop([x]) }}{{ loop([x]) }}{% endfor %}",
    "a macro that calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a macro that calls itself twice": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "a block that calls itself": "{% block b %}{{ self.b() }}{{ self.b() }}{% endblock %}",
    "a width": "{{ '%1000000000d' % 1 }}",
    "a width that is a value": "{{ '%*d' % (1000000000, 1) }}",
    "a precision": "{{ '%.1000000000f' % 1 }}",
    "a width in format": "{{ '{:1000000000}'.format(1) }}",
    "a nested width in format": "{{ '{:{w}}'.format(1, w=1000000000) }}",
    "a width in format_map": "{{ '{x:1000000000}'.format_map({'x': 1}) }}",
    "the filter format": "{{ '%1000000000d' | format(1) }}",
    "many widths": "{{ ('%9999d' * 100000) | format(1) }}",
    "center": "{{ 'a' | center(10**9) }}",
    "the method center": "{{ 'a'.center(10**9) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "zfill": "{{ 'a'.zfill(10**9) }}",
    "expandtabs": "{{ '\t'.expandtabs(10**9) }}",
    "indent": "{{ 'a\nb' | indent(10**9) }}",
    "indent with a text": "{% set x = 'a' * 100000 %}{{ ('b\n' * 10000) | indent(x) }}",
    "join": "{% set x = 'a' * 100000 %}{{ range(99999) | join(x) }}",
    "the method join": "{% set x = 'a' * 100000 %}{{ x.join(x) }}",
    "join of a generator": "{% set x = 'a' * 1000000 %}{{ range(99999) | map('replace', 0, x) | join }}",
    "replace": "{% set x = 'a' * 1000000 %}{{ x | replace('a', x) }}",
    "the method replace": "{% set x = 'a' * 1000000 %}{{ x.replace('', x) }}",
    "a name of a test that is shared tuples": SHARED.replace("[", "(").replace("]", ")")
    + "{{ [1] | select(a) | list }}",
    "a name of many attributes": "{{ ([{}] * 10000) | map(attribute='a.' * 500000, default=1) | list }}",
    "names of many attributes": "{% set x = 'a.' * 1000000 %}{% for i in range(99999) %}"
    "{% set y = [] | map(attribute=x) | list %}{% endfor %}",
    "batch": "{{ 'a' | batch(10**9, 'b') | list }}",
    "slice": "{{ 'a' | slice(10**9) | list }}",
    "round": "{{ 1.5 | round(10**9, 'floor') }}",
    "tojson's indentation": "{{ [[1]] | tojson(indent=10**9) }}",
    "tojson's separators": "{% set x = 'a' * 100000 %}{{ range(9999) | list | tojson(separators=(x, x)) }}",
    "a sum of lists": "{{ ([[0] * 9999] * 9999) | sum(start=[]) }}",
    "doubled by plus": DOUBLED.replace("%s", "ns.x + ns.x"),
    "doubled by tilde": DOUBLED.replace("%s", "ns.x ~ ns.x"),
    "doubled by join": DOUBLED.replace("%s", "[ns.x, ns.x] | join"),
    "doubled by format": DOUBLED.replace("%s", "'%s%s' % (ns.x, ns.x)"),
    "doubled by a set block": DOUBLED.replace(
        "{% set ns.x = %s %}", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"
    ),
    "doubled as a list": DOUBLED.replace("'ab'", "[1]").replace("%s", "ns.x + ns.x"),
    "a shared list as text": SHARED + "{{ a }}",
    "a shared list as JSON": SHARED + "{{ a | tojson }}",
    "a shared list in a text": SHARED + "{{ 'x' ~ a }}",
    "a shared list by percent": SHARED + "{{ '%s' % a }}",
    "a shared list by percent and name": SHARED + "{{ '%(x)s' % {'x': a} }}",
    "a shared list by format": SHARED + "{{ '{}'.format(a) }}",
    "a shared list compared": SHARED
    + SHARED.replace("set a", "set b").replace(" a", " b").replace("[a", "[b")
    + "{% if a == b %}{% endif %}",
    "a shared list in a test": SHARED + "{{ a is lower }}",
    "a shared list in a namespace": SHARED + "{% set ns = namespace(a=a) %}{{ ns }}",
    "a shared list sorted": SHARED + "{{ [a, a] | sort }}",
    "a shared tuple as a key": SHARED.replace("[", "(").replace("]", ")") + "{{ {a: 1} }}",
    "a deep tuple as a key": NESTED + "{{ {ns.x: 1} }}",
    "a deep tuple as an index": NESTED + "{{ {}[ns.x] }}",
    "a deep tuple looked up": NESTED + "{{ {}.get(ns.x) }}",
    "a deep tuple in a dict": NESTED + "{{ dict([(ns.x, 1)]) }}",
    "a deep tuple made unique": NESTED + "{{ [ns.x] | unique | list }}",
    "a deep tuple as text": NESTED + "{{ ns.x }}",
    "a namespace in itself": "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}",
    "slices": "{% set x = 'a' * 100000 %}{% set ns = namespace(l=[]) %}{% for i in range(99999) %}"
    "{% set ns.l = [ns.l, x[1:]] %}{% endfor %}",
    "a loop over a long text": "{% set x = 'a' * 1000000 %}{% for i in range(99999) %}{{ 'b' in x }}{% endfor %}",
    "a gain of units": "{{ [-10**12] | map('(_step)') | list }}" + LOOPS.replace("%s", ""),
    "a gain of no number of units": "{{ ['x', 1.5, true] | map('(_step)') | list }}",
    "the time": "{{ strftime_now('%Y' * 10**9) }}",
}
REFUSED = {
    "an inner filter": "{{ 1 | _step }}{{ 1 | charge }}",
    "a global": "{{ _state }}{{ charge(-1) }}",
    "lorem ipsum": "{{ lipsum(10**9) }}",
    "bytes": "{{ (5).to_bytes(10**9, 'big') }}",
    "an encoding": "{{ 'a'.encode() }}",
    "a translation": "{{ 'a'.translate({97: 'b' * 9}) }}",
    "a filter of no use": "{{ 'a' | urlize }}",
    "a class": "{{ ''.__class__ }}{{ ''.__class__.__mro__ }}",
    "a class by filter": "{{ (''|attr('__class__')).mro() }}",
    "globals": "{{ raise_exception.__globals__['json'] }}{{ raise_exception.__globals__.x.y }}",
    "a format's attribute": "{{ '{0.__class__.__mro__}'.format(messages).x.y }}",
    "a change of the messages": "{{ messages.append(1) }}",
    "an include": "{% include '/etc/passwd' %}",
    "an import": "{% from '/etc/passwd' import x %}",
    "an extension": "{% extends '/etc/passwd' %}",
}


def rendered(source, **variables):
    return ChatTemplate(source, {}).render([USER], **variables)


def hold(work):
    """Runs `work`; fails if it took long, or much memory."""
    before_s, before_kib = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work()
    assert time.process_time() - before_s < MAX_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 400 << 10


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_ends_with_the_limit(name):
    def work():
        with pytest.raises(ChatTemplateError, match=r"limit|Range too big") as caught:
            rendered(BOMBS[name])
        assert len(str(caught.value)) < 2000

    hold(work)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_business_of_a_template_is_refused(name):
    with pytest.raises(ChatTemplateError) as caught:
        print(rendered(REFUSED[name]))
    assert "root:" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "(" * 5000,
        "[" * 50000,
        "{{" + "(" * 3000 + "1" + ")" * 3000 + "}}",
        "{% if x %}" * 3000 + "{% endif %}" * 3000,
        "{% for x in y %}" * 60 + "{% endfor %}" * 60,
        "{{" + "9" * 5000 + "}}",
        "{{ " + "-" * 9000 + "1 }}",
        "x" * (1 << 18) + "x",
    ],
)
def test_a_source_that_cannot_be_compiled_is_an_error_of_rendering(source):
    source = source if source.startswith(("{", "x")) else "{{ " + source + " }}"
    with pytest.raises(ChatTemplateError, match="chat template is not valid"):
        rendered(source)


def test_a_budget_grows_with_the_messages():
    source = "{% for m in messages %}{% for c in range(60) %}{{ m.content }}{% endfor %}{% endfor %}"
    messages = [{"role": "user", "content": "x" * 1_000_000}]
    assert len(ChatTemplate(source, {}).render(messages)) == 60_000_000
    with pytest.raises(ChatTemplateLimitError, match="units of work"):
        ChatTemplate(source.replace("60", "150"), {}).render(messages)


@pytest.mark.parametrize(
    "has_calls",
    [
        '"tool_calls" in later',
        '"tool_calls" is in later',
        '"tool_calls" is in(seq=later)',
        '(["tool_calls"] | select("in", later) | list)',
        '([{"name": "tool_calls"}] | selectattr("name", "in", later) | list)',
        "(later.tool_calls | default(later)) is sequence",
    ],
)
def test_long_chats_with_calls_are_within_the_limits(has_calls, monkeypatch):
    monkeypatch.setattr("jaxserve.text.template_limits.MAX_SECONDS", 60.0)  # on a slow machine it takes more than 5
    # As gpt-oss' template looks ahead: for every message with calls, whether a later one has none.
    source = """{%- set ns = namespace(text="", last=0) -%}
{%- for message in messages -%}
  {%- set ns.text = ns.text + message.content -%}
  {%- if "tool_calls" in message -%}
    {%- for later in messages[loop.index0 + 1:] -%}
      {%- if not HAS_CALLS and later.role == "assistant" -%}{%- set ns.last = loop.index -%}{%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endfor -%}
{{- ns.text -}}"""
    source = source.replace("HAS_CALLS", has_calls)
    call = {"type": "function", "function": {"name": "look", "arguments": {"where": "x" * 300}}}
    turns = [{"role": "assistant", "content": "a", "tool_calls": [call]}, {"role": "tool", "content": "b" * 100}] * 400
    assert ChatTemplate(source, {}).render(turns, False) == ("a" + "b" * 100) * 400
    text = "{% set ns = namespace(text='') %}{% for m in messages %}{% set ns.text = ns.text + m.content %}{% endfor %}"
    messages = [{"role": "user", "content": "c" * 100}] * 2000
    assert ChatTemplate(text + "{{ ns.text }}", {}).render(messages, False) == "c" * 200_000


def test_a_quick_rendering_has_less():
    source = f"{{% for i in range({QUICK_UNITS // 20}) %}}{{% endfor %}}"
    assert rendered(source) == ""
    with quick_rendering(), pytest.raises(ChatTemplateLimitError, match=f"more than {QUICK_UNITS} units"):
        rendered(source)
    assert rendered(source) == ""


def test_what_templates_do_is_as_in_jinja():
    source = (
        "{% macro m(x, y='d') %}<{{ x }}{{ y }}{{ caller() if caller }}>{% endmacro %}{{ m(1) }}"
        "{% call m(2) %}c{% endcall %}{% for k, v in {'b': 1, 'a': [2, 3]} | dictsort %}{{ k }}{{ v }};{% endfor %}"
        "{% for x in [1, 2, 3] if x != 2 %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% else %}-"
        "{% endfor %}{% set ns = namespace(n=0) %}{% for x in range(3) %}{% set ns.n = ns.n + x %}{% endfor %}"
        "{{ ns.n }}"
        "{{ messages[0].content[::-1] }}{{ messages[1:] }}{{ 'a' ~ 1 ~ none ~ [1] }}{{ '%s-%05.1f' % ('x', 2) }}"
        "{{ '{}:{x:>4}'.format(1, x=2) }}{{ messages | map(attribute='role') | join('+') }}{{ missing }}"
        "{{ [3, 1, 2] | sort | list }}{{ 'a b'.split() | map('upper') | list }}{{ 7 % 4 }}{{ 2 ** 10 }}{{ -3 | abs }}"
        "{{ (1, 2) + (3,) }}{{ 'x' in 'xyz' and 1 < 2 <= 2 }}{{ [1, 1, 2] | unique | list }}"
        "{{ 'ab' | indent(2, true) }}"
        "{{ [{'a': 1}, {'a': 2}] | selectattr('a', 'equalto', 2) | list }}{{ [1, 2] | sum }}"
        "{{ {'k': 1}.items() | list }}"
        "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}{{ 'é<' | tojson }}"
    )
    assert rendered(source) == (
        "<1d><2dc>a[2, 3];b1;1/2,2/23ih[]a1None[1]x-002.01:   2user[1, 2, 3]['A', 'B']310243(1, 2, 3)True[1, 2]  ab"
        "[{'a': 2}]3[('k', 1)]123\"é<\""
    )
