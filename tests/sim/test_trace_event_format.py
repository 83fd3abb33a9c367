"""The Perfetto export of a simulated run keeps the rules of the format, and the check of the rules has teeth."""

from __future__ import annotations

import copy
import io
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxserve.scheduler.trace_reader import TraceReader
from jaxserve.sim.perfetto import PerfettoWriter
from jaxserve.sim.replayer import replay
from jaxserve.simulate import main as simulate
from tests.sim.recording import LACKING_PAGES, random_run, write_trace
from tests.sim.trace_event_format import Event, violations

Document = dict[str, Any]


def exported(trace: Path) -> Document:
    reader = TraceReader(trace)
    file = io.StringIO()
    writer = PerfettoWriter(file, reader.header)
    assert replay(reader, observe=writer).difference is None
    writer.close()
    document: Document = json.loads(file.getvalue())
    return document


def simulated(folder: Path, max_steps_ahead: int) -> Path:
    """The trace of a simulation in which pages run out, requests are preempted and refused."""
    workload, trace = folder / "workload.json", folder / f"trace{max_steps_ahead}.jsonl"
    prompt, output = {"kind": "uniform", "low": 8, "high": 30}, {"kind": "exponential", "mean": 80, "max": 200}
    kind = {"name": "a", "share": 1.0, "prompt": prompt, "output": output}
    arrivals = {"kind": "poisson", "rate": 0.3}
    content = {"name": "w", "num_requests": 150, "seed": 1, "arrivals": arrivals, "classes": [kind]}
    workload.write_text(json.dumps(content))
    settings = ["--max_num_seqs=8", "--num_pages=25", f"--max_steps_ahead={max_steps_ahead}", "--max_queue_requests=6"]
    settings += ["--reservation=optimistic", "--preemption=recompute"]
    with pytest.raises(SystemExit, match="0"):
        simulate(["prog", f"--workload={workload}", f"--trace_file={trace}", *settings])
    return trace


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Document:
    """The export of a simulation with a step in flight."""
    return exported(simulated(tmp_path_factory.mktemp("run"), 1))


def test_the_export_of_a_simulation_keeps_every_rule(document: Document, tmp_path: Path) -> None:
    for each in (document, exported(simulated(tmp_path, 0))):
        assert violations(each) == []
        counts = Counter(event["name"].split()[0] for event in each["traceEvents"])
        assert counts["preempted"] > 5 and counts["rejected"] > 5 and counts["prefill"] > counts["preempted"]
        assert len({event["tid"] for event in each["traceEvents"] if event["ph"] == "X"}) == 1 + 8


@pytest.mark.parametrize("seed", range(16))
def test_the_export_of_any_run_keeps_every_rule(tmp_path: Path, seed: int) -> None:
    changes = LACKING_PAGES if seed % 2 else {}
    harness = random_run(seed, seed % 4, **changes)
    assert violations(exported(write_trace(tmp_path / "t", harness.config, harness.records))) == []


def first(document: Document, **fields: Any) -> Event:
    events: list[Event] = document["traceEvents"]
    return next(event for event in events if all(event.get(key) == value for key, value in fields.items()))


def overlap(document: Document) -> None:
    """The second iteration begins a microsecond before the first has ended."""
    before = first(document, ph="X", tid=0)
    after = first(document, ph="X", tid=0, ts=before["ts"] + before["dur"])
    after["ts"] -= 1


BREACHES: dict[str, tuple[Callable[[Document], Any], str]] = {
    "no list": (lambda d: d.pop("traceEvents"), "the document must be an object with a list traceEvents"),
    "unit": (lambda d: d.update(displayTimeUnit="us"), "displayTimeUnit must be ms or ns"),
    "no object": (lambda d: d["traceEvents"].append(3), "it must be an object"),
    "phase": (lambda d: first(d, ph="X").update(ph="Y"), "ph must be one of X, i, C, M"),
    "no name": (lambda d: first(d, ph="X").pop("name"), "name must be a text"),
    "no pid": (lambda d: first(d, ph="C").pop("pid"), "pid must be an integer"),
    "no tid": (lambda d: first(d, ph="X").pop("tid"), "tid must be an integer"),
    "tid is a text": (lambda d: first(d, ph="i").update(tid="slot 0"), "tid must be an integer"),
    "no ts": (lambda d: first(d, ph="i").pop("ts"), "ts must be a number of microseconds"),
    "ts is a text": (lambda d: first(d, ph="X").update(ts="0"), "ts must be a number of microseconds"),
    "negative ts": (lambda d: first(d, ph="C").update(ts=-1), "ts must be a number of microseconds, 0 or more"),
    "no dur": (lambda d: first(d, ph="X").pop("dur"), "dur must be a number of microseconds"),
    "negative dur": (lambda d: first(d, ph="X").update(dur=-0.5), "dur must be a number of microseconds, 0 or more"),
    "dur is no number": (lambda d: first(d, ph="X").update(dur=float("nan")), "dur must be a number of microseconds"),
    "no cat": (lambda d: first(d, ph="X").pop("cat"), "cat must be a text"),
    "scope": (lambda d: first(d, ph="i").update(s="x"), "s must be g, p or t"),
    "args": (lambda d: first(d, ph="X").update(args=[1]), "args must be an object"),
    "counter of nothing": (lambda d: first(d, ph="C")["args"].clear(), "args of a counter must be numbers"),
    "counter of text": (lambda d: first(d, ph="C")["args"].update(x="1"), "args of a counter must be numbers"),
    "counter of truth": (lambda d: first(d, ph="C")["args"].update(x=True), "args of a counter must be numbers"),
    "metadata": (lambda d: first(d, ph="M").update(name="slot_name"), "name of metadata must be one of process_name"),
    "metadata args": (lambda d: first(d, name="thread_name")["args"].clear(), "args of thread_name must have name"),
    "sort index": (
        lambda d: first(d, name="thread_sort_index")["args"].update(sort_index="1"),
        "args of thread_sort_index must have sort_index, of type int",
    ),
    "thread without a name": (
        lambda d: d["traceEvents"].remove(first(d, name="thread_name", tid=1)),
        "thread_name of process 1, thread 1 is missing",
    ),
    "process without a name": (
        lambda d: d["traceEvents"].remove(first(d, name="process_name")),
        "process_name of process 1, thread None is missing",
    ),
    "name given twice": (
        lambda d: d["traceEvents"].append(first(d, name="thread_name", tid=0)),
        "thread_name of process 1, thread 0 is given more than once",
    ),
    "overlap": (overlap, "it overlaps another of thread (1, 0) and is not inside it"),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_a_breach_of_a_rule_is_found(document: Document, breach: str) -> None:
    broken = copy.deepcopy(document)
    change, rule = BREACHES[breach]
    change(broken)
    found = violations(broken)
    assert found and all(rule in each for each in found), found


def test_spans_may_be_nested_touch_or_be_empty() -> None:
    names = [
        {"ph": "M", "name": kind, "pid": 1, "tid": 0, "args": {"name": "x"}} for kind in ("process_name", "thread_name")
    ]
    spans = [(0, 10), (0, 4), (4, 6), (4, 0), (10, 0), (10, 5)]
    place = {"ph": "X", "name": "x", "cat": "x", "pid": 1, "tid": 0}
    assert violations({"traceEvents": names + [{**place, "ts": ts, "dur": dur} for ts, dur in spans]}) == []
