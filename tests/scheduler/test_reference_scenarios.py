"""The reference scenarios: traces that must come out to the letter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.core import Priority
from tests.scheduler.harness import Harness, make_config, make_request

SCENARIOS = sorted((Path(__file__).parents[1] / "golden" / "scheduler").glob("*.json"))


def run_scenario(scenario: dict[str, Any]) -> Harness:
    """Feeds each request in the iteration of its arrival, in file order."""
    policy = scenario["policy"]
    harness = Harness(
        make_config(
            max_num_seqs=policy["max_active"],
            max_queue_requests=policy["max_queue"],
            max_num_batched_tokens=policy["token_budget"],
            prefill_chunk=policy["prefill_chunk"],
            priority_preemption=policy["priority_preemption"],
            arrivals_claim_slots=True,
        )
    )
    last = max(request["arrival"] for request in scenario["requests"])
    for iteration in range(last + 1):
        for entry in scenario["requests"]:
            if entry["arrival"] == iteration:
                priority = Priority.NAMES[entry["priority"]]
                harness.add(make_request(entry["id"], entry["prompt"], entry["output"], priority=priority))
        harness.step()
    harness.run()
    return harness


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_trace_equals_the_reference(path: Path) -> None:
    scenario = json.loads(path.read_text())
    records = run_scenario(scenario).records
    expected = scenario["expected"]["trace"]
    assert [{key: record[key] for key in expected[0]} for record in records] == expected


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_results_per_request_equal_the_reference(path: Path) -> None:
    scenario = json.loads(path.read_text())
    records = run_scenario(scenario).records
    for request_id, expected in scenario["expected"]["requests"].items():
        emitted = [r["iteration"] for r in records if request_id in r["prefill_emitted"]]
        completed = [r["iteration"] for r in records if request_id in r["completed"]]
        assert expected == {
            "first_output": emitted[0] if emitted else None,
            "completed": completed[0] if completed else None,
            "preemptions": sum(request_id in r["preempted"] for r in records),
            "result": "completed" if completed else "rejected",
        }


def test_there_are_scenarios() -> None:
    assert len(SCENARIOS) == 5
