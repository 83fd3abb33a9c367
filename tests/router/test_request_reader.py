"""What of a request matters for routing."""

from __future__ import annotations

import json

import pytest

from jaxserve.router.request_reader import KEYED_BYTES, read_route
from jaxserve.routing import NO_PROMPT, RouteRequest


def route(headers=None, tenant="", **body):
    return read_route(json.dumps(body).encode(), headers or {}, tenant, "x-session-id")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff", b"[" * 5000])
def test_what_cannot_be_read_is_routed_by_load(body):
    assert read_route(body, {}, "", "") == RouteRequest()


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": 5},
        {"prompt": [[]]},
        {"prompt": [1, "a"]},
        {"prompt": [1 << 63]},
        {"prompt": {"a": 1}},
        {"messages": 5},
        {"messages": [5, None, {}]},
        {"input": None},
        {"model": 5, "cache_salt": [], "tenant": {}, "prompt_cache_key": 1, "max_tokens": "x", "prompt": "a"},
    ],
)
def test_fields_of_wrong_types_are_no_error(body):
    found = route(**body)
    assert found.model == found.session == "" and found.num_tokens >= 0


@pytest.mark.parametrize("field", ["messages", "input", "tools"])
def test_json_that_is_too_deep_to_be_written_again_is_routed_by_load(field):
    body = b'{"model": "m", "input": [], "%s": [%s1%s]}' % (field.encode(), b"[" * 500, b"]" * 500)
    found = read_route(body, {}, "", "")
    assert (found.model, found.prompt) == ("m", NO_PROMPT)


def test_a_conversation_begins_as_it_went_on():
    turns = [{"role": "user", "content": "a" * 300}, {"role": "assistant", "content": "b" * 300}]
    first = route(messages=turns, tools=[{"type": "function"}]).prompt.keys
    longer = route(messages=[*turns, {"role": "user", "content": "c" * 300}], tools=[{"type": "function"}]).prompt.keys
    assert len(first) > 8 and longer[: len(first)] == first and len(longer) > len(first)
    assert not set(route(messages=turns).prompt.keys) & set(first), "tools stand at the beginning"


@pytest.mark.parametrize("field", ["model", "cache_salt", "tenant"])
def test_prompts_of_another_model_salt_or_tenant_share_nothing(field):
    one, other = route(prompt="x" * 640, **{field: "a"}), route(prompt="x" * 640, **{field: "b"})
    assert not set(one.prompt.keys) & set(other.prompt.keys)


def test_a_key_s_tenant_counts_more_than_the_body_s_and_that_more_than_the_header_s():
    prompts = [
        route(prompt="x" * 64, tenant="alice"),
        route({"x-tenant": "alice"}, prompt="x" * 64),
        read_route(b'{"prompt": "%s", "tenant": "bob"}' % (b"x" * 64), {"x-tenant": "carol"}, "alice", ""),
    ]
    assert len({each.prompt.keys for each in prompts}) == 1


def test_a_session_is_named_by_header_then_cache_key_then_salt():
    named = {"x-session-id": "h"}
    assert route(named, prompt_cache_key="k", cache_salt="s").session.endswith("h")
    assert route(prompt_cache_key="k", cache_salt="s").session.endswith("k")
    assert route(cache_salt="s").session.endswith("s")
    assert route(named, tenant="alice").session != route(named, tenant="bob").session
    assert route().session == ""


def test_token_ids_and_the_first_of_several_prompts_count():
    assert route(prompt=list(range(64))).prompt.num_bytes == 512
    assert route(prompt=["x" * 640, "y"]).prompt.keys == route(prompt="x" * 640).prompt.keys
    assert route(prompt=[list(range(64)), [1]]).prompt.keys == route(prompt=list(range(64))).prompt.keys


def test_work_is_estimated_from_prompt_and_output():
    assert route(prompt="x" * 400, max_tokens=50).num_tokens == 150
    assert route(prompt="x" * 400).num_tokens == 356
    assert route(messages=[], max_completion_tokens=7, max_tokens=9).num_tokens == 7
    assert route(prompt="", max_tokens=-5).num_tokens == 0
    assert route(prompt="", max_tokens=10**9).num_tokens == 1 << 20


def test_of_a_huge_prompt_the_beginning_is_looked_at():
    huge = route(prompt="x" * (2 * KEYED_BYTES)).prompt
    assert huge.num_bytes == KEYED_BYTES
    turn = {"role": "user", "content": "x" * 1000}
    assert route(messages=[turn] * 3000).prompt.num_bytes == KEYED_BYTES
