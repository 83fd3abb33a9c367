"""What operators read: the stats line, a line per request, JSON records."""

import io
import json
import logging
import threading
import warnings

import pytest
from absl import logging as absl_logging
from rich.console import Console

from jaxserve.core import EngineTotals, Request, RequestMetrics, RequestRecord
from jaxserve.server.console import StartupDisplay
from jaxserve.server.log_format import JsonFormatter, LogLines
from jaxserve.server.request_log import RequestFeed, RequestLog, request_fields
from jaxserve.server.stats_line import StatsReporter, stats_between
from tests.server.fake_engine import FakeEngine, FakeLoad
from tests.server.running import until

IDLE = FakeLoad(0, 0, 0.0)
SECRET = "the prompt's own words"


def record(outcome="stop", rejected=False, prompt=SECRET, request_id="cmpl-1", **fields):
    request = Request(request_id, tuple(prompt.encode()), tenant="alice")
    metrics = RequestMetrics(10.0, 10.5, 11.0, 13.0)
    given = dict(last_token_at=13.0, num_output_tokens=5, num_cached_tokens=2) | fields
    return RequestRecord(request, 0, outcome, rejected, metrics, **given)


@pytest.fixture
def lines(caplog):
    """The messages logged so far."""
    caplog.set_level(logging.INFO)
    return lambda: [each.getMessage() for each in caplog.records]


def test_a_stats_line_has_the_rates_of_its_interval():
    before = EngineTotals(10, 100, 50, 60, 1, 80, 20)
    after = EngineTotals(20, 300, 150, 170, 3, 180, 70)
    stats = stats_between(before, after, FakeLoad(3, 2, 0.125), 2.0)
    assert stats.text == (
        "3 running, 2 waiting; prefill 100.0 tokens/s, decode 50.0 tokens/s; KV pages 12.5 % used,"
        " prefix cache hits 50.0 %; preemptions 2"
    )
    assert stats.fields["prefix_cache_hit_rate"] == 0.5 and stats.fields["running"] == 3


def test_an_idle_interval_has_no_stats_line_and_one_with_work_or_waiting_requests_has():
    totals = EngineTotals(10)
    assert stats_between(totals, totals, IDLE, 1.0) is None
    assert stats_between(totals, totals, FakeLoad(0, 1, 0.0), 1.0) is not None
    assert stats_between(EngineTotals(9), totals, IDLE, 1.0) is not None


def test_the_reporter_speaks_while_requests_run_and_is_silent_when_idle(lines, caplog):
    engine = FakeEngine()
    with StatsReporter(engine, 0.01):
        until(lambda: len(lines()) == 1, what="the iterations before the first interval are told")
        threading.Event().wait(0.05)
        assert len(lines()) == 1, "nothing has run since"
        engine.live["a"] = None
        until(lambda: len(lines()) > 2, what="lines of a running request")
    assert caplog.records[-1].fields["running"] == 1


def test_a_fault_of_the_reporter_is_logged_and_it_goes_on(lines):
    class Faulty(FakeEngine):
        faults = 2

        @property
        def load(self):
            if self.faults:
                self.faults -= 1
                raise ValueError("of the load")
            return super().load

    with StatsReporter(Faulty(), 0.01):
        until(lambda: len(lines()) == 3, what="a line after the faults")
    fault = "the stats of an interval could not be told; the next one's will be tried"
    assert lines()[:2] == [fault, fault] and lines()[2] != fault


def test_the_reporter_waits_for_the_model_and_an_interval_of_0_is_never(lines):
    engine = FakeEngine()
    engine.state = "loading"
    with StatsReporter(engine, 0.01), StatsReporter(FakeEngine(), 0):
        threading.Event().wait(0.05)
    assert lines() == []


def test_a_request_line_has_counts_times_reason_and_status_and_no_prompt(lines):
    RequestLog()(record())
    assert lines() == [
        "request request_id=cmpl-1 tenant=alice status=200 finish_reason=stop prompt_tokens=22 cached_tokens=2"
        " output_tokens=5 queue_s=0.5 ttft_s=1.0 mean_itl_s=0.5 e2e_s=3.0"
    ]


@pytest.mark.parametrize(
    ("outcome", "rejected", "status"),
    [
        ("length", False, 200),
        ("abort", False, 499),
        ("expired", False, 504),
        ("error", False, 500),
        ("unfollowable", False, 400),
        ("displaced", True, 429),
        ("queue_full_requests", True, 429),
        ("never_fits", True, 400),
        ("duplicate_id", True, 409),
    ],
)
def test_each_end_has_its_status(outcome, rejected, status):
    assert request_fields(record(outcome, rejected))["status"] == status


@pytest.mark.parametrize("cause", ["engine_dead", "engine_stuck", "draining"])
def test_what_ended_with_all_that_was_open_has_the_status_that_its_client_got(lines, cause):
    RequestLog()(record("error", cause=cause))
    assert f" status=503 finish_reason=error cause={cause} " in lines()[0]


def test_a_prompt_is_logged_only_when_asked_for_and_cut(lines, caplog):
    log = RequestLog(lambda ids: bytes(ids).decode(), max_chars=10)
    log(record(prompt='say "a"\nand more than ten characters'))
    assert lines()[0].endswith(r'prompt="say \"a\"\nan"') and "\n" not in lines()[0]
    assert caplog.records[0].fields["prompt"] == 'say "a"\nan'


def test_what_a_client_chose_cannot_forge_a_line(lines):
    RequestLog()(record(request_id="a\nrequest status=200"))
    assert lines()[0].startswith(r'request request_id="a\nrequest status=200" tenant')


def test_the_engine_never_waits_for_the_log_and_what_is_dropped_is_counted(lines):
    writing, may_go_on, seen = threading.Event(), threading.Event(), []

    def slow(record):
        writing.set()
        assert may_go_on.wait(10)
        seen.append(record)

    feed = RequestFeed([slow], capacity=2)
    with feed:
        feed(record())
        assert writing.wait(10)
        for _ in range(5):
            feed(record())  # two find room
        may_go_on.set()
        until(lambda: len(seen) == 3, what="the others are written")
    assert "3 records of requests were dropped" in " ".join(lines())


def test_a_sink_that_fails_does_not_end_the_others(lines):
    seen = []

    def broken(record):
        raise OSError("no space left")

    with RequestFeed([broken, seen.append]) as feed:
        feed(record())
        feed(record())
    assert len(seen) == 2 and "could not be written" in lines()[0]


@pytest.fixture
def json_lines():
    """`json_lines()`: what the absl handler writes as JSON, parsed."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.addHandler(handler)
    level = root.level
    root.setLevel(logging.INFO)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    root.removeHandler(handler)
    root.setLevel(level)


def test_every_record_is_one_json_object_also_of_absl_uvicorn_and_with_a_traceback(json_lines):
    RequestLog()(record())
    absl_logging.error("two\nlines")
    logging.getLogger("uvicorn.error").warning("of uvicorn")
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("jaxserve").exception("it failed")
    request, of_absl, of_uvicorn, failure = json_lines()
    assert request["request_id"] == "cmpl-1" and request["status"] == 200 and request["level"] == "info"
    assert request["service_class"] is None and request["logger"] == "jaxserve.server.requests"
    assert of_absl["message"] == "two\nlines" and of_absl["level"] == "error" and of_absl["time"].endswith("Z")
    assert of_uvicorn["logger"] == "uvicorn.error"
    assert "ValueError: broken" in failure["exception"] and failure["message"] == "it failed"


def test_warnings_and_start_up_notes_are_records_too(json_lines):
    logging.captureWarnings(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("old", stacklevel=1)
    finally:
        logging.captureWarnings(False)
    lines = LogLines(logging.getLogger("jaxserve.server"))
    display = StartupDisplay(console=Console(file=lines, force_terminal=False, color_system=None, width=10_000))
    display.progress("warm-up", 1, 1, "decode 1")
    display.ready("m", "http://x", "y", False)
    display.fail("HTTP cannot listen")
    messages = [each["message"] for each in json_lines()]
    assert "old" in messages[0] and any("1 programs in" in each for each in messages)
    assert json_lines()[-1]["level"] == "error" and messages[-1] == "HTTP cannot listen"
