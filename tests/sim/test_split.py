"""Prefill and decode on engines of their own, simulated: instants that can be computed by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import SchedulerConfig
from jaxserve.replay import main as replay_main
from jaxserve.scheduler import TraceWriter
from jaxserve.scheduler.trace_reader import TraceReader
from jaxserve.sim import Arrival, Objectives, SimulationResult, Simulator, TimedSource, UnitCost, figures
from jaxserve.sim.arrivals import ClosedLoop
from jaxserve.sim.replayer import replay
from jaxserve.sim.source import make_request, prompt_of
from jaxserve.sim.split import Link, Split
from jaxserve.simulate import main

LINK = Link(bandwidth=400.0, latency_s=0.1, page_bytes=100.0)
"""A page takes a quarter of a second."""


def config(**changes: Any) -> SchedulerConfig:
    settings: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "prefill_chunk": 8,
        "page_size": 4,
        "num_pages": 100,
        "max_model_len": 64,
    }
    return SchedulerConfig(**settings | changes)


def arrivals(*requests: tuple[float, int, int]) -> Iterator[Arrival]:
    """Each as instant, prompt and output tokens."""
    for number, (at, prompt, output) in enumerate(requests):
        request = make_request(f"r{number}", prompt_of(number, prompt), output)
        yield Arrival(at, request, output, "all")


def run(*requests: tuple[float, int, int], **settings: Any) -> SimulationResult:
    settings = {"num_prefill": 1, "num_decode": 1, "min_tokens": 8} | settings
    prefill = settings.pop("prefill", config())
    return Split(prefill, config(), UnitCost(), LINK, **settings).run(TimedSource(arrivals(*requests)))


def test_pages_leave_as_they_are_computed_and_the_first_token_counts_from_the_arrival() -> None:
    """12 of 14 tokens in two iterations: 2 pages leave from 6 to 6.5, one from 7 to 7.25; the rest at 7.35 to 8.35."""
    result = run((5.0, 14, 2))
    assert list(result.log.arrived_at) == [5.0]
    assert list(result.log.started_at) == [pytest.approx(7.35)]
    assert list(result.log.first_at) == [pytest.approx(8.35)]
    assert list(result.log.last_at) == [pytest.approx(9.35)]
    split = figures(result, Objectives())["split"]
    assert (split["sent_requests"], split["sent_pages"], split["prefill_tokens"]) == (1, 3, 12)
    assert split["transfer_s"]["max"] == pytest.approx(0.35)
    assert result.totals.tokens == 3  # two of the prompt, one fed back


def test_one_request_s_pages_wait_for_another_s() -> None:
    result = run((0.0, 9, 1), (0.0, 9, 1))
    # Both prompts' two pages are there at 1; the link has them away at 1.5 and 2.
    assert list(result.log.started_at) == [pytest.approx(1.6), pytest.approx(2.6)]
    split = figures(result, Objectives())["split"]
    assert split["transfer_s"]["max"] == pytest.approx(1.1)


def test_short_and_refused_prompts_are_the_decode_engine_s() -> None:
    result = run((0.0, 8, 1), (0.0, 30, 1), (0.0, 30, 1), prefill=config(max_num_seqs=1, max_queue_requests=0))
    split = figures(result, Objectives())["split"]
    assert (split["short_prompts"], split["refused_prompts"], split["sent_requests"]) == (1, 1, 1)
    assert figures(result, Objectives())["completed"] == 3


def test_engines_take_turns() -> None:
    result = run(*((0.0, 30, 4) for _ in range(6)), num_prefill=3, num_decode=2)
    split = figures(result, Objectives())["split"]
    assert (split["sent_requests"], split["prefill_engines"], split["decode_engines"]) == (6, 3, 2)
    assert split["sent_pages"] == 6 * 7 and len(result.log) == 6


def test_without_prefill_engines_one_engine_is_a_simulator_alone() -> None:
    requests = [(0.5 * number, 5 + 3 * number, 4) for number in range(8)]
    alone = Simulator(config(), UnitCost(), TimedSource(arrivals(*requests))).run()
    split = run(*requests, num_prefill=0)
    assert list(split.log.last_at) == list(alone.log.last_at)
    assert (split.totals.iterations, split.totals.tokens) == (alone.totals.iterations, alone.totals.tokens)


def test_arrivals_that_depend_on_ends_are_refused() -> None:
    split = Split(config(), config(), UnitCost(), LINK, num_prefill=1, num_decode=1)
    with pytest.raises(ValueError, match="arrivals depend on ends"):
        split.run(ClosedLoop(iter(()), 2, 0.0))


def test_engines_of_different_pages_are_refused() -> None:
    with pytest.raises(ValueError, match="must have one page_size"):
        Split(config(page_size=8), config(), UnitCost(), LINK, num_prefill=1, num_decode=1)


def test_both_sides_traces_replay(tmp_path: Path) -> None:
    writers: dict[str, TraceWriter] = {}

    def make_trace(name: str, config: SchedulerConfig) -> TraceWriter:
        writers[name] = TraceWriter(tmp_path / name, config=config)
        return writers[name]

    run(*((0.3 * number, 10 + 2 * number, 5) for number in range(12)), make_trace=make_trace)
    for name, writer in writers.items():
        writer.close()
        report = replay(TraceReader(tmp_path / name))
        assert report.difference is None and report.num_requests == 12
    assert sorted(writers) == ["decode0", "prefill0"]


def test_both_sides_are_drawn_on_one_time_axis(tmp_path: Path) -> None:
    writers: list[TraceWriter] = []

    def make_trace(name: str, config: SchedulerConfig) -> TraceWriter:
        writers.append(TraceWriter(tmp_path / f"{name}.jsonl", config=config))
        return writers[-1]

    run((5.0, 14, 2), make_trace=make_trace)
    for writer in writers:
        writer.close()
    traces = [f"--trace={tmp_path}/decode0.jsonl", f"--with_trace={tmp_path}/prefill0.jsonl"]
    assert replay_main(["replay", *traces, f"--perfetto={tmp_path}/both.json"]) == 0
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    drawn = [(e["pid"], e["ph"], e["name"], e["ts"], e.get("dur")) for e in events if "r0" in e["name"]]
    assert drawn == [
        (1, "b", "remote prefill r0", 0, None),
        (1, "e", "remote prefill r0", 2_350_000, None),
        (1, "X", "prefill r0", 2_350_000, 1_000_000),
        (1, "X", "decode r0", 3_350_000, 1_000_000),
        (2, "X", "prefill r0", 0, 2_000_000),
    ]
    with pytest.raises(SystemExit):
        replay_main(["replay", *traces])


def test_a_prefill_engine_that_is_cut_short_is_told_of() -> None:
    """Two prompts of 28 tokens need 8 iterations of 8; each decode engine needs 4 at most."""
    slow = config(max_num_batched_tokens=8)
    requests = (0.0, 30, 1), (0.0, 30, 1)
    assert run(*requests, prefill=slow, num_decode=2).termination == "all_terminal"
    result = run(*requests, prefill=slow, num_decode=2, max_iterations=6)
    assert result.termination == "iteration_limit"
    assert len(result.log.last_at) == 2


@pytest.mark.parametrize("setting", ["prefill_chunk=16,32", "prefill_chunk=", "chunk=3"])
def test_a_prefill_setting_has_one_value(setting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "w.json").write_text(json.dumps({"requests": [{"arrival": 0, "prompt_len": 4, "max_tokens": 1}]}))
    flags = ["--kv_token_bytes=1000", "--prefill_engines=1", f"--prefill_setting={setting}"]
    with pytest.raises(SystemExit) as ended:
        main(["simulate", f"--workload={tmp_path}/w.json", *flags])
    assert ended.value.code not in (0, None)
    assert f"prefill_setting is {setting!r}" in str(ended.value.code) + capsys.readouterr().err


def test_the_command_writes_figures_and_a_trace_of_every_engine(tmp_path: Path) -> None:
    workload = {"requests": [{"arrival": 0.1 * index, "prompt_len": 40, "max_tokens": 4} for index in range(6)]}
    (tmp_path / "w.json").write_text(json.dumps(workload))
    flags = ["--max_num_seqs=4", "--remote_prefill_min_tokens=16", "--kv_token_bytes=1000", "--prefill_engines=1"]
    flags += ["--prefill_setting=prefill_chunk=32", f"--trace_file={tmp_path}/t.jsonl", f"--output={tmp_path}/o.json"]
    with pytest.raises(SystemExit) as ended:
        main(["simulate", f"--workload={tmp_path}/w.json", *flags])
    assert ended.value.code == 0
    document = json.loads((tmp_path / "o.json").read_text())
    assert document["figures"]["split"]["sent_requests"] == 6
    assert document["settings"]["prefill_engines"] == 1
    assert TraceReader(tmp_path / "t.prefill0.jsonl").header.config.prefill_chunk == 32
    assert TraceReader(tmp_path / "t.decode0.jsonl").header.config.prefill_chunk != 32
