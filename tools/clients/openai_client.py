"""The `openai` package against a running server: every route it has for text, with what came back.

Usage: python tools/clients/openai_client.py http://127.0.0.1:8000/v1
Needs `openai`, and a model whose chat template writes tools. Exits with 1 at the first answer that is not as it must
be.
"""

from __future__ import annotations

import json
import sys

from openai import OpenAI

QUESTION = "What is the capital of France?"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "description": "The weather in a city now", "parameters": SCHEMA}
ASK = {"role": "user", "content": "How warm is it in Paris? Use celsius."}


def main(url: str) -> None:
    """Runs all checks in turn."""
    with OpenAI(base_url=url, api_key="none", max_retries=0) as api:
        model = api.models.list().data[0].id
        show("models.list", model)
        completions(api, model)
        chat(api, model)
        tools(api, model)
        responses(api, model)


def completions(api: OpenAI, model: str) -> None:
    """Text completion, whole and streamed."""
    settings = {"model": model, "prompt": "The sea is", "max_tokens": 12, "temperature": 0}
    whole = api.completions.create(**settings).choices[0].text
    show("completions.create", whole)
    streamed = "".join(chunk.choices[0].text for chunk in api.completions.create(**settings, stream=True))
    same("completions.create(stream=True)", streamed, whole)


def chat(api: OpenAI, model: str) -> None:
    """A chat, whole and streamed, and one with a response format."""
    settings = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    whole = api.chat.completions.create(**settings, max_tokens=24).choices[0].message.content
    show("chat.completions.create", whole)
    chunks = api.chat.completions.create(**settings, max_tokens=24, stream=True, stream_options={"include_usage": True})
    parts = list(chunks)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in parts if chunk.choices)
    same("chat.completions.create(stream=True)", text, whole)
    show("  usage of the stream", parts[-1].usage.completion_tokens)
    wanted = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
    content = api.chat.completions.create(**settings, max_tokens=64, response_format=wanted).choices[0].message.content
    show("chat.completions.create(response_format)", json.loads(content))


def tools(api: OpenAI, model: str) -> None:
    """Calls, whole and streamed, and their result going back."""
    asked = {"model": model, "messages": [ASK], "tools": [{"type": "function", "function": WEATHER}], "temperature": 0}
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in (named, "required", "auto"):
        message = api.chat.completions.create(**asked, tool_choice=choice, max_tokens=96).choices[0].message
        show(f"tool_choice {choice if isinstance(choice, str) else 'named'}", calls_of(message) or message.content)
    message = api.chat.completions.create(**asked, tool_choice=named).choices[0].message
    with api.chat.completions.stream(**asked, tool_choice=named) as stream:
        fragments = sum(event.type == "tool_calls.function.arguments.delta" for event in stream)
        final = stream.get_final_completion().choices[0].message
    same(f"chat.completions.stream, {fragments} fragments", calls_of(final), calls_of(message))
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "18 degrees celsius, sunny"}
    messages = [ASK, message.model_dump(exclude_none=True), result]
    answer = api.chat.completions.create(**(asked | {"messages": messages}), tool_choice="none", max_tokens=32)
    show("the answer to a result", answer.choices[0].message.content)


def responses(api: OpenAI, model: str) -> None:
    """Responses: text, a call and its output, whole and streamed."""
    whole = api.responses.create(model=model, input=QUESTION, temperature=0, max_output_tokens=24)
    show("responses.create", whole.output_text)
    with api.responses.stream(model=model, input=QUESTION, temperature=0, max_output_tokens=24) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    same("responses.stream", text, whole.output_text)
    tool = {"type": "function", **WEATHER}
    asked = {"model": model, "tools": [tool], "temperature": 0}
    called = api.responses.create(**asked, input=[ASK], tool_choice={"type": "function", "name": "get_weather"})
    call = called.output[0]
    show("responses.create(tools)", f"{call.name} {json.loads(call.arguments)}")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees celsius, sunny"}
    answer = api.responses.create(**asked, input=[ASK, call, output], tool_choice="none", max_output_tokens=32)
    show("the answer to an output", answer.output_text)


def calls_of(message: object) -> list[str]:
    """Name and arguments of a message's calls; the arguments must be JSON."""
    calls = getattr(message, "tool_calls", None) or ()
    return [f"{call.function.name} {json.loads(call.function.arguments)}" for call in calls]


def show(what: str, got: object) -> None:
    """One line of output; nothing at all is a fault."""
    if not got:
        sys.exit(f"{what}: nothing came back")
    print(f"{what}: {got!r}" if isinstance(got, str) else f"{what}: {got}")


def same(what: str, got: object, want: object) -> None:
    """One line of output; a difference is a fault."""
    if got != want:
        sys.exit(f"{what}: got {got!r}; it must be {want!r}")
    print(f"{what}: the same")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1")
