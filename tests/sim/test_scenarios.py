"""Scenarios: the references to the letter through the command, random ones against an independent model."""

import copy
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.sim.scenario import difference, parse_scenario, run_scenario
from jaxserve.simulate import main
from tests.sim import brute_force

REFERENCES = sorted((Path(__file__).parents[1] / "golden" / "scheduler").glob("*.json"))
SHIPPED = sorted((Path(__file__).parents[2] / "configs" / "scenarios").glob("*.json"))
POLICY = {"max_active": 2, "max_queue": 2, "token_budget": 6, "prefill_chunk": 3, "priority_preemption": True}


def simulate(*words):
    """Exit status of the command."""
    with pytest.raises(SystemExit) as raised:
        main(["simulate", *map(str, words)])
    return raised.value.code


def request(request_id, arrival=0, prompt=1, output=1, **fields):
    return {"id": request_id, "arrival": arrival, "priority": "normal", "prompt": prompt, "output": output, **fields}


def run(*requests, limit=1000, **policy):
    return run_scenario(parse_scenario({"policy": POLICY | policy, "requests": list(requests)}, "case"), limit)


@pytest.mark.parametrize("path", REFERENCES, ids=lambda path: path.stem)
def test_the_command_gives_the_reference_to_the_letter(path, tmp_path, capsys):
    output = tmp_path / "output.json"
    assert simulate(f"--scenario={path}", f"--output={output}") == 0
    assert "as expected" in capsys.readouterr().err
    reference, found = json.loads(path.read_text()), json.loads(output.read_text())
    expected = reference["expected"]
    assert found["termination"] == expected["termination"]
    assert found["policy"] == reference["policy"]
    assert [{key: record[key] for key in expected["trace"][0]} for record in found["trace"]] == expected["trace"]
    assert found["requests"] == expected["requests"]


def test_groups_of_layers_have_pages_of_their_own_in_a_scenario():
    settings = {"page_size": 2, "num_pages": 33, "group_windows": [0, 4]}
    found = run(request("a", prompt=6, output=30), **settings)
    # Of 34 tokens, the last but one: 17 pages of the group that sees all, and three of the other one.
    assert max(record["pages_owned"] for record in found["trace"]) == 17 + 3
    assert found["requests"]["a"]["result"] == "completed"
    with pytest.raises(ValueError, match=r"group_windows is \[0, 'x'\]; it must be a list of integers"):
        run(request("a", prompt=6, output=30), **settings | {"group_windows": [0, "x"]})
    with pytest.raises(ValueError, match=r"policy: group_windows is .* equal ones side by side"):
        run(request("a", prompt=6, output=30), **settings | {"group_windows": [0, 4, 0]})


def test_a_window_bounds_the_pages_of_a_scenario():
    long = [request("a", prompt=6, output=30), request("b", prompt=3, output=30)]
    settings = {"page_size": 2, "num_pages": 9}
    found = run(*long, **settings, sliding_window=4)
    # Three pages decode, and a chunk of 3 and its window lie in four.
    assert max(record["pages_owned"] for record in found["trace"]) <= 2 * 4
    assert found["requests"]["a"]["result"] == found["requests"]["b"]["result"] == "completed"
    assert run(*long, **settings)["requests"]["a"]["result"] == "rejected"


def test_there_are_references_and_shipped_scenarios():
    assert len(REFERENCES) == 5
    assert len(SHIPPED) >= 2


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_scenario_is_as_the_independent_model_has_it(path, tmp_path):
    assert simulate(f"--scenario={path}", f"--output={tmp_path / 'output.json'}") == 0
    document = json.loads(path.read_text())
    assert document["expected"] == brute_force.simulate(document)


def random_scenario(rng):
    """Small limits and many requests, so that queue bounds, preemption and short budgets are common."""
    max_active = rng.randint(1, 4)
    policy = {
        "max_active": max_active,
        "max_queue": rng.randint(0, 4),
        "token_budget": max_active + rng.randint(0, 8),
        "prefill_chunk": rng.randint(1, 8),
        "priority_preemption": rng.random() < 0.7,
    }
    horizon = rng.choice((0, 5, 20, 200))
    return {
        "policy": policy,
        "requests": [
            request(
                f"r{index}",
                rng.randint(0, horizon),
                rng.randint(1, 12),
                rng.randint(1, 6),
                priority=rng.choice(("high", "normal", "low")),
            )
            for index in range(rng.randint(1, 20))
        ],
    }


def test_random_scenarios_equal_the_independent_model():
    rng = random.Random(20240607)
    counts = {"preempted": 0, "rejected": 0, "idle": 0}
    for number in range(1500):
        scenario = random_scenario(rng)
        expected = brute_force.simulate(scenario)
        found = run_scenario(parse_scenario(scenario, f"random {number}"))
        assert difference(expected, found) is None, (difference(expected, found), scenario)
        assert found["requests"].keys() == expected["requests"].keys()
        counts["preempted"] += sum(len(record["preempted"]) for record in expected["trace"])
        counts["rejected"] += sum(len(record["rejected"]) for record in expected["trace"])
        counts["idle"] += expected["trace"][-1]["iteration"] + 1 > len(expected["trace"])
    # The cases that make the comparison worth something did occur.
    assert min(counts.values()) > 150, counts


def test_the_comparison_sees_a_difference():
    reference = json.loads(REFERENCES[0].read_text())
    output = run_scenario(parse_scenario(reference, "reference"))
    assert difference(reference["expected"], output) is None
    for path, value, where in (
        (("termination",), "other", "termination is"),
        (("trace", 1, "queue"), ["X"], r"trace\[1\].queue is"),
        (("requests", "A", "completed"), 99, "requests.A.completed is"),
    ):
        changed = copy.deepcopy(output)
        inner = changed
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        assert difference(reference["expected"], changed).startswith(where.replace("\\", ""))
    longer = copy.deepcopy(output)
    longer["trace"].append(longer["trace"][-1])
    assert "records; expected are" in difference(reference["expected"], longer)


def test_an_unexpected_result_exits_1_and_says_where(tmp_path, capsys):
    document = json.loads(REFERENCES[0].read_text())
    document["expected"]["trace"][2]["unused_budget"] += 1
    path = tmp_path / "scenario.json"
    path.write_text(json.dumps(document))
    assert simulate(f"--scenario={path}", f"--output={tmp_path / 'output.json'}") == 1
    assert "not as expected: trace[2].unused_budget is" in capsys.readouterr().err


def test_scheduler_flags_replace_the_policy(tmp_path):
    output = tmp_path / "output.json"
    chunk_6 = next(path for path in REFERENCES if path.stem == "prefill_chunk_6")
    baseline = next(path for path in REFERENCES if path.stem == "baseline")
    assert simulate(f"--scenario={baseline}", "--prefill-chunk=6", f"--output={output}") == 1
    found = json.loads(output.read_text())
    assert found["policy"] == json.loads(baseline.read_text())["policy"] | {"prefill_chunk": 6}
    assert difference(json.loads(chunk_6.read_text())["expected"], found) is None


def test_other_settings_come_from_policy_or_flags_and_are_in_the_output(tmp_path):
    """A was preempted by B. C passes it in the queue when it may claim the slot that B leaves."""
    requests = [request("A", 0, 4, 4), request("B", 1, 2, 1, priority="high"), request("C", 2, 1, 1)]
    first = [run(*requests, max_active=1, arrivals_claim_slots=claims)["requests"] for claims in (True, False)]
    assert [[each["first_output"] for each in found.values()] for found in first] == [[3, 1, 2], [2, 1, 6]]
    path, output = tmp_path / "scenario.json", tmp_path / "output.json"
    path.write_text(json.dumps({"policy": POLICY | {"max_active": 1}, "requests": requests}))
    assert simulate(f"--scenario={path}", "--noarrivals_claim_slots", f"--output={output}") == 0
    found = json.loads(output.read_text())
    assert (found["requests"], found["policy"]["arrivals_claim_slots"]) == (first[1], False)


def test_time_jumps_over_idle_iterations():
    output = run(request("A"), request("B", arrival=1_000_000))
    assert [record["iteration"] for record in output["trace"]] == [0, 1_000_000]
    assert output["requests"]["B"] == {
        "first_output": 1_000_000,
        "completed": 1_000_000,
        "preemptions": 0,
        "result": "completed",
    }


def test_a_live_id_is_refused_and_an_ended_one_is_free_again():
    output = run(request("A", output=2), request("A"), request("A", arrival=5))
    assert [record["rejected"] for record in output["trace"]] == [["A"], [], []]
    assert [output["requests"][name]["result"] for name in ("A", "A#2", "A#3")] == [
        "completed",
        "rejected",
        "completed",
    ]
    assert output["requests"]["A#3"]["completed"] == 5


def test_a_refusal_while_nothing_runs_has_a_record_of_its_own():
    output = run(request("A"), request("long", arrival=3, prompt=50), request("B", arrival=7), max_model_len=10)
    assert [(record["iteration"], record["rejected"]) for record in output["trace"]] == [
        (0, []),
        (3, ["long"]),
        (7, []),
    ]
    assert output["trace"][1]["unused_budget"] == 6
    assert output["requests"]["long"]["result"] == "rejected"


def test_a_displaced_request_is_rejected_in_the_iteration_that_displaced_it():
    high = request("H", 1, priority="high")
    output = run(
        *(request(name, output=3) for name in "ABCD"), high, queue_displacement=True, priority_preemption=False
    )
    assert [record["rejected"] for record in output["trace"]][:3] == [[], ["D"], []]
    assert output["requests"]["D"]["result"] == "rejected"


def test_more_refusals_in_an_iteration_than_a_record_holds_are_all_in_its_record():
    names = [f"r{number}" for number in range(600)]
    output = run(*map(request, names))
    assert output["trace"][0]["rejected"] == names[4:]
    assert [record["iteration"] for record in output["trace"]] == [0, 1]


def test_the_iteration_limit_ends_a_run_and_says_so():
    output = run(request("A", output=50), request("B", arrival=90), limit=10)
    assert output["termination"] == "iteration_limit"
    assert len(output["trace"]) == 10
    assert output["requests"]["A"] == {"first_output": 0, "completed": None, "preemptions": 0, "result": "live"}
    assert output["requests"]["B"]["result"] == "not_arrived"
    assert run(request("A", output=10), limit=10)["termination"] == "all_terminal"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["policy"].update(max_active=0), "policy.max_active is 0; it must be an integer of at least 1"),
        (lambda d: d["policy"].update(max_active=True), "policy.max_active is true; it must be an integer"),
        (
            lambda d: d["policy"].update(max_active=7),
            "policy.max_active is 7 and token_budget is 6; max_active must be",
        ),
        (lambda d: d["policy"].pop("max_queue"), "policy.max_queue is missing; it must be given"),
        (lambda d: d["policy"].update(max_num_seqs=2), "policy.max_num_seqs is not a field; the fields of"),
        (lambda d: d["policy"].update(page_size=0), "policy: page_size is 0; it must be a power of two"),
        (lambda d: d["policy"].update(page_size="x"), 'policy.page_size is "x"; it must be an integer'),
        (lambda d: d["policy"].update(arrivals_claim_slots=1), "arrivals_claim_slots is 1; it must be true or false"),
        (lambda d: d["policy"].update(itl_target_s="x"), 'policy.itl_target_s is "x"; it must be a finite number'),
        (lambda d: d["policy"].update(service_classes=[]), "service_classes is a file of its own; give it as --serv"),
        (lambda d: d["policy"].update(policy="best"), "policy is 'best'; it must be one of"),
        (lambda d: d["policy"].update(priority_preemption=1), "priority_preemption is 1; it must be true or false"),
        (lambda d: d["requests"][0].update(output=0), "requests[0].output is 0; it must be an integer of at least 1"),
        (
            lambda d: d["requests"][0].update(arrival=-1),
            "requests[0].arrival is -1; it must be an integer of at least 0",
        ),
        (lambda d: d["requests"][0].update(priority="urgent"), "requests[0].priority is 'urgent'; it must be one of"),
        (lambda d: d["requests"][0].update(id=7), "requests[0].id is 7; it must be text"),
        (lambda d: d["requests"][0].update(colour=7), "requests[0].colour is not a field"),
        (lambda d: d.update(requests={}), "requests is {}; it must be list"),
        (lambda d: d.pop("policy"), "policy is missing"),
    ],
)
def test_a_bad_file_names_field_and_rule(tmp_path, capsys, change, message):
    document = {"policy": dict(POLICY), "requests": [request("A")]}
    change(document)
    path = tmp_path / "scenario.json"
    path.write_text(json.dumps(document))
    assert simulate(f"--scenario={path}") == 2
    error = capsys.readouterr().err
    assert message in error
    assert "scenario.json" in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--scenario=/no/file",), "/no/file cannot be read: No such file"),
        ((f"--scenario={__file__}",), "test_scenarios.py is not JSON"),
        ((), "give either --scenario=FILE or --workload=FILE"),
        (("--scenario=a", "--workload=b"), "give either --scenario=FILE or --workload=FILE"),
        (("--scenario=a", "--rate=1"), "rate is given with scenario; it is for a workload"),
        (("--scenario=a", "--trace_file=b"), "trace_file is given with scenario; it is for a workload"),
    ],
)
def test_a_bad_command_line_is_answered(capsys, words, message):
    assert simulate(*words) == 2
    assert message in capsys.readouterr().err


def test_a_simulation_never_loads_jax():
    """A process of its own: other tests have loaded jax in this one."""
    script = (
        "import sys\nfrom jaxserve.simulate import main\n"
        f"try: main(['simulate', '--scenario={REFERENCES[0]}'])\n"
        "except SystemExit as error: print(error.code, 'jax' in sys.modules, 'jaxlib' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "0 False False"
    assert json.loads(done.stdout)["termination"] == "all_terminal"
