"""What the monitor keeps: bounded, in order, and at a cost that does not grow with the queue."""

import pytest

from jaxserve.bench.scheduler import SteadyState, counted_operations
from jaxserve.core import Request
from jaxserve.engine.monitor import QUEUE_SHOWN, EngineMonitor
from jaxserve.engine.output_processor import RequestState
from jaxserve.engine.stats import EngineStats


def steady(running, waiting):
    """A full scheduler, its monitor, and the plans it made in turn."""
    state = SteadyState(running, waiting)
    state.warm_up()
    plans, update = [], state.scheduler.update

    def seen(plan, *args, **kwargs):
        plans.append(plan)
        return update(plan, *args, **kwargs)

    state.scheduler.update = seen
    return state, EngineMonitor(state.scheduler, "m"), plans


@pytest.mark.parametrize("what", ["record", "view"])
def test_the_work_does_not_grow_with_the_queue(what):
    def operations(waiting):
        state, monitor, plans = steady(8, waiting)
        monitor.keep(100)
        counts = []
        with counted_operations() as clock:
            for _ in range(20):
                state.step()
                before = clock()
                if what == "record":
                    monitor.iteration(plans[-1], "b", 0.0, 1.0)
                else:
                    monitor.view(EngineStats(), 1.0, 10)
                counts.append(clock() - before)
        return max(counts)

    assert operations(5000) <= operations(50) + 20


def test_the_last_iterations_are_kept_and_cut_by_number_and_time():
    state, monitor, plans = steady(4, 10)
    monitor.keep(10)
    for number in range(25):
        state.step()
        monitor.iteration(plans[-1], "b", float(number), number + 0.5)
    kept = monitor.recording(100, 0.0).iterations
    assert [view.began_at for view in kept] == [float(number) for number in range(15, 25)]
    assert [view.began_at for view in monitor.recording(3, 0.0).iterations] == [22.0, 23.0, 24.0]
    assert [view.began_at for view in monitor.recording(100, 23.5).iterations] == [23.0, 24.0]
    assert kept[-1].decode_ids == plans[-1].decode.request_ids and kept[-1].num_waiting == 10
    view = monitor.view(EngineStats(), 30.0, 4)
    assert view.iterations == kept[-4:] and view.pages_total == view.pages_free + view.pages_cached + view.pages_owned
    assert [slot.slot for slot in view.slots] == [0, 1, 2, 3] and len(view.queue) == 10 < QUEUE_SHOWN


def test_by_default_nothing_is_kept():
    state, monitor, plans = steady(2, 0)
    state.step()
    monitor.iteration(plans[-1], "b", 0.0, 1.0)
    monitor.rejected(Request("a", (1,)), 0, "queue_full_requests", 1.0)
    assert monitor.recording(10, 0.0).iterations == () == monitor.recording(10, 0.0).events


def test_events_of_the_time_shown_are_shown():
    state, monitor, plans = steady(2, 0)
    monitor.keep(5)
    for number in range(4):
        state.step()
        monitor.iteration(plans[-1], "b", float(number), number + 0.5)
        monitor.rejected(Request(f"r{number}", (1,)), 0, "queue_full_requests", number + 0.7)
    assert [event.request_id for event in monitor.recording(9, 0.0).events] == ["r0", "r1", "r2", "r3"]
    assert [event.request_id for event in monitor.recording(2, 0.0).events] == ["r2", "r3"]
    assert [event.request_id for event in monitor.recording(9, 3.6).events] == ["r3"]


def test_the_listener_gets_a_record_of_each_end_and_each_refusal():
    _, monitor, _ = steady(2, 0)
    records = []
    monitor.on_request_end = records.append
    state = RequestState(Request("a", (1, 2)), 1, None, lambda delta: None, 5.0)
    state.num_output_tokens, state.last_token_at = 3, 9.0
    state.metrics.first_scheduled_at, state.metrics.first_token_at, state.metrics.finished_at = 6.0, 7.0, 9.5
    monitor.ended(state, "length", 9.5)
    monitor.ended(state, "displaced", 9.5)
    monitor.rejected(Request("b", (1,)), 0, "queue_full_tokens", 4.0)
    ended, displaced, refused = records
    assert (ended.queue_s, ended.ttft_s, ended.mean_itl_s, ended.e2e_s) == (1.0, 2.0, 1.0, 4.5)
    assert (ended.outcome, ended.rejected, ended.index) == ("length", False, 1) and displaced.rejected
    assert refused.rejected and refused.outcome == "queue_full_tokens"
    assert refused.queue_s is refused.ttft_s is refused.mean_itl_s is refused.e2e_s is None
