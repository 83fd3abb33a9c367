"""The watchdog on a clock that the tests turn: when an engine is stuck, ready again, dead; and what does not count."""

import logging
import threading

import pytest

from jaxserve.core import EngineDeadError, EngineStuckError, NotReadyError, RejectedError
from jaxserve.engine import engine_thread, log_aside
from tests.engine.watched import EXIT_S, START_S, STEP_S, Watched, until


@pytest.fixture
def watch():
    """`watch(**limits)`: a `Watched`, whose thread is ended behind the test."""
    made = []

    def make(**limits):
        made.append(Watched(**limits))
        return made[-1]

    yield make
    for each in made:
        each.end()


def test_no_step_for_step_timeout_while_there_is_work_is_stuck(watch):
    thread = watch()
    thread.in_step()
    stream = thread.open()
    assert thread.after(STEP_S) == "ready" and not stream.errors
    assert thread.after(0.5) == "stuck"
    assert thread.fake.metrics.num_stuck == 1
    (error,) = stream.errors
    assert isinstance(error, EngineStuckError) and "no step for 60.5 s" in str(error)
    with pytest.raises(EngineStuckError, match=r"no step for 60\.5 s"):
        thread._raise_unless_ready()
    assert thread.fake.metrics.read_state() == "stuck" and thread.fake.metrics.read_age_s() == 60.5


def test_it_is_told_once_that_it_is_stuck(watch):
    thread = watch()
    thread.in_step()
    stream = thread.open()
    assert [thread.after(STEP_S + 1), thread.after(1), thread.after(1)] == ["stuck"] * 3
    assert thread.fake.metrics.num_stuck == 1 and len(stream.errors) == 1


def test_steps_that_come_back_keep_it_ready(watch):
    thread = watch()
    thread.in_step()
    for _ in range(5):
        assert thread.after(STEP_S - 1) == "ready"
        thread.fake.stepping.leave()
        thread.fake.stepping.entered()
        assert thread.step_age_s == 0
    assert thread.fake.metrics.num_stuck == 0


def test_idle_has_no_age(watch):
    thread = watch()
    thread.ready()
    for _ in range(10):
        thread.rest()
        assert thread.after(100 * STEP_S) == "ready" and thread.step_age_s == 0
    thread.rest()
    thread.work()
    assert thread.step_age_s == 0  # the time before the work came is not the work's
    assert thread.after(STEP_S) == "ready"
    assert thread.after(1) == "stuck"


@pytest.mark.parametrize("stage", ["begin", "warm"])
def test_loading_and_warm_up_have_the_startup_limit_alone(watch, stage):
    thread = watch()
    getattr(thread, stage)()
    state = thread.state
    assert state == {"begin": "loading", "warm": "warming_up"}[stage]
    assert thread.after(START_S) == state  # far more than steps may take
    assert thread.after(1) == "dead" and thread.deaths == 1
    assert isinstance(thread.error, EngineStuckError) and "the start made no progress for 301 s" in str(thread.error)
    assert thread.after(1) == "dead, unwatched" and thread.deaths == 1


def test_progress_of_a_start_gives_it_the_whole_limit_again(watch):
    thread = watch()
    thread.warm()
    for done in range(4):
        assert thread.after(START_S - 1) == "warming_up"
        thread.fake.progress("warm-up", done, 4, f"program {done}")
        assert thread.step_age_s == 0
    assert thread.after(START_S) == "warming_up"
    assert thread.after(1) == "dead"
    assert "after warm-up: program 3" in str(thread.error)


def test_a_start_that_ends_late_is_not_held_against_the_steps(watch):
    thread = watch()
    thread.warm()
    assert thread.after(START_S - 1) == "warming_up"
    thread.fake.warming.leave()
    until(lambda: thread.state == "ready", "ready")
    assert thread.after(0) == "ready"


@pytest.mark.parametrize(("stage", "limit_s"), [("in_step", STEP_S), ("warm", START_S)])
def test_time_in_which_the_whole_process_was_stopped_does_not_count(watch, stage, limit_s):
    thread = watch()
    getattr(thread, stage)()
    state = thread.state
    assert thread.after(limit_s - 1) == state
    assert thread.after(10_000, late_s=10_000) == state
    assert thread.step_age_s == limit_s - 1
    assert thread.after(1) == state
    assert thread.after(0.5) == {"ready": "stuck", "warming_up": "dead"}[state]


def test_a_stuck_engine_is_not_dead_of_time_in_which_the_process_was_stopped(watch):
    thread = watch()
    thread.in_step()
    assert thread.after(STEP_S + 1) == "stuck"
    assert thread.after(10_000, late_s=10_000) == "stuck"
    assert thread.after(EXIT_S) == "dead"


def test_a_step_that_comes_back_makes_it_ready_again(watch):
    thread = watch()
    thread.in_step()
    failed = thread.open("failed")
    assert thread.after(STEP_S + 1) == "stuck"
    between = thread.open("between")  # was being submitted when the others were told
    thread.fake.stepping.leave()
    thread.fake.stepping.entered()  # of the next step
    assert thread.state == "ready" and thread.fake.metrics.num_resumed == 1
    thread._raise_unless_ready()
    for stream in (failed, between):
        assert stream.num_cancelled == 1 and all(isinstance(error, EngineStuckError) for error in stream.errors)
    assert len(between.errors) == 1
    assert thread.after(STEP_S) == "ready" and thread.after(1) == "stuck"
    assert thread.fake.metrics.num_stuck == 2 and thread.deaths == 0


def test_after_stuck_exit_more_it_is_dead_once(watch):
    thread = watch()
    thread.in_step()
    stream = thread.open()
    assert thread.after(STEP_S + 1) == "stuck"
    assert thread.after(EXIT_S - 1) == "stuck" and thread.deaths == 0
    assert thread.after(0.5) == "dead"
    assert isinstance(thread.error, EngineStuckError) and "no step for 90.5 s" in str(thread.error)
    assert isinstance(stream.errors[-1], EngineDeadError)
    with pytest.raises(EngineDeadError, match="the engine died: EngineStuckError"):
        thread._raise_unless_ready()
    assert thread.after(1000) == "dead, unwatched"
    thread.fake.stepping.leave()  # too late: dead is for ever
    thread._thread.join(10)
    assert not thread._thread.is_alive()
    assert (thread.state, thread.deaths, thread.fake.metrics.num_resumed) == ("dead", 1, 0)
    assert thread.fake.closed_with[0] is thread.error


def test_a_drain_is_watched_as_what_serves_is(watch):
    thread = watch()
    thread.in_step()
    stream = thread.open()
    thread._lifecycle.drain()
    assert thread.after(STEP_S) == "draining" and not stream.errors
    assert thread.after(1) == "stuck"
    assert isinstance(stream.errors[0], EngineStuckError)
    assert thread.after(EXIT_S - 1) == "stuck" and thread.deaths == 0
    assert thread.after(1) == "dead" and thread.deaths == 1


@pytest.mark.parametrize("first", ["stuck", "draining"])
def test_a_drain_does_not_hide_that_a_step_hangs_and_goes_on_when_it_is_back(watch, first):
    thread = watch()
    thread.in_step()
    if first == "draining":
        thread._lifecycle.drain()
    assert thread.after(STEP_S + 1) == "stuck"
    thread._lifecycle.drain()
    assert thread.after(1) == "stuck"
    with pytest.raises(EngineStuckError):
        thread._raise_unless_ready()
    thread.fake.stepping.leave()
    thread.fake.stepping.entered()
    assert thread.state == "draining" and thread.fake.metrics.num_resumed == 1
    with pytest.raises(RejectedError, match="shutting down"):
        thread._raise_unless_ready()


@pytest.mark.parametrize("is_noticed", [True, False])
def test_one_that_is_shut_down_in_a_step_that_hangs_has_died_of_it(watch, is_noticed, monkeypatch):
    monkeypatch.setattr(engine_thread, "LAST_STEP_S", 0.01)
    thread = watch()
    thread.in_step()
    stream = thread.open()
    thread._lifecycle.drain()
    if is_noticed:
        assert thread.after(STEP_S + 1) == "stuck"
    thread.shutdown()
    assert thread.state == "dead" and "shut down in a step" in str(thread.error)
    assert thread.deaths == 1 and thread.fake.closed_with == [thread.error] and stream.errors


@pytest.fixture
def unread_log(monkeypatch):
    """A log that holds whoever writes to it until the test's end; gives the records that wait."""
    records, is_over = [], threading.Event()

    class Handler(logging.Handler):
        def emit(self, record):
            records.append(record.getMessage())
            is_over.wait()

    handler = Handler()
    monkeypatch.setattr(log_aside, "PATIENCE_S", 0.05)
    logging.getLogger().addHandler(handler)
    yield records
    is_over.set()
    logging.getLogger().removeHandler(handler)


def test_a_log_that_nobody_reads_keeps_no_stuck_engine_alive(watch, unread_log):
    thread = watch()
    thread.in_step()
    stream = thread.open()
    looking = threading.Thread(target=lambda: (thread.after(STEP_S + 1), thread.after(EXIT_S)), daemon=True)
    looking.start()
    looking.join(10)
    assert not looking.is_alive(), "the watchdog waits for a reader"
    assert thread.state == "dead" and thread.deaths == 1
    assert len(stream.errors) == 2 and thread.fake.closed_with == [thread.error]
    (record,) = unread_log
    assert record == "the engine is stuck: it has made no step for 61.0 s; open requests fail, new ones are refused"


def test_one_that_is_shut_down_between_steps_has_stopped(watch):
    thread = watch()
    thread.ready()
    thread._lifecycle.drain()
    thread.shutdown()
    assert thread.state == "stopped" and thread.error is None and thread.deaths == 0


@pytest.mark.parametrize(("why", "state"), [("gathers", "ready"), ("plans_nothing", "stuck")])
def test_a_batch_that_is_still_to_fill_is_no_hang_and_work_that_nobody_plans_is_one(watch, why, state):
    thread = watch()
    thread.ready()
    setattr(thread.fake, why, True)
    thread.fake.has_work = True
    thread.wake()
    until(lambda: thread._steps._since is not None, "working")
    thread.clock.now += STEP_S + 1
    before = thread.fake.num_steps
    until(lambda: thread.fake.num_steps > before + 2, "it has tried again")
    assert thread.after(0) == state


@pytest.mark.parametrize(
    ("off", "stage", "state"),
    [
        ("step_timeout_s", "in_step", "ready"),
        ("startup_timeout_s", "begin", "loading"),
        ("startup_timeout_s", "warm", "warming_up"),
    ],
)
def test_0_turns_a_limit_off(watch, off, stage, state):
    thread = watch(**{off: 0.0})
    getattr(thread, stage)()
    assert thread.after(1e6) == state and thread.deaths == 0


def test_0_leaves_a_stuck_engine_alive(watch):
    thread = watch(stuck_exit_s=0.0)
    thread.in_step()
    assert thread.after(STEP_S + 1) == "stuck"
    assert thread.after(1e6) == "stuck" and thread.deaths == 0
    thread.fake.stepping.leave()
    thread.fake.stepping.entered()
    assert thread.state == "ready"


def test_nothing_looks_when_every_limit_is_off(watch):
    assert watch().looks
    assert not watch(step_timeout_s=0.0, stuck_exit_s=0.0, startup_timeout_s=0.0).looks
    with pytest.raises(NotReadyError):
        watch()._raise_unless_ready()
