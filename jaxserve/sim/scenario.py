"""Scenarios: small cases in iterations, whose every decision is compared with an expected trace.

A scenario file is a JSON object:

    scenario   its name, optional
    policy     max_active (slots), max_queue (requests that wait), token_budget, prefill_chunk,
               priority_preemption; and any other field of `SchedulerConfig` by its own name
    requests   list of id, arrival (iteration), priority ("high", "normal", "low" or an integer),
               prompt and output (tokens)
    expected   termination, trace and requests to compare with, optional

One iteration takes one unit of time. Requests of one arrival are added in file order, and may claim a free
slot ahead of the queue. KV pages, queued tokens, chunks per iteration and preemptions per request are not
limited, unless the policy says so. `iteration` in the trace is the clock: an iteration in which nothing runs
and nobody is refused has no record, and time jumps to the next arrival.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import isnan
from pathlib import Path
from typing import Any

from jaxserve.config import SchedulerConfig
from jaxserve.config.engine_config import check_page_size
from jaxserve.core import FinishReason
from jaxserve.sim.cost_model import UnitCost
from jaxserve.sim.json_fields import MAX_TOKENS, JsonFields, read_json
from jaxserve.sim.request_log import COMPLETED, RequestLog
from jaxserve.sim.simulator import Simulator
from jaxserve.sim.source import Arrival, TimedSource, make_request, prompt_of
from jaxserve.sim.workload import parse_priority, priority_name

POLICY_NAMES = {
    "max_active": "max_num_seqs",
    "max_queue": "max_queue_requests",
    "token_budget": "max_num_batched_tokens",
    "prefill_chunk": "prefill_chunk",
    "priority_preemption": "priority_preemption",
}
"""The policy's fields and the scheduler settings they are."""
DEFAULT_LIMIT = 1_000_000
LISTS = ("decode", "prefill", "prefill_emitted", "preempted", "rejected", "completed", "aborted", "expired", "failed")
_UNLIMITED = 2**62
_PAGE_SIZE = 256


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scenario file, checked."""

    name: str
    policy: dict[str, Any]
    config: SchedulerConfig
    arrivals: tuple[Arrival, ...]
    expected: Mapping[str, Any] | None


def load_scenario(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Scenario:
    """Reads a scenario file.

    Args:
      overrides: scheduler settings that replace the file's, by the names of `SchedulerConfig`.

    Raises:
      ValueError: naming the field and the rule it breaks.
    """
    return parse_scenario(read_json(path), Path(path).name, overrides)


def parse_scenario(document: Any, where: str, overrides: Mapping[str, Any] | None = None) -> Scenario:
    """Reads a scenario; `where` names it in messages. See `load_scenario`."""
    top = JsonFields(document, where)
    name = top.text("scenario", Path(where).stem)
    policy = _policy(top.object("policy"))
    short_names = {long: short for short, long in POLICY_NAMES.items()}
    policy |= {short_names.get(name, name): value for name, value in (overrides or {}).items()}
    entries = [
        _arrival(JsonFields(entry, f"{where}.requests[{index}]"), index)
        for index, entry in enumerate(top.items("requests"))
    ]
    expected = top.any("expected", None)
    if expected is not None:
        _check_expected(JsonFields(expected, top.name_of("expected")))
    top.close()
    try:
        config = SchedulerConfig(**_settings(policy, entries))
    except ValueError as error:
        raise ValueError(f"{where}.policy: {error}") from None
    # Stable: requests of one iteration stay in file order.
    entries.sort(key=lambda entry: entry.at)
    return Scenario(name, policy, config, tuple(entries), expected)


def run_scenario(scenario: Scenario, max_iterations: int = DEFAULT_LIMIT) -> dict[str, Any]:
    """Simulates it.

    Returns:
      JSON-able: `scenario`, `termination` ("all_terminal", or "iteration_limit" after `max_iterations`
      iterations that ran something), `policy`, `trace` and `requests`.
    """
    trace = _ScenarioTrace(scenario.config.max_num_batched_tokens)
    simulator = Simulator(
        scenario.config,
        UnitCost(),
        TimedSource(iter(scenario.arrivals)),
        trace=trace,
        max_iterations=max_iterations,
        keep_ids=True,
    )
    result = simulator.run()
    return {
        "scenario": scenario.name,
        "termination": result.termination,
        "policy": scenario.policy,
        "trace": trace.finished(),
        "requests": _requests(result.log, scenario),
    }


def difference(expected: Mapping[str, Any], output: Mapping[str, Any]) -> str | None:
    """The first place where `output` is not as expected, in words; None when it is.

    Keys that the expectation does not name are free; everything it names must be equal.
    """
    return _difference(expected, output, "")


class _ScenarioTrace:
    """Trace sink: one record per iteration in which something happened, numbered by the clock."""

    def __init__(self, token_budget: int) -> None:
        self._token_budget = token_budget
        self._records: list[dict[str, Any]] = []
        self._pending: dict[int, dict[str, Any]] = {}  # events that no plan has carried yet, by iteration

    def __call__(self, record: dict[str, Any]) -> None:
        for event in record["events"]:
            self._at(event["now"])["events"].append(event)
            refused = event["kind"] == "add" and event["outcome"] not in ("slot", "queue")
            if refused or (event["kind"] == "abort" and event["reason"] == FinishReason.DISPLACED):
                self._at(event["now"])["rejected"].append(event["id"])
        if record.get("kind") == "events":
            return
        iteration = int(record["now"])
        came = self._pending.pop(iteration, self._empty(record["now"]))
        self._flush()
        self._records.append(record | {"iteration": iteration, "rejected": came["rejected"], "events": came["events"]})

    def finished(self) -> list[dict[str, Any]]:
        """All records, in order."""
        self._flush()
        return self._records

    def _flush(self) -> None:
        """Iterations that ran nothing are recorded if a request was refused in them."""
        for iteration in sorted(self._pending):
            record = self._pending[iteration]
            if record["rejected"]:
                self._records.append(record)
        self._pending = {}

    def _at(self, now: float) -> dict[str, Any]:
        return self._pending.setdefault(int(now), self._empty(now))

    def _empty(self, now: float) -> dict[str, Any]:
        lists: dict[str, Any] = {key: [] for key in (*LISTS, "queue", "active", "events")}
        return {"iteration": int(now), "now": now, **lists, "unused_budget": self._token_budget}


def _policy(policy: JsonFields) -> dict[str, Any]:
    values: dict[str, Any] = {
        "max_active": policy.integer("max_active", 1),
        "max_queue": policy.integer("max_queue", 0),
        "token_budget": policy.integer("token_budget", 1),
        "prefill_chunk": policy.integer("prefill_chunk", 1),
        "priority_preemption": policy.boolean("priority_preemption"),
    }
    if values["max_active"] > values["token_budget"]:
        raise ValueError(
            f"{policy.name_of('max_active')} is {values['max_active']} and token_budget is {values['token_budget']};"
            " max_active must be at most token_budget: every active request may need a token in one iteration"
        )
    for setting in fields(SchedulerConfig):
        if setting.name in policy and setting.name not in POLICY_NAMES.values():
            values[setting.name] = _typed(policy, setting.name, setting.default)
    policy.close()
    return values


def _typed(policy: JsonFields, name: str, default: Any) -> Any:
    """A field of the type that the setting's default has; `SchedulerConfig` checks the value."""
    match default:
        case bool():
            return policy.boolean(name)
        case int():
            return policy.integer(name, 0)
        case str():
            return policy.text(name)
        case tuple() if name == "group_windows":
            windows = policy.items(name)
            if any(isinstance(window, bool) or not isinstance(window, int) for window in windows):
                raise ValueError(f"{policy.name_of(name)} is {windows}; it must be a list of integers")
            return tuple(windows)
        case tuple():
            raise ValueError(f"{policy.name_of(name)} is a file of its own; give it as --{name}=FILE")
        case _:
            return None if policy.any(name) is None else policy.number(name)


def _settings(policy: Mapping[str, Any], arrivals: list[Arrival]) -> dict[str, Any]:
    longest = max((a.request.num_prompt_tokens + a.request.max_tokens for a in arrivals), default=2)
    # Preempted requests keep their pages, so whoever is live may hold some.
    most_live = min(len(arrivals), policy["max_active"] + policy["max_queue"])
    settings: dict[str, Any] = {
        "max_prefill_seqs": policy["max_active"],
        "max_model_len": max(longest, 2),
        "max_queue_tokens": _UNLIMITED,
        "max_preemptions": _UNLIMITED,
        "page_size": _PAGE_SIZE,
        "arrivals_claim_slots": True,
    }
    settings |= {POLICY_NAMES.get(name, name): value for name, value in policy.items()}
    check_page_size(settings["page_size"])
    pages = most_live * -(-longest // settings["page_size"]) * max(len(settings.get("group_windows", ())), 1)
    settings.setdefault("num_pages", pages + 2)
    return settings


def _arrival(entry: JsonFields, number: int) -> Arrival:
    request_id = entry.text("id")
    at = entry.integer("arrival", 0)
    priority = parse_priority(entry)
    num_prompt, num_output = entry.integer("prompt", 1, most=MAX_TOKENS), entry.integer("output", 1, most=MAX_TOKENS)
    entry.close()
    request = make_request(request_id, prompt_of(number, num_prompt), num_output, priority=priority)
    return Arrival(float(at), request, num_output, priority_name(priority))


def _check_expected(expected: JsonFields) -> None:
    expected.text("termination", "")
    expected.items("trace", [])
    expected.object("requests", {})


def _requests(log: RequestLog, scenario: Scenario) -> dict[str, Any]:
    """By id; the second and later requests of one id as `id#2`, `id#3`."""
    assert log.ids is not None, "the log keeps ids"
    results: dict[str, Any] = {}
    by_name: dict[str, int] = {}
    for index, request_id in enumerate(log.ids):
        name, count = request_id, 1
        while name in by_name:
            count += 1
            name = f"{request_id}#{count}"
        by_name[name] = index
    for name, index in by_name.items():
        outcome = log.outcome_of(index)
        # An iteration's tokens come at its end, one unit after its number.
        results[name] = {
            "first_output": _iteration(log.first_at[index]),
            "completed": _iteration(log.ended_at[index]) if outcome == COMPLETED else None,
            "preemptions": log.preemptions[index],
            "result": outcome,
        }
    for arrival in scenario.arrivals[len(log) :]:
        absent = {"first_output": None, "completed": None, "preemptions": 0, "result": "not_arrived"}
        results.setdefault(arrival.request.request_id, absent)
    return results


def _iteration(at: float) -> int | None:
    return None if isnan(at) else int(at) - 1


def _difference(expected: Any, found: Any, where: str) -> str | None:
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        for key, value in expected.items():
            if key not in found:
                return f"{where}{key} is missing"
            inner = _difference(value, found[key], f"{where}{key}.")
            if inner is not None:
                return inner
        return None
    if isinstance(expected, list) and isinstance(found, list) and where == "trace.":
        for index, (left, right) in enumerate(zip(expected, found, strict=False)):
            inner = _difference(left, right, f"{where[:-1]}[{index}].")
            if inner is not None:
                return inner
        if len(expected) != len(found):
            return f"{where[:-1]} has {len(found)} records; expected are {len(expected)}"
        return None
    # True == 1 in Python, not in a file.
    if expected != found or isinstance(expected, bool) != isinstance(found, bool):
        return f"{where[:-1]} is {found!r}; expected is {expected!r}"
    return None
