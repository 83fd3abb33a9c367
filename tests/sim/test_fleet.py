"""Several simulated replicas behind the router's chooser."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from jaxserve.config import SchedulerConfig
from jaxserve.routing import RoutingSettings
from jaxserve.sim.cost_model import UnitCost
from jaxserve.sim.fleet import Fleet, fleet_figures
from jaxserve.sim.report import Objectives, figures
from jaxserve.sim.simulator import Simulator
from jaxserve.sim.source import Arrival, TimedSource, make_request, prompt_of
from jaxserve.sim.workload import parse_workload

CONFIG = SchedulerConfig(
    enable_prefix_caching=True,
    max_num_seqs=2,
    max_num_batched_tokens=64,
    max_model_len=256,
    num_pages=200,
    page_size=16,
)


def fleet(arrivals, *, num_replicas=2, config=CONFIG, **routing):
    source = arrivals if hasattr(arrivals, "peek") else TimedSource(iter(arrivals))
    settings = RoutingSettings(**routing)
    return Fleet(config, UnitCost(), source, num_replicas=num_replicas, routing=settings).run()


def arrival(number, at, *, num_prompt=16, num_output=4, group=0, num_shared=0):
    prompt = prompt_of(number, num_prompt, group=group, num_shared=num_shared)
    return Arrival(at, make_request(f"r{number}", prompt, num_output), num_output, "")


def workload(**changes):
    document = {
        "num_requests": 300,
        "seed": 3,
        "arrivals": {"kind": "poisson", "rate": 0.5},
        "prompt": {"kind": "uniform", "low": 20, "high": 120},
        "output": {"kind": "uniform", "low": 1, "high": 20},
        "classes": [{"name": "chat", "shared_prefix": {"tokens": 64, "groups": 12}}],
    }
    return parse_workload(document | changes, "w")


@pytest.mark.parametrize(
    "arrivals",
    [
        {"kind": "poisson", "rate": 0.5},
        {"kind": "batch"},
        {"kind": "closed_loop", "concurrency": 5, "think_s": 3.0},
    ],
)
@pytest.mark.parametrize(
    "changes", [{}, {"max_steps_ahead": 1}, {"batching": "request_dynamic", "batch_timeout_s": 7.0}]
)
def test_one_replica_is_the_simulator_itself(arrivals, changes):
    from dataclasses import replace

    config = replace(CONFIG, **changes)
    alone = figures(Simulator(config, UnitCost(), workload(arrivals=arrivals).source()).run(), Objectives())
    of_fleet = figures(fleet(workload(arrivals=arrivals).source(), num_replicas=1, config=config).whole, Objectives())
    assert of_fleet == alone


def test_every_request_ends_once_and_replicas_run_at_the_same_time():
    result = fleet([arrival(number, 0.0) for number in range(8)], policy="least_loaded")
    whole = figures(result.whole, Objectives())
    assert whole["completed"] == 8 and result.routed == [4, 4]
    # 4 requests on 2 slots twice over: what one replica does in turns two do side by side.
    one = figures(fleet([arrival(number, 0.0) for number in range(8)], num_replicas=1).whole, Objectives())
    assert whole["duration_s"] == one["duration_s"] / 2
    shares = fleet_figures(result, Objectives())
    assert shares["busy_share"] == shares["slot_utilisation"] == 1.0 and shares["mean_iteration_s"] == 1.0


def test_a_choice_knows_what_ended_before_and_not_what_ends_later():
    # r0 (5 iterations) is at work until t = 5 on replica 0: one that comes before goes elsewhere, one after does not.
    before = fleet([arrival(0, 0.0), arrival(1, 3.9), arrival(2, 4.5)], policy="least_loaded")
    assert before.routed == [2, 1]
    ends = fleet(
        [arrival(0, 0.0, num_output=2), arrival(1, 2.5, num_output=20), arrival(2, 3.5)], policy="least_loaded"
    )
    assert ends.routed == [2, 1]


def test_a_batch_that_is_held_back_goes_with_a_late_arrival_that_fills_it():
    from dataclasses import replace

    config = replace(CONFIG, batching="request_dynamic", batch_timeout_s=50.0)
    result = fleet([arrival(0, 0.0), arrival(1, 3.0)], num_replicas=1, config=config)
    assert list(result.whole.log.started_at) == [3.0, 3.0]


def test_prefixes_are_found_more_often_where_they_are_looked_for():
    shares = {
        policy: fleet_figures(fleet(workload().source(), num_replicas=4, policy=policy), Objectives())["cached_share"]
        for policy in ("cache_aware", "round_robin")
    }
    assert shares["cache_aware"] > shares["round_robin"] + 0.05


def test_the_same_workload_gives_the_same_result():
    one, other = (fleet(workload().source(), num_replicas=3) for _ in range(2))
    assert fleet_figures(one, Objectives()) == fleet_figures(other, Objectives())


def test_refused_requests_are_no_load():
    from dataclasses import replace

    config = replace(CONFIG, max_queue_requests=1)
    result = fleet([arrival(number, 0.0) for number in range(20)], config=config)
    whole = figures(result.whole, Objectives())
    assert whole["rejected"] + whole["completed"] == 20 and whole["rejected"]


def test_the_command_prints_and_writes_a_fleet(tmp_path):
    file = tmp_path / "w.json"
    file.write_text(
        json.dumps(
            {
                "num_requests": 40,
                "arrivals": {"kind": "poisson", "rate": 0.5},
                "prompt": 100,
                "output": 5,
                "classes": [{"name": "a", "shared_prefix": {"tokens": 64, "groups": 4}}],
            }
        )
    )
    words = [sys.executable, "-m", "jaxserve.simulate", f"--workload={file}", f"--output={tmp_path / 'o.json'}"]
    done = subprocess.run([*words, "--num_replicas=3"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "replicas: " in done.stdout and "of prompt tokens" in done.stdout
    found = json.loads((tmp_path / "o.json").read_text())
    assert found["settings"]["routing_policy"] == "cache_aware"
    assert sum(found["figures"]["requests_routed"]) == found["figures"]["completed"] == 40
    for other in ("trace_file=t", "decode_engines=2"):
        refused = subprocess.run(
            [*words, "--num_replicas=2", f"--{other}"], capture_output=True, text=True, timeout=120
        )
        named = other.partition("=")[0]
        assert refused.returncode == 2 and f"{named} and num_replicas are given" in refused.stderr
