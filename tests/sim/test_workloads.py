"""Workloads: the distributions they promise, the same draws every time, files whose mistakes are named."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from jaxserve.config import SchedulerConfig
from jaxserve.core import Priority
from jaxserve.sim.arrivals import ClosedLoop
from jaxserve.sim.cost_model import UnitCost
from jaxserve.sim.fixed_workload import listed_workload, load_workload
from jaxserve.sim.json_fields import JsonFields
from jaxserve.sim.lengths import parse_lengths
from jaxserve.sim.simulator import Simulator
from jaxserve.sim.source import prompt_of
from jaxserve.sim.workload import parse_workload

SHIPPED = sorted((Path(__file__).parents[2] / "configs" / "workloads").glob("*.json"))


def workload(**fields):
    document = {"num_requests": 4000, "seed": 5, "arrivals": {"kind": "poisson", "rate": 4.0}, "prompt": 6, "output": 3}
    return parse_workload(document | fields, "file")


def drain(source):
    arrivals = []
    while source.peek() is not None:
        arrivals.append(source.take())
    return arrivals


def gaps(arrivals):
    return np.diff([arrival.at for arrival in arrivals], prepend=0.0)


def lengths(spec, count=20_000):
    distribution = parse_lengths(JsonFields({"prompt": spec}, "file"), "prompt")
    return distribution, distribution.draw(np.random.default_rng(0), count)


@pytest.mark.parametrize(
    ("spec", "mean", "low", "high"),
    [
        (7, 7, 7, 7),
        ({"kind": "constant", "value": 7}, 7, 7, 7),
        ({"kind": "uniform", "low": 10, "high": 20}, 15, 10, 20),
        ({"kind": "exponential", "mean": 50, "max": 10_000}, 50, 1, 10_000),
        ({"kind": "exponential", "mean": 50, "max": 60, "min": 40}, None, 40, 60),
        ({"kind": "lognormal", "median": 100, "sigma": 0.5, "max": 10_000}, 100 * np.exp(0.125), 1, 10_000),
        ({"kind": "list", "values": [10, 20, 90]}, 40, 10, 90),
    ],
)
def test_lengths_have_mean_and_range(spec, mean, low, high):
    distribution, drawn = lengths(spec)
    assert low <= drawn.min() and drawn.max() <= high == distribution.longest
    if mean is not None:
        assert drawn.mean() == pytest.approx(mean, rel=0.03)
    else:
        assert {drawn.min(), drawn.max()} == {low, high}


@pytest.mark.parametrize(
    ("arrivals", "variation"),
    [
        ({"kind": "poisson", "rate": 4.0}, 1.0),
        ({"kind": "gamma", "rate": 4.0, "cv": 3.0}, 3.0),
        ({"kind": "gamma", "rate": 4.0, "cv": 0.5}, 0.5),
        ({"kind": "constant", "rate": 4.0}, 0.0),
    ],
)
def test_gaps_have_rate_and_variation(arrivals, variation):
    drawn = gaps(drain(workload(arrivals=arrivals, num_requests=20_000).source()))
    assert len(drawn) == 20_000
    assert drawn.mean() == pytest.approx(0.25, rel=0.06)
    assert drawn.std() / drawn.mean() == pytest.approx(variation, rel=0.06, abs=1e-9)


def test_batch_and_trace_arrivals():
    assert {arrival.at for arrival in drain(workload(arrivals={"kind": "batch"}).source())} == {0.0}
    traced = workload(arrivals={"kind": "trace", "times": [0, 0.5, 4]}, num_requests=3)
    assert [arrival.at for arrival in drain(traced.source())] == [0.0, 0.5, 4.0]
    assert traced.rate == 0.5


def test_a_source_is_the_same_every_time_and_other_with_another_seed():
    first, again = (drain(workload().source()) for _ in range(2))
    assert first == again
    assert [arrival.at for arrival in first] != [arrival.at for arrival in drain(workload(seed=6).source())]


def test_another_rate_squeezes_the_same_requests():
    spec = {"kind": "uniform", "low": 1, "high": 99}
    slow = drain(workload(prompt=spec).source())
    fast = drain(workload(prompt=spec).at_rate(8.0).source())
    assert [each.at for each in fast] == pytest.approx([each.at / 2 for each in slow])
    assert [each.request.prompt_token_ids for each in fast] == [each.request.prompt_token_ids for each in slow]
    traced = workload(arrivals={"kind": "trace", "times": [0, 0.5, 4]}, num_requests=3).at_rate(1.0)
    assert [arrival.at for arrival in drain(traced.source())] == [0.0, 0.25, 2.0]


def test_a_batch_at_a_rate_is_poisson_and_a_closed_loop_has_none():
    drawn = gaps(drain(workload(arrivals={"kind": "batch"}, num_requests=20_000).at_rate(5.0).source()))
    assert drawn.mean() == pytest.approx(0.2, rel=0.05)
    assert drawn.std() == pytest.approx(0.2, rel=0.05)
    with pytest.raises(ValueError, match="arrivals are closed_loop, whose rate follows from the system; sweep a"):
        workload(arrivals={"kind": "closed_loop", "concurrency": 2}).at_rate(5.0)


def test_classes_have_their_share_priority_tenant_and_deadline():
    classes = [
        {"name": "web", "share": 3, "priority": "high", "tenant": "a", "deadline_s": 2.5},
        {"name": "batch", "priority": 7, "prompt": 9, "output": 5, "max_tokens": 8},
    ]
    drawn = drain(workload(classes=classes).source())
    web = [each for each in drawn if each.class_name == "web"]
    batch = [each for each in drawn if each.class_name == "batch"]
    assert len(web) / len(drawn) == pytest.approx(0.75, abs=0.03)
    assert {(e.request.priority, e.request.tenant, e.request.num_prompt_tokens) for e in web} == {(-10, "a", 6)}
    assert all(each.request.deadline_at == each.at + 2.5 for each in web)
    assert {(e.request.priority, e.request.num_prompt_tokens, e.request.max_tokens) for e in batch} == {(7, 9, 8)}
    assert {each.num_output_tokens for each in batch} == {5}
    assert all(each.request.deadline_at is None for each in batch)
    assert workload(classes=classes).longest == 17


def test_what_comes_out_is_cut_at_what_was_declared():
    drawn = drain(workload(output={"kind": "uniform", "low": 1, "high": 9}, max_tokens=4).source())
    assert {each.num_output_tokens for each in drawn} == {1, 2, 3, 4}
    assert {each.request.max_tokens for each in drawn} == {4}


def test_prompts_share_what_they_declare_and_nothing_else():
    assert prompt_of(3, 4)[0] != prompt_of(4, 4)[0]
    assert len(prompt_of(3, 4)) == len(prompt_of(3, 4, num_shared=9)) == 4
    classes = [{"name": "a", "shared_prefix": {"tokens": 4, "groups": 3}, "prompt": 10}]
    drawn = [each.request.prompt_token_ids for each in drain(workload(classes=classes, num_requests=500).source())]
    assert len({prompt[:4] for prompt in drawn}) == 3
    assert len({prompt[4] for prompt in drawn}) == len(drawn)


def test_a_closed_loop_never_has_more_requests_than_clients():
    closed = workload(arrivals={"kind": "closed_loop", "concurrency": 3, "think_s": 2.0}, num_requests=60)
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32)
    log = Simulator(config, UnitCost(), closed.source()).run().log
    # Prompt of 6 and output of 3: three iterations, then two seconds of thought.
    assert log.arrived_at[:6].tolist() == [0.0, 0.0, 0.0, 5.0, 5.0, 5.0]
    assert len(log) == 60
    changes = sorted([(at, 1) for at in log.arrived_at] + [(at, -1) for at in log.ended_at])
    assert max(np.cumsum([change for _, change in changes])) == 3


def test_a_refused_client_waits_as_it_was_told():
    source = ClosedLoop(iter([lambda at: at] * 3), concurrency=1, think_s=1.0)
    assert source.take() == 0.0
    assert source.peek() is None
    source.ended(10.0, retry_after_s=4.0)
    assert source.take() == 14.0
    source.ended(20.0)
    assert source.take() == 21.0
    source.ended(30.0)
    assert source.peek() is None


def test_a_list_of_requests():
    document = {
        "name": "w",
        "model": "any",
        "requests": [
            {"id": 0, "prompt_ids": [5, 6, 7], "prompt": "text", "prompt_len": 3, "max_tokens": 4, "arrival": 2.0},
            {"prompt_len": 9, "max_tokens": 8, "output": 2, "priority": "low", "tenant": "t", "deadline_s": 3},
        ],
    }
    listed = listed_workload(document, "file")
    second, first = (each for each in drain(listed.source()))
    assert (first.at, first.request.prompt_token_ids, first.request.max_tokens) == (2.0, (5, 6, 7), 4)
    assert (second.at, second.request.num_prompt_tokens, second.num_output_tokens) == (0.0, 9, 2)
    assert (second.request.priority, second.request.tenant) == (Priority.LOW, "t")
    assert (second.request.deadline_at, second.class_name, listed.longest) == (3.0, "low", 17)
    assert [each.at for each in drain(listed.at_rate(1.0).source())] == [0.0, 1.0]
    document["requests"][0]["arrival"] = 0
    at_once = listed_workload(document, "file")
    assert at_once.rate is None
    assert all(after.at > before.at for before, after in pairwise(drain(at_once.at_rate(2.0).source())))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_workload_is_usable(path):
    loaded = load_workload(path)
    assert loaded.name == path.stem
    first = loaded.source().take()
    assert first.request.num_prompt_tokens + first.request.max_tokens <= loaded.longest


def test_there_are_shipped_workloads():
    assert len(SHIPPED) >= 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_requests": 0}, "file.num_requests is 0; it must be an integer of at least 1"),
        ({"arrivals": {"kind": "often"}}, 'file.arrivals.kind is "often"; it must be one of poisson, gamma'),
        ({"arrivals": {"kind": "poisson"}}, "file.arrivals.rate is missing"),
        ({"arrivals": {"kind": "poisson", "rate": 0}}, "file.arrivals.rate is 0; it must be a finite number above 0"),
        ({"arrivals": {"kind": "constant", "rate": 1, "cv": 2}}, "file.arrivals.cv is not a field"),
        ({"arrivals": {"kind": "gamma", "rate": 1, "cv": 0}}, "file.arrivals.cv is 0"),
        ({"arrivals": {"kind": "closed_loop", "concurrency": 0}}, "file.arrivals.concurrency is 0"),
        (
            {"arrivals": {"kind": "trace", "times": [1, 0.5]}},
            "file.arrivals.times[1] is 0.5; it must be a finite number",
        ),
        ({"arrivals": {"kind": "trace", "times": [1]}}, "file.num_requests is 4000; arrivals.times has 1"),
        ({"arrivals": 3}, "file.arrivals is 3; it must be an object"),
        ({"prompt": 0}, "file.prompt is 0; it must be an integer of at least 1"),
        (
            {"prompt": {"kind": "uniform", "low": 5, "high": 4}},
            "file.prompt.high is 4; it must be an integer of at least 5",
        ),
        ({"prompt": {"kind": "exponential", "mean": 5}}, "file.prompt.max is missing"),
        ({"prompt": {"kind": "list", "values": []}}, "file.prompt.values is empty"),
        ({"prompt": {"kind": "list", "values": [3, 0]}}, "file.prompt.values[1] is 0"),
        ({"classes": []}, "file.classes is empty"),
        ({"classes": [{"name": "a"}, {"name": "a"}]}, "two classes of one name"),
        ({"classes": [{"name": "a", "share": 0}]}, "file.classes[0].share is 0"),
        ({"classes": [{"name": "a", "priority": "top"}]}, "file.classes[0].priority is 'top'"),
        ({"sed": 3}, "file.sed is not a field; the fields of file are"),
    ],
)
def test_a_bad_file_names_field_and_rule(change, message):
    with pytest.raises(ValueError) as raised:
        workload(**change)
    assert message in str(raised.value)


def test_classes_without_lengths_need_them_above():
    document = {"num_requests": 3, "arrivals": {"kind": "batch"}, "classes": [{"name": "a", "prompt": 3}]}
    with pytest.raises(ValueError, match=r"file.classes\[0\].output is missing"):
        parse_workload(document, "file")
    document["classes"][0]["output"] = 2
    assert parse_workload(document, "file").longest == 5


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"prompt_len": 3}, "requests[0].max_tokens is missing"),
        ({"max_tokens": 3}, "requests[0].prompt_len is missing"),
        ({"prompt_ids": [], "max_tokens": 3}, "requests[0].prompt_ids must be a list of at least one integer"),
        ({"prompt_len": 3, "max_tokens": 3, "output": 4}, "output is 4; it must be at most max_tokens (3)"),
        ({"prompt_len": 3, "max_tokens": 3, "arrival": -1}, "arrival is -1; it must be a finite number of at least 0"),
    ],
)
def test_a_bad_list_names_field_and_rule(entry, message):
    with pytest.raises(ValueError) as raised:
        listed_workload({"requests": [entry]}, "file")
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "trace.jsonl has no requests"),
        ('{"kind": "header"}\n{"kind": "header"}\n', "line 2 is no trace record"),
        ('{"decode": []}\n', "line 1 is no trace record; a trace begins with its header"),
        ("7\n", "is not a trace"),
        ('{"kind": "header"}\n{"decode": ["a"]}\n', "a record or request lacks 'a'; a trace must be whole"),
        ("x\n", "is not a trace (JSON lines, as --trace_file writes them)"),
    ],
)
def test_a_bad_trace_is_named(tmp_path, text, message):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError) as raised:
        load_workload(path)
    assert message in str(raised.value)


def test_a_workload_file_that_is_not_there(tmp_path):
    for name in ("a.json", "a.jsonl"):
        with pytest.raises(ValueError, match="cannot be read: No such file or directory"):
            load_workload(tmp_path / name)
    (tmp_path / "a.json").write_text(json.dumps([1]))
    with pytest.raises(ValueError, match=r"a.json is \[1\]; it must be an object"):
        load_workload(tmp_path / "a.json")
