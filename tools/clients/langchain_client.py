"""`langchain-openai` against a running server: messages, streams, tools, structured output, with what came back.

Usage: python tools/clients/langchain_client.py http://127.0.0.1:8000/v1
Needs `langchain-openai`, and a model whose chat template writes tools.
"""

from __future__ import annotations

import sys
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

QUESTION = "What is the capital of France?"


@tool
def get_weather(city: str, unit: Literal["celsius", "fahrenheit"]) -> str:
    """The weather in a city now."""
    return f"18 degrees {unit} in {city}, sunny"


class Weather(BaseModel):
    """The weather that somebody asks for."""

    city: str = Field(description="name of the city")
    unit: Literal["celsius", "fahrenheit"]


def main(url: str) -> None:
    """Runs all checks in turn."""
    import openai

    model = openai.OpenAI(base_url=url, api_key="none").models.list().data[0].id
    settings = {"base_url": url, "api_key": "none", "model": model, "temperature": 0, "max_retries": 0}
    show("OpenAI.invoke", OpenAI(**settings, max_tokens=12).invoke("The sea is"))
    for api in ("chat completions", "responses"):
        chat = ChatOpenAI(**settings, max_tokens=64, use_responses_api=api == "responses")
        print(f"-- {api}")
        answer = chat.invoke(QUESTION)
        show("ChatOpenAI.invoke", answer.text)
        show("  usage_metadata", answer.usage_metadata["total_tokens"])
        same("ChatOpenAI.stream", "".join(chunk.text for chunk in chat.stream(QUESTION)), answer.text)
        tools(chat)
        for method in ("json_schema", "function_calling"):
            reader = chat.with_structured_output(Weather, method=method, strict=True)
            show(f"with_structured_output({method})", reader.invoke("How warm is it in Paris? Use celsius."))


def tools(chat: ChatOpenAI) -> None:
    """A call, its result, and the answer to it."""
    asked = HumanMessage("How warm is it in Paris? Use celsius.")
    message = chat.bind_tools([get_weather], tool_choice="get_weather", strict=True).invoke([asked])
    (call,) = message.tool_calls
    show("bind_tools(tool_choice=name)", f"{call['name']} {call['args']}")
    result: ToolMessage = get_weather.invoke(call)
    show("  the tool's result", result.content)
    show("  the answer to it", chat.invoke([asked, message, result]).text)
    streamed = None
    for chunk in chat.bind_tools([get_weather], tool_choice="required", strict=True, parallel_tool_calls=False).stream(
        [asked]
    ):
        streamed = chunk if streamed is None else streamed + chunk
    show("bind_tools(tool_choice=required).stream", [f"{c['name']} {c['args']}" for c in streamed.tool_calls])


def show(what: str, got: object) -> None:
    """One line of output; nothing at all is a fault."""
    if not got:
        sys.exit(f"{what}: nothing came back")
    print(f"{what}: {got}")


def same(what: str, got: object, want: object) -> None:
    """One line of output; a difference is a fault."""
    if got != want:
        sys.exit(f"{what}: got {got!r}; it must be {want!r}")
    print(f"{what}: the same")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1")
