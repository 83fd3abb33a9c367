"""When a replica is in rotation."""

from __future__ import annotations

from jaxserve.routing import Breaker, BreakerSettings, BreakerState

UP, HALF_OPEN, DOWN = BreakerState.UP, BreakerState.HALF_OPEN, BreakerState.DOWN


def up(**fields):
    breaker = Breaker(BreakerSettings(**fields))
    breaker.probe_succeeded(0.0)
    assert breaker.state is UP
    return breaker


def test_it_is_down_until_a_probe_succeeds():
    breaker = Breaker()
    assert (breaker.state, breaker.reason) == (DOWN, "not probed yet")
    breaker.gone("it is not ready")
    assert (breaker.state, breaker.reason) == (DOWN, "it is not ready")
    breaker.probe_succeeded(0.0)
    assert breaker.state is UP


def test_who_is_gone_is_down_at_once_and_half_open_when_ready_again():
    breaker = up()
    breaker.gone("nothing listens there")
    assert breaker.state is DOWN
    breaker.probe_succeeded(0.1)
    assert breaker.state is HALF_OPEN
    breaker.request_succeeded()
    assert breaker.state is UP


def test_failed_requests_in_a_row_take_it_out_for_a_while():
    breaker = up(failure_threshold=3, open_s=5.0)
    breaker.request_failed(10.0, "reset")
    breaker.request_failed(10.0, "reset")
    breaker.request_succeeded()  # not in a row
    breaker.request_failed(10.0, "reset")
    breaker.request_failed(10.0, "reset")
    assert breaker.state is UP
    breaker.request_failed(10.0, "reset")
    assert (breaker.state, breaker.reason) == (DOWN, "reset")
    breaker.probe_succeeded(14.9)
    assert breaker.state is DOWN
    breaker.probe_succeeded(15.0)
    assert breaker.state is HALF_OPEN


def test_failing_while_half_open_doubles_the_wait_up_to_a_minute_and_success_resets_it():
    breaker = up(failure_threshold=1, open_s=5.0)
    now, waits = 0.0, []
    for _ in range(6):
        breaker.request_failed(now, "reset")
        began = now
        while breaker.state is DOWN:
            now += 1.0
            breaker.probe_succeeded(now)
        waits.append(now - began)
    assert waits == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    breaker.request_succeeded()
    breaker.request_failed(now, "reset")
    breaker.probe_succeeded(now + 5.0)
    assert breaker.state is HALF_OPEN


def test_probes_without_an_answer_count_in_a_row():
    breaker = up(probe_failure_threshold=2)
    breaker.probe_failed("timeout")
    breaker.probe_succeeded(1.0)
    breaker.probe_failed("timeout")
    assert breaker.state is UP
    breaker.probe_failed("timeout")
    assert (breaker.state, breaker.reason) == (DOWN, "timeout")


def test_late_failures_of_a_replica_that_is_down_change_nothing():
    breaker = up(failure_threshold=1, open_s=5.0)
    breaker.request_failed(0.0, "reset")
    breaker.request_failed(4.0, "reset")
    breaker.probe_succeeded(5.0)
    assert breaker.state is HALF_OPEN
