"""Every parser: what it reads, what it leaves as content, and that a cut text gives the same."""

import itertools
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.text.tool_calls import PARSERS, ToolCall, detect_parser, is_json_object

TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "metric": {"type": "boolean"},
            "tags": {"type": "array"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "size": {"type": ["number", "string"]},
        },
    },
    "now": {"type": "object", "properties": {}},
}
PARIS = '{"city": "Paris"}'
ODD = '{ "city":"a } ] \\" </tool_call> \\u00e9 é", "tags": [1, {"x": [-0.5e3, true, null]}] }'
CALL, ODD_CALL, NOW = ToolCall("get_weather", PARIS), ToolCall("get_weather", ODD), ToolCall("now", "{}")


def hermes(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def deepseek(name, arguments):
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


READ = [
    ("hermes", hermes("get_weather", PARIS), [CALL]),
    ("hermes", f"I look.\n{hermes('get_weather', PARIS)}\n{hermes('now', '{}')}\n", ["I look.", CALL, NOW]),
    ("hermes", hermes("get_weather", ODD), [ODD_CALL]),
    ("hermes", f"a {hermes('now', '{}')} b ", ["a", NOW, "  b"]),
    ("hermes", f"\n\n{hermes('now', 'null')}", ["\n\n", NOW][1:]),
    ("hermes", f'<tool_call>{{"arguments": {PARIS}, "name": "get_weather"}}', [CALL]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', [NOW]),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>', [CALL]),
    ("hermes", f"<tool_call>{{oops {hermes('now', '{}')}", ["<tool_call>{oops", NOW]),
    ("granite", f'<|tool_call|>[{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "now"}}]', [CALL, NOW]),
    ("granite", f'<|tool_call|>[{{"name": "get_weather", "arguments": {ODD}}}]<|/tool_call|>', [ODD_CALL]),
    ("granite", 'ok <tool_call>[{"name": "now", "arguments": {}}]', ["ok", NOW]),
    ("llama3_json", f'{{"name": "get_weather", "parameters": {PARIS}}}', [CALL]),
    ("llama3_json", f'\n{{"name": "get_weather", "parameters": {ODD}}}; {{"name": "now"}}', [ODD_CALL, NOW]),
    ("llama3_json", f'<|python_tag|>{{"name": "get_weather", "parameters": {PARIS}}} done', [CALL, "done"]),
    ("mistral", f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "now"}}]', [CALL, NOW]),
    ("mistral", f"Hm[TOOL_CALLS]get_weather{ODD}[TOOL_CALLS]now{{}}", ["Hm", ODD_CALL, NOW]),
    ("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]123456789[ARGS]{PARIS}", [CALL]),
    ("deepseek_v3", f"a<｜tool▁calls▁begin｜>{deepseek('get_weather', PARIS)}<｜tool▁calls▁end｜>", ["a", CALL]),
    (
        "deepseek_v3",
        f"<｜tool▁calls▁begin｜>{deepseek('get_weather', ODD)}\n{deepseek('now', '{}')}<｜tool▁calls▁end｜>",
        [ODD_CALL, NOW],
    ),
    (
        "deepseek_v3",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{PARIS}<｜tool▁call▁end｜>",
        [CALL],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        [CALL],
    ),
    ("qwen3_coder", "Now:\n<function=now></function>", ["Now:", NOW]),
    ("pythonic", '[get_weather(city="Paris"), now()]', [CALL, NOW]),
    ("pythonic", "<|python_start|>[now()]<|python_end|>", [NOW]),
    (
        "pythonic",
        "[get_weather(city='a) ] \\'é', days=-3, metric=true, tags=[1, {'x': (None,)}])]",
        [ToolCall("get_weather", '{"city": "a) ] \'é", "days": -3, "metric": true, "tags": [1, {"x": [null]}]}')],
    ),
]

LEFT = [
    ("hermes", "no call"),
    ("hermes", " spaces \n"),
    ("hermes", "<tool_call>"),
    ("hermes", hermes("get_weather", '{"city": }')),
    ("hermes", hermes("get_weather", '{"city": "a\nb"}')),
    ("hermes", hermes("get_weather", "[1]")),
    ("hermes", hermes("get_weather", '"no object"')),
    ("hermes", hermes("get_weather", '"{\\"cut"')),
    ("hermes", hermes("unknown", "{}")),
    ("hermes", "<tool_call>[]</tool_call>"),
    ("hermes", '<tool_call>{"name": 5}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now"} and more</tool_call>'),
    ("hermes", hermes("get_weather", PARIS)[:-25]),
    ("hermes", '<tool_call>{"name": "now", "arguments": ' + '{"a":' * 200 + "1" + "}" * 200 + "}</tool_call>"),
    ("hermes", '<tool_call>{"name": "\\ud800"}</tool_call>'),
    ("granite", '<|tool_call|>[{"name": "now"}, {"name": "unknown"}]'),
    ("granite", "<|tool_call|>[]"),
    ("llama3_json", '{"name": "unknown", "parameters": {}}'),
    ("llama3_json", '{"answer": 5}'),
    ("llama3_json", 'As in {"name": "now", "parameters": {}}'),
    ("llama3_json", '<|python_tag|>brave_search.call(query="x")'),
    ("mistral", "[TOOL_CALLS]get_weather[ARGS]{"),
    ("mistral", "[TOOL_CALLS]unknown{}"),
    ("mistral", "[TOOL_CALLS]now 5"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>" + deepseek("now", "[]")),
    ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis"),
    ("qwen3_coder", "<function=unknown></function>"),
    ("qwen3_coder", '<tool_call>{"name": "now"}</tool_call>'),
    ("pythonic", "[1] is a citation"),
    ("pythonic", "[now() for _ in x]"),
    ("pythonic", "[now(), 5]"),
    ("pythonic", "[get_weather('Paris')]"),
    ("pythonic", "[get_weather(**{})]"),
    ("pythonic", "[get_weather(days=1e999)]"),
    ("pythonic", "[get_weather(city='\\ud800')]"),
    ("pythonic", "[get_weather(days=" + "9" * 5000 + ")]"),
    ("pythonic", "[get_weather(tags=" + "[" * 100 + "]" * 100 + ")]"),
    ("pythonic", "[get_weather(city=open('x'))]"),
    ("pythonic", "[get_weather(tags={1: 2})]"),
    ("pythonic", "[get_weather(city='a', city='b')]"),
    ("pythonic", "[now()"),
]


def parse(name, pieces):
    """Contents joined where they touch, and calls."""
    parser = PARSERS[name](TOOLS)
    found = []
    for part in [*(part for piece in pieces for part in parser.feed(piece)), *parser.finish()]:
        assert part != "", "an empty content"
        if isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] += part
        else:
            found.append(part)
    return found


def cut(text, places):
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize(("name", "text", "want"), READ)
def test_calls_are_read(name, text, want):
    assert parse(name, [text]) == want
    assert all(is_json_object(part.arguments) for part in want if isinstance(part, ToolCall))


@pytest.mark.parametrize(("name", "text"), LEFT)
def test_what_is_no_call_stays_content(name, text):
    assert parse(name, [text]) == [text]


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, text, *_ in READ + LEFT])
def test_one_character_at_a_time_gives_the_same(name, text):
    assert parse(name, text) == parse(name, [text])


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=150)
@given(data=st.data())
def test_every_cut_of_every_mixture_gives_the_same(name, data):
    texts = [text for other, text, *_ in READ + LEFT if other == name and len(text) < 400]
    words = st.sampled_from([*texts, *PARSERS[name].SPECIAL_TOKENS, *'{}"\\[](), \nx'])
    beginnings = st.tuples(words, st.integers(0, 60)).map(lambda pair: pair[0][: pair[1]])
    pieces = data.draw(st.lists(words | beginnings, max_size=5))
    text = "".join(pieces)
    whole = parse(name, [text])
    assert parse(name, cut(text, data.draw(st.lists(st.integers(0, 2000), max_size=12)))) == whole
    if not any(isinstance(part, ToolCall) for part in whole):
        assert "".join(whole) == text


@pytest.mark.parametrize("name", PARSERS)
def test_content_before_a_call_is_not_kept_waiting(name):
    parser = PARSERS[name](TOOLS)
    assert "".join(parser.feed("Hello wor")) == "Hello wor"


def test_a_malformed_call_is_content_from_the_character_that_breaks_it():
    parser = PARSERS["hermes"](TOOLS)
    assert parser.feed('<tool_call>{"name": ') == []
    assert "".join(parser.feed("oops, ")) == '<tool_call>{"name": oops,'
    assert parser.feed("and on") == [" and on"]


def test_a_call_is_given_out_when_its_text_ends():
    parser = PARSERS["hermes"](TOOLS)
    text = hermes("now", "{}")
    assert parser.feed(text[:-1]) == [] and parser.feed(text[-1]) == [NOW]


def test_a_value_becomes_what_its_schema_says():
    values = {"city": "5", "days": "5", "metric": "True", "tags": '["a", 1]', "note": "null", "size": "big"}
    tags = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    (call,) = parse("qwen3_coder", [f"<tool_call>\n<function=get_weather>\n{tags}</function>\n</tool_call>"])
    want = {"city": "5", "days": 5, "metric": True, "tags": ["a", 1], "note": None, "size": "big"}
    assert json.loads(call.arguments) == want
    odd = {"city": " a\n\nb ", "days": "many", "tags": "[" * 5000, "unknown": "1", "size": "NaN"}
    tags = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in odd.items())
    (call,) = parse("qwen3_coder", [f"<tool_call>\n<function=get_weather>\n{tags}</function>\n</tool_call>"])
    assert json.loads(call.arguments) == odd


def test_a_schema_of_any_shape_is_read():
    for schema in ({"anyOf": 5}, {"oneOf": [3, None]}, {"type": 5}, {"type": [None, 7]}, 4):
        parser = PARSERS["qwen3_coder"]({"f": {"properties": {"a": schema}}})
        (call,) = [*parser.feed("<function=f><parameter=a>1</parameter></function>"), *parser.finish()]
        assert json.loads(call.arguments) == {"a": "1"}


@pytest.mark.parametrize("name", PARSERS)
def test_many_beginnings_of_calls_are_content_and_quickly_seen_to_be(name):
    parser_class = PARSERS[name]
    for mark in (*parser_class.MARKS, *parser_class.FIRST):
        for filling in ("", "get_weather><parameter=a>", '{"x":', "[", '{"name":"now","arguments":{"a":"', "\n"):
            text = (mark + filling) * (60_000 // len(mark + filling))
            parser = parser_class(TOOLS)
            begun = time.process_time()
            assert "".join([*parser.feed(text), *parser.finish()]) == text
            assert time.process_time() - begun < 10, "seconds for 60000 characters"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("<tool_call>\n<function=example_function_name>", "qwen3_coder"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("'<|python_tag|>'", "llama3_json"),
        ("<|tool_call|>", "granite"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
        ("<tool_call>f<arg_key>a</arg_key>", None),
        ("<seed:tool_call><function=f>", None),
        ("{{ message.content }}", None),
    ],
)
def test_the_template_tells_the_parser(template, name):
    assert detect_parser(template) == name


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
LISTS = st.lists(PLAIN, max_size=3)
VALUES = (
    PLAIN
    | LISTS
    | st.dictionaries(st.text(), PLAIN | LISTS | st.dictionaries(st.text(), LISTS, max_size=2), max_size=3)
)


@given(VALUES)
def test_json_objects_are_those_that_json_knows(value):
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
        assert is_json_object(text) == isinstance(value, dict)
        assert not is_json_object(text[:-1])


def test_json_objects_of_a_megabyte_are_quickly_known_and_deep_ones_refused():
    begun = time.process_time()
    assert is_json_object('{"a": [' + "0," * 500_000 + "0]}")
    assert time.process_time() - begun < 1
    assert is_json_object('{"a":' + "[" * 63 + "]" * 63 + "}")
    assert not is_json_object('{"a":' + "[" * 64 + "]" * 64 + "}")
    assert not is_json_object("[" * 100_000) and not is_json_object('{"a": NaN}')
