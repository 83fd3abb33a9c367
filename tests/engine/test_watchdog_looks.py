"""The watchdog by itself: when it looks, how late it says that it is, and the age of a step."""

import pytest

from jaxserve.engine.watchdog import LATE_S, StepClock, Watchdog, look_period_s
from tests.engine.turned_clock import Clock


def look(script):
    """Runs a watchdog whose looks take the clock on by so much each; gives by what each look was told to be late."""
    clock, told = Clock(), []
    left = iter(script)

    def on_look(late_s):
        told.append(late_s)
        seconds = next(left, None)
        if isinstance(seconds, Exception):
            raise seconds
        clock.now += seconds or 0
        return seconds is not None

    dog = Watchdog(0.001, on_look, clock)
    dog.start()
    dog._thread.join(10)
    assert not dog._thread.is_alive()
    return told


def test_a_look_tells_how_late_it_is():
    told = look([LATE_S / 2, 30.0, 0.0])
    assert told[:2] == [0.0, 0.0]  # half a second is a busy machine
    assert told[2] == pytest.approx(30.0, abs=0.01)
    assert told[3] == 0.0 and len(told) == 4


def test_a_look_that_fails_is_logged_and_the_next_one_comes(caplog):
    assert len(look([ValueError("of the look"), ValueError("again"), 0.0])) == 4
    assert [record.message for record in caplog.records].count(
        "the watchdog could not look at the engine; it will look again"
    ) == 2


def test_a_stopped_watchdog_ends():
    dog = Watchdog(0.001, lambda late_s: True)
    dog.start()
    dog.stop()
    dog.stop()
    dog._thread.join(10)
    assert not dog._thread.is_alive()


def test_work_counts_from_when_it_came():
    clock = Clock()
    steps = StepClock(clock)
    assert steps.age_s == 0
    steps.working()
    clock.now += 5
    steps.working()
    assert steps.age_s == 5
    steps.progressed()
    assert steps.age_s == 0
    steps.idle()
    clock.now += 5
    assert steps.age_s == 0
    steps.forgive(3)
    assert steps.age_s == 0
    steps.working()
    clock.now += 5
    steps.forgive(3)
    assert steps.age_s == 2
    steps.forgive(10)  # never a time to come
    assert steps.age_s == 0
    clock.now += 1
    assert steps.age_s == 1


@pytest.mark.parametrize(
    ("limits", "period_s"), [((60.0, 60.0, 1800.0), 1.0), ((1.0, 0.0, 0.0), 0.25), ((60.0, 0.4, 0.0), 0.1)]
)
def test_a_limit_is_overrun_by_a_quarter_at_most(limits, period_s):
    assert look_period_s(*limits) == pytest.approx(period_s)
