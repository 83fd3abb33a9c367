"""Nobody waits for ever: under a flood of requests that the policy prefers, the one it likes least still ends.

Every step brings a preferred request, more than the slots can serve, so the queue is always full of them.
"""

from __future__ import annotations

import pytest

from jaxserve.config.policy_config import POLICIES
from jaxserve.core import Request
from tests.scheduler.harness import PAGES, Harness, make_config, make_request

SLOTS, QUEUE, OUTPUT = 2, 6, 4
UNLOVED_PROMPT, UNLOVED_OUTPUT = 8, 12
AGEING_S = {
    "fcfs": 0.0,
    # 4 points of priority at 5 s each.
    "priority": 20.0,
    # It has at most 12 tokens of work more; a second outweighs one.
    "sjf": 12.0,
    # Without a deadline it is taken to have one after so many seconds; the others' deadlines are a second away.
    "edf": 30.0,
    "fair": 0.0,
}
"""Seconds of waiting after which nothing that arrives later stands before the unloved one."""


def preferred(index: int, now: float) -> Request:
    return make_request(f"p{index}", 4, OUTPUT, priority=-2, deadline_at=now + 60.0, tenant=f"t{index % 3}")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("reservation", "preemption"), PAGES)
@pytest.mark.parametrize("takes_slots", [False, True])
def test_the_least_preferred_request_ends_within_a_bound(
    policy: str, reservation: str, preemption: str, takes_slots: bool
) -> None:
    config = make_config(
        max_num_seqs=SLOTS,
        max_queue_requests=QUEUE,
        num_pages=12,
        policy=policy,
        reservation=reservation,
        preemption=preemption,
        num_host_pages=20 if preemption in ("swap", "auto") else 0,
        priority_preemption=takes_slots,
        priority_aging_s=5.0,
        sjf_aging_tokens_per_s=1.0,
        edf_default_s=30.0,
        max_preemptions=3,
    )
    harness = Harness(config)
    harness.add(*(preferred(-index, 0.0) for index in range(SLOTS + 2)))
    assert harness.add(make_request("unloved", UNLOVED_PROMPT, UNLOVED_OUTPUT, priority=2, tenant="z")) == [None]
    # Then those before it in the queue, and itself, each alone on a slot; and once more for each preemption.
    rounds = config.max_preemptions + 1
    bound = AGEING_S[policy] + rounds * ((QUEUE + SLOTS) * (1 + OUTPUT) + 1 + UNLOVED_OUTPUT)
    refused = 0
    while "unloved" not in harness.ends and harness.now <= bound:
        refused += harness.add(preferred(int(harness.now) + 1, harness.now))[0] is not None
        harness.step()
    assert harness.ends.get("unloved") == "length", f"it waits after {harness.now} steps"
    assert refused or policy in ("fcfs", "fair"), "the flood is none"
