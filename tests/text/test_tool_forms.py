"""What templates do with tools: found out by rendering, then followed."""

from pathlib import Path

import pytest

from jaxserve.testing.tiny import CHATML, write_tiny_model
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.tool_calls import detect_parser
from jaxserve.text.tool_forms import find_tool_forms
from tests.text.test_tokenizer import load

ARGUMENTS = '{"city": "Paris", "days": 2}'
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
MESSAGES = [
    {"role": "user", "content": "How is it?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call00001", "content": "sunny"},
]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
TOOLS = "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
EACH = "{% for m in messages %}{% for c in m.tool_calls or [] %}"
END = "{% endfor %}{{ m.content or '' }}{% endfor %}"
OBJECTS = (
    TOOLS
    + EACH
    + '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    + END
)
TEXTS = (
    TOOLS
    + "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}"
    + "{{ '<call>' + c.function.name + ' ' + c.function.arguments }}{% endfor %}{% else %}{{ m.content }}{% endif %}"
    + "{% endfor %}"
)
STRICT_IDS = (
    TOOLS
    + EACH
    + "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}[TOOL_CALLS]{{ c.function | tojson }}"
    + END
)
XML = (
    EACH
    + "<function={{ c.function.name }}>{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}"
    + END
)


@pytest.mark.parametrize(
    ("source", "tools", "calls", "as_text", "no_content", "written"),
    [
        (OBJECTS, True, True, False, "", '<tool_call>{"name": "weather", "arguments": {"city": "Paris", "days": 2}}'),
        (TEXTS, True, True, True, None, "<call>weather " + ARGUMENTS),
        (STRICT_IDS, True, True, False, "", '[TOOL_CALLS]{"name": "weather", "arguments": ' + ARGUMENTS + "}"),
        (XML, False, True, False, "", "<function=weather>city=Paris;days=2;"),
        (EACH + "{{ c.function.name }}{{ c.function.arguments }}" + END, False, True, True, "", "weather" + ARGUMENTS),
    ],
)
def test_calls_are_given_as_the_template_wants_them(source, tools, calls, as_text, no_content, written):
    template = ChatTemplate(source, {})
    forms = find_tool_forms(template)
    assert (forms.writes_tools, forms.writes_calls) == (tools, calls)
    assert (forms.arguments_are_text, forms.no_content) == (as_text, no_content)
    text = template.render(forms.fit(MESSAGES), tools=[TOOL])
    assert written in text and text.endswith("sunny")


@pytest.mark.parametrize("source", [CHATML, "plain", "{% if %}", "{{ raise_exception('no') }}"])
def test_a_template_without_tools_is_seen_to_be_one(source):
    forms = find_tool_forms(ChatTemplate(source, {}))
    assert (forms.writes_tools, forms.writes_calls) == (False, False)


def test_what_a_message_says_beside_its_calls_is_kept():
    forms = find_tool_forms(ChatTemplate(TEXTS, {}))
    (message,) = forms.fit([MESSAGES[1] | {"content": "Let me look."}])
    assert message["content"] == "Let me look."


def test_the_tokenizer_renders_calls_with_the_template_for_tools(tmp_path):
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": OBJECTS}]
    tokenizer = load(write_tiny_model(tmp_path / "m", chat_template=named))
    assert tokenizer.tool_forms.writes_tools and "<tool_call>" in tokenizer.tool_forms.source
    assert '"arguments": {"city": "Paris", "days": 2}' in tokenizer.render_chat(MESSAGES)
    assert "<|im_start|>" in tokenizer.render_chat(MESSAGES[:1])
    assert MESSAGES[1]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS, "what was given is not changed"


def test_without_a_template_nothing_is_known(tmp_path):
    assert load(write_tiny_model(tmp_path / "m", chat_template=None)).tool_forms is None


def test_the_template_that_comes_with_the_project_writes_tools_calls_and_results():
    source = (Path(__file__).parents[2] / "configs/chat_templates/chatml_tools.jinja").read_text()
    template = ChatTemplate(source, {})
    forms = find_tool_forms(template)
    assert (forms.writes_tools, forms.writes_calls, detect_parser(source)) == (True, True, "hermes")
    text = template.render(forms.fit(MESSAGES), tools=[TOOL])
    assert text == (
        "<|im_start|>system\nYou are a helpful assistant.\n\nYou may call these functions:\n<tools>\n"
        '{"name": "weather", "parameters": {"type": "object", "properties": {}}}\n</tools>\n'
        "To call one, answer with its name and arguments as JSON between tags:\n"
        '<tool_call>\n{"name": "function", "arguments": {"key": "value"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nHow is it?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n'
        "</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    plain = template.render([{"role": "system", "content": "Be brief."}, MESSAGES[0]], False)
    assert plain == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHow is it?<|im_end|>\n"
