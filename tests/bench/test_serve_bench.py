"""bench serve and compare, whole commands against servers with known answers."""

import json
import sys

import pytest

from jaxserve.bench.__main__ import main
from jaxserve.bench.load import plots
from jaxserve.bench.load.record import COMPLETED, Record
from tests.bench.scripted_server import Script, ScriptedServer
from tests.server.fake_engine import FakeEngine
from tests.server.running import RunningServer

FAKE = f"{sys.executable} -m tests.server.fake_main 1 {{step_s}} {{port}}"
SMALL = ("--num_requests=6", "--prompt_lengths=5", "--output_lengths=4", "--vocab_size=90", "--warmup_requests=2")


def bench(tmp_path, *words):
    output = tmp_path / "figures.json"
    main(["bench", *words, f"--output={output}"])
    return json.loads(output.read_text())


@pytest.fixture
def engine_server():
    engine = FakeEngine()
    engine.step_s = 0.01
    server = RunningServer(lambda: engine)
    yield server
    server.stop()


def test_serve_reports_medians_of_runs(engine_server, tmp_path, capsys):
    document = bench(tmp_path, "serve", f"--url={engine_server.url}", *SMALL, "--runs=3")
    assert document["settings"]["served_model"] == "fake"
    assert document["machine"]["cpu_cores"] > 0
    (result,) = document["results"]
    assert (result["completed"], result["refused"], result["failed"], result["short_outputs"]) == (6, 0, 0, 0)
    assert (result["output_tokens"], result["prompt_tokens"], result["tokens_per_event"]) == (24, 30, 1.0)
    assert 10 <= result["itl_ms"]["p50"] < 60 and 10 <= result["ttft_ms"]["p50"] < 100
    assert len(result["runs"]) == 3 and result["client_us_per_token"] > 0
    assert result["slo_share"] == 1.0
    assert "TTFT ms" in " ".join(capsys.readouterr().out.split())


def test_serve_sweeps_rates_as_factors_of_a_measured_capacity(engine_server, tmp_path):
    folder = tmp_path / "plots"
    words = ("--factors=0.5,2", "--runs=1", "--slo_itl_ms=1", f"--plots={folder}")
    document = bench(tmp_path, "serve", f"--url={engine_server.url}", *SMALL, *words)
    capacity, *swept = document["results"]
    assert capacity["rate"] is None and capacity["completed"] == 6
    assert [result["rate"] / capacity["requests_per_s"] for result in swept] == pytest.approx([0.5, 2])
    assert [result["factor"] for result in swept] == [0.5, 2]
    assert all(result["slo_share"] == 0 and result["goodput_requests_per_s"] == 0 for result in swept)
    assert {path.name for path in folder.iterdir()} == {"latencies.svg", "arrivals.svg", "rates.svg"}


def test_w3_is_sent_at_factors_of_its_own_capacity(tmp_path):
    with ScriptedServer(lambda number, body: Script()) as server:
        words = ("--served_model=m", "--workload=w3", "--num_requests=20", "--runs=1", "--warmup_requests=1")
        document = bench(tmp_path, "serve", f"--url={server.url}", *words)
    capacity, *rated = document["results"]
    assert [result["factor"] for result in rated] == [0.5, 0.8, 1.0, 1.2]
    assert [result["rate"] / capacity["requests_per_s"] for result in rated] == pytest.approx([0.5, 0.8, 1.0, 1.2])
    assert all(result["completed"] == 20 for result in document["results"])
    # Each setting sends a warm-up as long as w1's first prompt, then twenty requests, the tenth and the last one long.
    of_setting = [[len(body["prompt"]) for body in server.bodies[first : first + 21]] for first in range(0, 105, 21)]
    assert all(lengths.count(2000) == 2 and lengths[0] == 40 for lengths in of_setting)


def test_arrivals_are_drawn_from_each_runs_own_start(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(plots, "save_figure", lambda figure, folder, name, form: drawn.update({name: figure}))
    runs = [
        [Record(at + start, 1, 1, at + start, [at + start + 0.2], 1, 0.0, COMPLETED) for at in (0, 1)]
        for start in (5, 9)
    ]
    plots.draw([{"rate": 1.0}], [runs], str(tmp_path), "svg")
    (dots,) = drawn["arrivals"].axes[0].lines
    assert sorted(dots.get_xdata()) == [0, 0, 1, 1] and list(dots.get_ydata()) == pytest.approx([200] * 4)
    drawn.clear()
    plots.draw([{"rate": None}], [[run[:1] for run in runs]], str(tmp_path), "svg")
    assert list(drawn) == ["latencies"]


def test_serve_counts_refusals_with_their_latencies(tmp_path):
    full = json.dumps({"error": {"message": "full"}})

    def script(number, body):
        return Script(429, {"Retry-After": "2"}, full) if number % 3 == 0 else Script(gap_s=0.01)

    with ScriptedServer(script) as server:
        words = ("--served_model=m", "--warmup_requests=0", "--rates=40", "--runs=1")
        document = bench(tmp_path, "serve", f"--url={server.url}", *SMALL, *words)
    (result,) = document["results"]
    assert (result["completed"], result["refused"], result["refused_by_status"]) == (4, 2, {"429": 2})
    assert 0 <= result["refusal_ms"]["p50"] < 150 and result["retry_after_s"] == 2
    assert result["slo_share"] == pytest.approx(4 / 6)


def test_a_server_that_only_fails_is_said(tmp_path, capsys):
    with (
        ScriptedServer(lambda number, body: Script(404, {}, "no such route")) as server,
        pytest.raises(SystemExit) as raised,
    ):
        bench(tmp_path, "serve", f"--url={server.url}", "--served_model=m", *SMALL)
    assert raised.value.code == 1
    assert "every request to" in (said := capsys.readouterr().err) and "404: no such route" in said


def test_compare_runs_two_servers_in_turns(tmp_path):
    fast, slow = (FAKE.replace("{step_s}", step) for step in ("0.01", "0.03"))
    document = bench(tmp_path, "compare", f"--a={fast}", f"--b={slow}", *SMALL)
    rows = {row["figure"]: row for row in document["results"]}
    gap = rows["itl_ms.p50"]
    assert gap["pairs"] == 5 == len(document["a"]["runs"]) == len(document["b"]["runs"])
    assert 10 <= gap["a"] < 30 <= gap["b"]
    assert 1 < gap["least"] <= gap["first_quartile"] <= gap["ratio_b_over_a"] <= gap["third_quartile"] <= gap["largest"]
    assert rows["output_tokens_per_s"]["ratio_b_over_a"] < 1


def test_compare_sends_both_the_same_and_to_one_at_a_time(tmp_path):
    order = []

    def side(name):
        def script(number, body):
            order.append((name, tuple(body["prompt"])))
            return Script()

        return ScriptedServer(script)

    with side("a") as a, side("b") as b:
        words = (f"--a_url={a.url}", f"--b_url={b.url}", "--served_model=m", "--num_requests=1", "--warmup_requests=0")
        bench(tmp_path, "compare", *words)
    assert [name for name, _ in order] == ["a", "b"] * 5
    assert [prompt for name, prompt in order if name == "a"] == [prompt for name, prompt in order if name == "b"]
    assert len({prompt for _, prompt in order}) == 5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("serve",), "give url, of a running server, or server"),
        (("serve", "--url=127.0.0.1:8000"), "url is '127.0.0.1:8000'; it must be http:// or https://"),
        (("serve", "--url=http://x/v1"), "without /v1"),
        (("serve", "--server=python3 -c pass"), "has no {port}"),
        (("serve", "--server=no-such-command {port}"), "no-such-command cannot be started"),
        (("serve", "--url=http://127.0.0.1:1", "--capacity=1"), "capacity is given without factors"),
        (("serve", "--url=http://127.0.0.1:1"), "names no model"),
        (("overload",), "give url, of a running server, or server"),
        (("overload", "--url=http://x", "--server=python3 {port}"), "not both"),
        (("overload", "--url=http://x/v1"), "without /v1"),
        (("compare", "--a_url=http://x"), "give b, flags or a command"),
        (("compare", "--a_url=http://x", "--b_url=http://y", "--rates=1,2"), "compare runs one setting"),
        (("compare", "--pairs=4"), "--pairs=4: must be at least 5"),
    ],
)
def test_a_mistake_is_named(capsys, words, message):
    with pytest.raises(SystemExit) as raised:
        main(["bench", *words])
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_a_server_that_ends_at_once_is_said(capsys):
    with pytest.raises(SystemExit) as raised:
        main(["bench", "serve", f"--server={sys.executable} -c exit(3) {{port}}"])
    assert raised.value.code == 1
    assert "the server ended with 3 before it was ready" in capsys.readouterr().err


def test_overload_lasts_equally_long_at_every_factor_and_counts_refusals(tmp_path, capsys):
    full = json.dumps({"error": {"message": "full"}})

    def script(number, body):
        return Script(429, {}, full) if number % 4 == 0 else Script(gap_s=0.01)

    with ScriptedServer(script) as server:
        words = ("--served_model=m", "--warmup_requests=0", "--capacity=40", "--factors=1,3", "--runs=1")
        document = bench(tmp_path, "overload", f"--url={server.url}", *SMALL, *words)
    results = document["results"]
    assert [result["offered"] for result in results] == [6, 18] and [result["rate"] for result in results] == [40, 120]
    assert all(result["refused"] + result["completed"] == result["offered"] for result in results)
    assert sum(result["refused"] for result in results) == 6 and results[0]["client_cpu_share"] > 0
    assert "refusal" in capsys.readouterr().out
