"""Targets: text on its way to and from a model."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import orjson

from jaxserve.server.errors import ApiError
from jaxserve.server.messages import ChatEnd, chat_end, normalize_messages
from jaxserve.server.responses_input import read_input
from jaxserve.server.responses_schema import ResponsesRequest
from jaxserve.server.schema import ChatRequest, CompletionRequest
from jaxserve.server.service import RESERVED_TEMPLATE_NAMES
from jaxserve.server.tools import parse_tools
from jaxserve.testing.tiny import CHATML
from jaxserve.text.chat_template import ChatTemplate, ChatTemplateError
from jaxserve.text.detokenizer import IncrementalDetokenizer
from jaxserve.text.stop_checker import StopChecker
from tools.fuzz.taker import Taker, json_text
from tools.fuzz.target import Target

_TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
_CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
CHATS: list[Any] = [
    {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0.5, "stop": ["a"]},
    {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be short"}]},
            {"role": "user", "content": "Weather?", "name": "ann"},
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "18"},
        ],
        "tools": [_TOOL],
        "tool_choice": "auto",
        "chat_template_kwargs": {"enable_thinking": False, "date": "today"},
        "logprobs": True,
        "top_logprobs": 3,
    },
    {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The"}],
        "continue_final_message": True,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
        "logit_bias": {"5": 1.5},
        "stream": True,
        "stream_options": {"include_usage": True},
    },
]
COMPLETIONS: list[Any] = [
    {"prompt": "The sea", "n": 2, "logprobs": 1, "echo": True, "seed": 1, "stop_token_ids": [3], "bad_words": ["a"]},
    {"prompt": [[1, 2], [3]], "truncate_prompt_tokens": -1, "priority": "high", "deadline_s": 5, "logit_bias": {}},
    {"prompt": "a", "guided_choice": ["a", "b"], "structured_outputs": {"regex": "a+"}, "tenant": "t", "min_p": 0.1},
]
RESPONSES: list[Any] = [
    {"input": "hi", "instructions": "Be short", "max_output_tokens": 8, "text": {"format": {"type": "text"}}},
    {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "18"},
        ],
        "tools": [{"type": "function", "name": "weather", "parameters": {"type": "object"}}],
        "tool_choice": {"type": "function", "name": "weather"},
    },
]


@functools.cache
def _templates() -> tuple[ChatTemplate, ...]:
    tools = Path(__file__).parents[2] / "configs" / "chat_templates" / "chatml_tools.jinja"
    sources = (
        CHATML,
        tools.read_text(),
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for m in messages %}{{ m.content | trim }}{{ strftime_now(date or '%d') }}{% endfor %}",
        "{{ bos_token }}{% for m in messages %}{{ m['content'].split('a')[-1] }}{{ m | tojson }}{% endfor %}"
        "{{ tools }}",
    )
    return tuple(ChatTemplate(source, {"bos_token": "<s>"}) for source in sources)


def _parsed(data: bytes) -> dict[str, Any]:
    value = orjson.loads(data)
    if not isinstance(value, dict):
        raise ApiError("invalid", "not an object")
    return value


def _chat(data: bytes) -> None:
    taker = Taker(data)
    template = taker.of(_templates())
    spec = ChatRequest.parse(_parsed(json_text(taker.rest(), CHATS)))
    messages = normalize_messages(spec.messages)
    end = chat_end(messages, spec.add_generation_prompt, spec.continue_final_message)
    tools = parse_tools(spec.tools, spec.tool_choice, spec.parallel_tool_calls)
    spec.terms({})
    spec.sampling_params()
    variables = {k: v for k, v in (spec.chat_template_kwargs or {}).items() if k not in RESERVED_TEMPLATE_NAMES}
    described = None if tools is None else tools.tools
    if end is ChatEnd.CONTENT:
        text = template.render_open(messages, described, **variables)
    else:
        text = template.render(messages, end is ChatEnd.GENERATION_PROMPT, described, **variables)
    assert isinstance(text, str)


def _completion(data: bytes) -> None:
    spec = CompletionRequest.parse(_parsed(json_text(data, COMPLETIONS)))
    prompts = spec.prompts(128)
    assert prompts
    spec.terms({})
    spec.sampling_params()
    spec.kept_tokens(128)


def _responses(data: bytes) -> None:
    spec = ResponsesRequest.parse(_parsed(json_text(data, RESPONSES)))
    messages = read_input(spec.input, spec.instructions)
    assert all(isinstance(each["content"], str) for each in messages)
    spec.terms({})
    spec.sampling_params()
    parse_tools(spec.tools, spec.tool_choice, spec.parallel_tool_calls, flat=True)


class _Vocabulary:
    """Tokens of the fuzzer's own bytes; the last one is special."""

    def __init__(self, tokens: list[bytes], strips: bool) -> None:
        self.tokens = tokens
        self.special_ids = frozenset([len(tokens) - 1])
        self.strips_first_space = strips

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id]

    def decode(self, ids: list[int], hides: bool) -> str:
        data = b"".join(self.tokens[i] for i in ids if not (hides and i in self.special_ids))
        return (data.removeprefix(b" ") if self.strips_first_space else data).decode("utf-8", "replace")


_PIECES = (
    b"a",
    b" ",
    b"\xf0\x9f\x98\x80",
    b"\xf0\x9f",
    b"\x98",
    b"\x80",
    b"\xe4\xb8",
    b"\xad",
    b"\xff",
    b"\xed\xa0",
    b"",
)


def _detokenizer(data: bytes) -> None:
    taker = Taker(data)
    tokens = [taker.some(taker.below(4)) if taker.below(2) else taker.of(_PIECES) for _ in range(1 + taker.below(12))]
    vocabulary = _Vocabulary([*tokens, b"<s>"], taker.below(2) == 1)
    hides = taker.below(2) == 1
    prompt = [taker.below(len(vocabulary.tokens)) for _ in range(taker.below(6))]
    output = [taker.below(len(vocabulary.tokens)) for _ in range(taker.below(40))]
    detokenizer = IncrementalDetokenizer(vocabulary, prompt, hides)
    deltas = [*(detokenizer.add(token) for token in output), detokenizer.flush()]
    joined = "".join(deltas)
    joined.encode()  # no half of a surrogate pair
    whole, before = vocabulary.decode(prompt + output, hides), vocabulary.decode(prompt, hides)
    # What the prompt showed of an unfinished character is U+FFFD, which the output's first bytes may complete.
    common = before if whole.startswith(before) else before.removesuffix("\ufffd")
    assert whole.startswith(common), (prompt, output)
    assert joined == whole[len(common) :], (vocabulary.tokens, prompt, output, joined, whole)


def _stop_checker(data: bytes) -> None:
    taker = Taker(data)
    letters = "ab\ud83d😀"
    stop = tuple("".join(taker.of(letters) for _ in range(taker.below(6))) for _ in range(taker.below(5)))
    include = taker.below(2) == 1
    checker = StopChecker(stop, include)
    text, shown = "", ""
    while taker.left and checker.stopped is None and len(text) < 400:
        piece = "".join(taker.of(letters) for _ in range(taker.below(5)))
        text += piece
        delta, _ = checker.feed(piece)
        shown += delta
        assert checker.num_held < max(map(len, stop), default=1), "more is held back than a stop string has"
    if checker.stopped is None:
        shown += checker.flush()
    # The first to be complete; of those complete at one character, the longest.
    ends = [(text.find(each) + len(each), -len(each), each) for each in stop if each in text]
    if not ends:
        assert checker.stopped is None and shown == text
        return
    end, _, first = min(ends)
    assert checker.stopped == first
    assert shown == text[: end if include else end - len(first)]


_REFUSALS = (ApiError, ValueError)
TARGETS = (
    Target("chat", _chat, (*_REFUSALS, ChatTemplateError)),
    Target("completion", _completion, _REFUSALS),
    Target("responses", _responses, _REFUSALS),
    Target("detokenizer", _detokenizer, ()),
    Target("stop_checker", _stop_checker, (ValueError,)),
)
