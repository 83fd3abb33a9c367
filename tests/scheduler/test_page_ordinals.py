"""What a trace tells of shared pages: which are alike, and nothing of their tokens."""

from __future__ import annotations

import json

import pytest

from jaxserve.core import Request, SamplingParams
from tests.scheduler.harness import Harness, make_config, make_request


def request(name: str, tokens: range, output: int = 1, **fields: object) -> Request:
    return Request(name, tuple(tokens), max_tokens=output, **fields)  # type: ignore[arg-type]


@pytest.fixture
def harness() -> Harness:
    """Pages of 4 tokens and a prefix cache; the token sampled at a position is the position."""
    return Harness(make_config(enable_prefix_caching=True))


def pages_of(harness: Harness) -> dict[str, list[int]]:
    """Page numbers of the prompts, by id."""
    events = [event for record in harness.records for event in record["events"]]
    return {event["id"]: event["pages"] for event in events if event["kind"] == "add"}


def test_equal_beginnings_have_equal_numbers(harness: Harness) -> None:
    harness.add(request("a", range(100, 109)), request("b", range(100, 113)), request("c", range(101, 109)))
    harness.add(request("tenant", range(100, 109), tenant="t"), request("salt", range(100, 109), cache_salt="s"))
    harness.run()
    assert pages_of(harness) == {"a": [0, 1], "b": [0, 1, 2], "c": [3, 4], "tenant": [5, 6], "salt": [7, 8]}


def test_a_prompt_that_goes_on_from_an_output_has_its_numbers(harness: Harness) -> None:
    """a is 0..5 and answers 6, 7, 8, 9; its second page fills with outputs, its third stays open."""
    harness.add(request("a", range(6), output=4))
    harness.run()
    assert [record["named"] for record in harness.records if record["named"]] == [[["a", [1]]]]
    harness.add(request("again", range(12)))
    harness.run()
    assert pages_of(harness)["again"] == [0, 1, 2]
    assert harness.scheduler.counters.cached_tokens == 8


def test_a_request_whose_prompt_is_scored_says_so(harness: Harness) -> None:
    harness.add(make_request("a", params=SamplingParams(prompt_logprobs=0)), make_request("b"))
    harness.run()
    assert [event["scores"] for record in harness.records for event in record["events"]] == [True, False]


def test_an_early_end_tells_the_pages_filled_since(harness: Harness) -> None:
    harness.add(request("a", range(6), output=9))
    for _ in range(4):
        harness.step()
    harness.abort("a")
    harness.scheduler.flush_trace()
    told = [record["named"] for record in harness.records if "named" in record]
    assert [numbers for named in told for _, numbers in named] == [[1]]


def test_nothing_is_numbered_without_a_prefix_cache() -> None:
    harness = Harness()
    harness.add(make_request("a", 9))
    harness.run()
    text = json.dumps(harness.records)
    assert not any(f'"{key}"' in text for key in ("pages", "named", "scores"))
