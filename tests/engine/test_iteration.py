"""The loop body on a device that answers when it is told to: order of calls, host time, faults, wasted rows."""

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest

from jaxserve import SamplingParams
from jaxserve.core import Request
from jaxserve.engine import iteration
from jaxserve.engine.delivery import Delivery
from jaxserve.engine.engine_lock import EngineLock
from jaxserve.engine.grammar_state import GrammarStates
from jaxserve.engine.iteration import Iterations
from jaxserve.engine.metrics import EngineMetrics
from jaxserve.engine.monitor import EngineMonitor
from jaxserve.engine.step_recovery import StepRecovery
from jaxserve.engine.validation import ModelLimits
from jaxserve.scheduler import Scheduler, StepResult
from jaxserve.tables import Bucket
from tests.scheduler.harness import make_config

END = 7
"""The token that ends every request here."""


class Array:
    """Stands for a result on the device."""

    def __init__(self, ready):
        self.ready = ready

    def is_ready(self):
        return self.ready


class Device:
    """A runner whose step k samples `tokens[k]` for every row; `calls` lists what was asked of it."""

    page_bytes = 1
    newest = None

    def __init__(self, tokens):
        self.tokens, self.calls = tokens, []
        self.fault_at = None
        self.busy = False

    def prepare(self, plan, request_of, outputs_of):
        bucket = Bucket(decode_rows=4, prefill_tokens=16, prefill_rows=4, table_width=4)
        return SimpleNamespace(plan=plan, tables=SimpleNamespace(bucket=bucket))

    def dispatch(self, prepared):
        if prepared.plan.iteration == self.fault_at:
            raise RuntimeError("no memory")
        self.calls.append(("dispatch", prepared.plan.iteration))
        self.newest = Array(not self.busy)
        return SimpleNamespace(plan=prepared.plan, bucket=prepared.tables.bucket, outputs=None)

    def sample(self, handle, masks=None):
        self.calls.append(("sample" if masks is None else "masked sample", handle.plan.iteration))
        self.newest = Array(not self.busy)
        handle.outputs = ()

    def collect(self, handle):
        self.calls.append(("collect", handle.plan.iteration))
        assert handle.outputs is not None
        token, plan = self.tokens[handle.plan.iteration], handle.plan
        result = StepResult((token,) * len(plan.decode), (token,) * len(plan.prefill))
        return SimpleNamespace(result=result, broken_decode=(), broken_prefill=())


class Loop:
    """The loop on a `Device`; `outputs` are the tokens that reached each request, with its end."""

    def __init__(self, *tokens, overlap=True, alone=True):
        self.device = Device([*tokens, *[END] * 9])
        self.scheduler = Scheduler(make_config(max_steps_ahead=int(overlap)))
        self.metrics = EngineMetrics("m")
        self.monitor = EngineMonitor(self.scheduler, "m")
        self.monitor.keep(100)
        limits = ModelLimits(vocab_size=32, max_model_len=64, eos_token_ids=(END,))
        grammars = GrammarStates(None, limits, 100)
        self.delivery = Delivery(self.scheduler, self.metrics, self.monitor, grammars, None)
        self.now = 0.0
        self.outputs = {}
        lock = EngineLock()
        self.iterations = Iterations(
            self.scheduler,
            self.device,
            grammars,
            self.delivery,
            self.metrics,
            self.monitor,
            StepRecovery(
                self.scheduler,
                self.device,
                self.delivery,
                self.metrics,
                lock=lock,
                clock=self._clock,
                alone=alone,
            ),
            cached=False,
            lock=lock,
            clock=self._clock,
            on_step=self.scheduler.check_invariants,
        )

    def _clock(self):
        self.now += 1.0
        return self.now

    def add(self, name, max_tokens=9, **fields):
        request = Request(
            name,
            (1, 2, 3),
            SamplingParams(max_tokens=max_tokens),
            eos_token_ids=(END,),
            max_tokens=max_tokens,
            **fields,
        )
        taken = self.outputs.setdefault(name, [])
        assert self.scheduler.add(request, self._clock()) is None
        self.delivery.open(request, 0, lambda delta: taken.append((delta.token_ids, delta.finish_reason)), self.now)

    def abort(self, name):
        self.scheduler.abort(name, self._clock())
        self.delivery.take_early_ends(self.now)

    def run(self):
        while self.iterations.step():
            pass
        assert self.scheduler.idle and not self.iterations.num_in_flight


def test_a_step_is_dispatched_before_the_last_one_is_collected():
    loop = Loop(1, 2, 3)
    loop.add("a", max_tokens=3)
    loop.run()
    assert loop.device.calls == [
        ("dispatch", 0),
        ("sample", 0),
        ("dispatch", 1),
        ("sample", 1),
        ("collect", 0),
        ("dispatch", 2),
        ("sample", 2),
        ("collect", 1),
        ("collect", 2),
    ]
    assert loop.outputs["a"] == [([1], None), ([2], None), ([3], "length")]


def test_without_overlap_each_step_is_collected_before_the_next_plan():
    loop = Loop(1, 2, overlap=False)
    loop.add("a", max_tokens=2)
    loop.run()
    assert [name for name, _ in loop.device.calls] == ["dispatch", "sample", "collect"] * 2
    assert loop.iterations.stats.wasted_rows == 0


def test_a_row_that_needs_a_mask_is_sampled_when_the_token_before_it_is_there():
    loop = Loop(1, 2, 3)
    loop.add("a", max_tokens=3, bad_sequences=((1, 2),))
    loop.run()
    assert loop.device.calls == [
        ("dispatch", 0),
        ("masked sample", 0),
        ("dispatch", 1),
        ("collect", 0),
        ("masked sample", 1),
        ("dispatch", 2),
        ("collect", 1),
        ("masked sample", 2),
        ("collect", 2),
    ]
    assert [tokens for tokens, _ in loop.outputs["a"]] == [[1], [2], [3]]


def test_the_last_token_waits_for_no_other_plan():
    loop = Loop(1)
    loop.add("a", max_tokens=1)
    assert loop.iterations.step() and not loop.outputs["a"]
    assert loop.iterations.step() and loop.outputs["a"] == [([1], "length")]
    assert not loop.iterations.step()


def test_an_end_that_only_the_token_tells_wastes_one_row():
    loop = Loop(1, END, 3)
    loop.add("a")
    loop.run()
    assert loop.outputs["a"] == [([1], None), ([END], "stop")]
    stats = loop.iterations.stats
    assert (stats.iterations, stats.wasted_rows, stats.slot_steps, stats.output_tokens) == (3, 1, 2, 2)
    assert loop.scheduler.counters.wasted_rows == 1
    labels = {"model_name": "m", "engine": "0"}
    assert loop.metrics.registry.get_sample_value("jaxserve:wasted_rows_total", labels) == 1


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_what_is_in_flight_of_an_aborted_request_is_dropped_though_its_id_and_slot_are_taken(steps):
    loop = Loop(1, 2, 3, 4, 5, 6)
    loop.add("a", max_tokens=6)
    for _ in range(steps):
        loop.iterations.step()
    before = len(loop.outputs["a"])
    loop.abort("a")
    assert loop.outputs.pop("a")[before:] == [([], "abort")]
    loop.add("a", max_tokens=1)
    loop.run()
    # Step `steps` is the first that carries the new one.
    assert loop.outputs["a"] == [([steps + 1], "length")]
    assert loop.iterations.stats.wasted_rows == 1


@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_that_cannot_be_started_loses_no_token_of_those_before_it(overlap, caplog):
    loop = Loop(1, 2, 3, overlap=overlap, alone=False)
    loop.add("a", max_tokens=3)
    loop.device.fault_at = 2
    with pytest.raises(RuntimeError, match="no memory"):
        loop.run()
    assert loop.outputs["a"] == [([1], None), ([2], None)]
    (said,) = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    assert said.startswith("the dispatch of a step failed; an engine of several processes does not go on from that")


def test_land_takes_in_what_is_in_flight_and_starts_nothing():
    loop = Loop(1, 2, 3)
    loop.add("a", max_tokens=3)
    loop.iterations.step()
    loop.iterations.land()
    assert loop.outputs["a"] == [([1], None)] and loop.device.calls[-1] == ("collect", 0)
    loop.run()
    assert [tokens for tokens, _ in loop.outputs["a"]] == [[1], [2], [3]]


def test_spans_of_iterations_do_not_overlap_though_plans_do():
    loop = Loop(1, 2, 3, 4)
    loop.add("a", max_tokens=4)
    loop.run()
    spans = [(view.began_at, view.ended_at) for view in loop.monitor.recording(100, -math.inf).iterations]
    assert len(spans) == 4 and all(began < ended for began, ended in spans)
    assert all(before[1] <= after[0] for before, after in pairwise(spans))


@pytest.fixture
def ticks(monkeypatch):
    """A second passes whenever the loop looks at the time."""
    times = iter(range(1, 10**6))
    monkeypatch.setattr(iteration, "time", SimpleNamespace(perf_counter=lambda: float(next(times))))


@pytest.mark.usefixtures("ticks")
@pytest.mark.parametrize("busy", [True, False])
def test_host_time_is_hidden_only_while_the_device_is_busy_with_what_it_was_given_before(busy):
    loop = Loop(1, 2, 3)
    loop.device.busy = busy
    loop.add("a", max_tokens=3)
    loop.run()
    stats = loop.iterations.stats
    # Three laps for each plan made (plan, dispatch, sample), one for the empty one, one for each step taken in; the
    # device had nothing to do before the first dispatch was over.
    assert stats.host_s == 3 * 3 + 1 + 3
    assert stats.device_s == 3
    assert stats.hidden_s == (stats.host_s - 2 if busy else 0)
    assert stats.hidden_share == pytest.approx(stats.hidden_s / 13)
