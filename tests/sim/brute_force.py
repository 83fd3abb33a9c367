"""The scenario rules once more, written from the rules alone: plain lists, no jaxserve.

Slow and simple on purpose. Every iteration:

1. arrivals in file order. One takes a free slot at once. Without one, if preemption is on, it takes the
   slot of a request of lower class: the lowest class, then the most remaining work, then the latest; the
   victim joins the queue, for which there must be a place. Else it joins the queue, or is rejected.
2. waiting requests are promoted while slots are free: preempted ones first, each kind by arrival.
3. one token for every active request whose prompt is done.
4. the rest of the budget for prompts, in promotion order, at most a chunk each. A prompt that ends emits
   its first token.
5. the finished leave.
"""

from __future__ import annotations

from typing import Any

CLASS = {"high": 2, "normal": 1, "low": 0}


def simulate(scenario: dict[str, Any]) -> dict[str, Any]:
    """`termination`, `trace` and `requests` of a scenario."""
    policy = scenario["policy"]
    jobs = [
        {**entry, "number": number, "left_prompt": entry["prompt"], "left_output": entry["output"]}
        for number, entry in enumerate(scenario["requests"])
    ]
    results = {
        job["id"]: {"first_output": None, "completed": None, "preemptions": 0, "result": "rejected"} for job in jobs
    }
    queue: list[dict[str, Any]] = []
    active: list[dict[str, Any]] = []  # in promotion order
    trace = []
    to_come = sorted(jobs, key=lambda job: job["arrival"])
    iteration = 0
    while to_come or queue or active:
        if not queue and not active:
            iteration = max(iteration, to_come[0]["arrival"])
        preempted, rejected = [], []
        while to_come and to_come[0]["arrival"] == iteration:
            job = to_come.pop(0)
            if len(active) < policy["max_active"]:
                active.append(job)
                continue
            room = len(queue) < policy["max_queue"]
            lower = [other for other in active if CLASS[other["priority"]] < CLASS[job["priority"]]]
            if policy["priority_preemption"] and lower and room:
                lowest = min(CLASS[other["priority"]] for other in lower)
                lower = [other for other in lower if CLASS[other["priority"]] == lowest]
                most = max(other["left_prompt"] + other["left_output"] for other in lower)
                lower = [other for other in lower if other["left_prompt"] + other["left_output"] == most]
                victim = max(lower, key=lambda other: place_in_line(other))
                active.remove(victim)
                queue.append(victim)
                preempted.append(victim["id"])
                results[victim["id"]]["preemptions"] += 1
                active.append(job)
            elif room:
                queue.append(job)
            else:
                rejected.append(job["id"])
        queue.sort(key=lambda job: (results[job["id"]]["preemptions"] == 0, place_in_line(job)))
        while queue and len(active) < policy["max_active"]:
            active.append(queue.pop(0))
        budget = policy["token_budget"]
        decode, prefill, emitted = [], [], []
        for job in active:
            if job["left_prompt"] == 0:
                decode.append(job["id"])
                job["left_output"] -= 1
                budget -= 1
        for job in active:
            tokens = min(job["left_prompt"], policy["prefill_chunk"], budget)
            if tokens:
                prefill.append([job["id"], tokens])
                job["left_prompt"] -= tokens
                budget -= tokens
                if job["left_prompt"] == 0:
                    job["left_output"] -= 1
                    emitted.append(job["id"])
                    results[job["id"]]["first_output"] = iteration
        # Decoded ones were active with a finished prompt before; they are named first.
        ended = decode + emitted
        completed = [name for name in ended if next(job for job in active if job["id"] == name)["left_output"] == 0]
        for name in completed:
            results[name]["completed"] = iteration
            results[name]["result"] = "completed"
        active = [job for job in active if job["left_output"] > 0]
        trace.append(
            {
                "iteration": iteration,
                "decode": decode,
                "prefill": prefill,
                "prefill_emitted": emitted,
                "preempted": preempted,
                "rejected": rejected,
                "completed": completed,
                "queue": [job["id"] for job in queue],
                "active": [job["id"] for job in active],
                "unused_budget": budget,
            }
        )
        iteration += 1
    return {"termination": "all_terminal", "trace": trace, "requests": results}


def place_in_line(job: dict[str, Any]) -> tuple[int, int]:
    """Order of arrival; requests of one iteration in file order."""
    return job["arrival"], job["number"]
