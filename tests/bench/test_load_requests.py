"""What a load sends, and when."""

import json
import re

import numpy as np
import pytest

from jaxserve.bench.load.requests import ramp_instants, read_items, read_load
from jaxserve.config.flags import parse_flags


def load_of(*words):
    return read_load(parse_flags("bench", ["bench", *words]))


@pytest.fixture
def workload(tmp_path):
    path = tmp_path / "few.json"
    requests = [{"prompt_ids": [number, 5, 9], "max_tokens": 3 + number, "arrival": 0.0} for number in range(4)]
    path.write_text(json.dumps({"name": "few", "requests": requests}))
    return path


@pytest.mark.parametrize(("name", "prompts", "outputs", "longest"), [("w1", 9279, 3503, 256), ("w2", 1024, 9440, 900)])
def test_named_workloads_are_there(name, prompts, outputs, longest):
    load = load_of(f"--workload={name}")
    items = load.run(0)
    assert len(items) == 64 and {item.at for item in items} == {0.0}
    assert sum(len(item.prompt) for item in items) == prompts
    assert sum(item.max_tokens for item in items) == outputs
    assert max(item.max_tokens for item in items) == longest


def test_w3_is_poisson_with_a_long_prompt_in_every_tenth():
    load = load_of("--workload=w3", "--num_requests=70")
    items = load.run(0, 2.0)
    assert [number for number, item in enumerate(items, 1) if len(item.prompt) == 2000] == [10, 20, 30, 40, 50, 60]
    gaps = np.diff([item.at for item in items])
    assert load.kind == "poisson" and gaps.min() > 0 and 0.3 < gaps.mean() < 0.8


def test_no_prompt_is_sent_twice(workload):
    load = load_of(f"--workload={workload}", "--num_requests=10")
    assert [item.prompt for item in load.run(0)][:4] == [(0, 5, 9), (1, 5, 9), (2, 5, 9), (3, 5, 9)]
    load = load_of("--num_requests=30", "--prompt_lengths=4", "--vocab_size=5000")
    prompts = [item.prompt for run in range(3) for item in load.run(run)]
    assert len(set(prompts)) == 90
    assert {item.prompt for item in load.warmup(8, 0)}.isdisjoint(prompts)


def test_a_workload_repeats_where_a_run_is_longer(workload):
    items = load_of(f"--workload={workload}", "--num_requests=10").run(0)
    assert [item.max_tokens for item in items] == [3, 4, 5, 6, 3, 4, 5, 6, 3, 4]


def test_drawn_requests_follow_their_distributions():
    words = (
        "--num_requests=400",
        "--prompt_lengths=uniform:low=20,high=40",
        "--output_lengths=exponential:mean=50,max=90",
    )
    items = load_of(*words, "--vocab_size=300").run(0)
    prompts, outputs = [len(item.prompt) for item in items], [item.max_tokens for item in items]
    assert (min(prompts), max(prompts)) == (20, 40) and 28 < np.mean(prompts) < 32
    assert max(outputs) == 90 and 35 < np.mean(outputs) < 50
    tokens = {token for item in items for token in item.prompt}
    assert max(tokens) < 300 and len(tokens) > 250
    assert [(item.max_tokens, len(item.prompt)) for item in load_of(*words, "--seed=1").run(0)] != [
        (item.max_tokens, len(item.prompt)) for item in items
    ]


def test_shared_beginnings_stay_shared(tmp_path):
    path = tmp_path / "shared.json"
    classes = [{"name": "a", "shared_prefix": {"tokens": 6}}]
    arrivals = {"kind": "batch"}
    path.write_text(
        json.dumps({"num_requests": 9, "arrivals": arrivals, "prompt": 10, "output": 2, "classes": classes})
    )
    _, items = read_items(str(path))
    assert len({item.prompt[:6] for item in items}) == 1 and len({item.prompt for item in items}) == 9


def test_gamma_keeps_the_mean_and_sets_the_spread():
    gaps = np.diff(
        [item.at for item in load_of("--num_requests=4000", "--arrivals=gamma", "--rates=5", "--cv=2").run(0, 5.0)]
    )
    assert gaps.mean() == pytest.approx(0.2, rel=0.15) and gaps.std() / gaps.mean() == pytest.approx(2, rel=0.15)


def test_a_ramp_grows_from_rate_to_rate():
    instants = np.asarray(ramp_instants(2.0, 10.0, 6000, seed=0))
    span = 2 * 6000 / 12
    assert instants[-1] == pytest.approx(span, rel=0.05) and (np.diff(instants) > 0).all()
    # The rate is 3 in the middle of the first quarter, 9 in that of the last.
    first, last = ((instants < span / 4).sum(), ((instants > span * 0.75) & (instants < span)).sum())
    assert first / (span / 4) == pytest.approx(3, rel=0.1) and last / (span / 4) == pytest.approx(9, rel=0.1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--workload=w9",), "workload is 'w9'; there is no such file, and the names are w1, w2, w3"),
        (("--arrivals=poisson",), "arrivals is poisson; say how fast"),
        (("--arrivals=batch", "--rates=1"), "arrivals is batch"),
        (("--rates=1", "--factors=1"), "rates and factors are given"),
        (("--rates=1", "--ramp_to=2"), "arrivals ramp and ramp_to go together"),
        (("--arrivals=ramp", "--rates=3", "--ramp_to=2"), "ramp_to is 2; it must be above the first rate (3)"),
        (("--prompt_lengths=uniform:low=4",), "high is missing"),
        (("--prompt_lengths=few",), "prompt_lengths is 'few'; it must be a number or KIND:FIELD=VALUE"),
        (("--workload=configs/workloads/closed_loop.json",), "closed_loop arrivals"),
    ],
)
def test_a_mistake_is_named(words, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load_of(*words)


def test_instants_of_a_workload_are_not_repeated(tmp_path):
    path = tmp_path / "timed.json"
    requests = [{"prompt_len": 3, "max_tokens": 2, "arrival": at} for at in (0.0, 0.5)]
    path.write_text(json.dumps({"requests": requests}))
    assert [item.at for item in load_of(f"--workload={path}").run(0)] == [0.0, 0.5]
    with pytest.raises(ValueError, match="num_requests is 3 and timed has 2"):
        load_of(f"--workload={path}", "--num_requests=3")
