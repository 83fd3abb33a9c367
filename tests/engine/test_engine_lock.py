"""The engine's lock: who waits for it, for how long, and who does not."""

import threading
import time

import pytest

from jaxserve.core import EngineStuckError, Submission
from jaxserve.engine import engine_lock
from jaxserve.engine.engine_lock import EngineLock
from tests.engine.conftest import greedy


@pytest.fixture(autouse=True)
def little_patience(monkeypatch):
    monkeypatch.setattr(engine_lock, "PATIENCE_S", 0.06)


class Holder:
    """A thread that holds a lock until it is let go."""

    def __init__(self, lock):
        self._may_end, self._has = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._hold, args=(lock,))
        self._thread.start()
        assert self._has.wait(10)

    def _hold(self, lock):
        with lock:
            self._has.set()
            self._may_end.wait(30)

    def let_go(self):
        self._may_end.set()
        self._thread.join(10)


class Counting:
    """An inner lock; `waits` has the seconds that each asked for at most."""

    def __init__(self, lock):
        self.lock, self.waits = lock, []

    def acquire(self, blocking=True, timeout=-1):
        self.waits.append(timeout if blocking else 0)
        return self.lock.acquire(blocking, timeout)


def refused_s(lock):
    """Seconds after which the lock is refused."""
    began = time.monotonic()
    with pytest.raises(EngineStuckError, match="does not return"), lock.soon():
        pass
    return time.monotonic() - began


def test_one_wait_for_a_holder_that_does_not_let_go_and_none_after_it():
    lock = EngineLock()
    holder = Holder(lock)
    assert refused_s(lock) >= 0.06
    lock._lock = counting = Counting(lock._lock)
    for _ in range(20):
        refused_s(lock)
    assert counting.waits == [0] * 20
    lock._lock = counting.lock
    holder.let_go()
    with lock.soon(), lock.soon():  # its holder may take it again
        pass
    holder = Holder(lock)
    assert refused_s(lock) >= 0.06, "another holder is waited for again"
    holder.let_go()


def test_one_that_took_it_within_some_time_is_another_holder():
    lock = EngineLock()
    holder = Holder(lock)
    refused_s(lock)
    holder.let_go()
    entered, leave = threading.Event(), threading.Event()

    def hold():
        with lock.within(10) as taken:
            assert taken
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    assert entered.wait(10)
    assert refused_s(lock) >= 0.06, "it is waited for"
    leave.set()
    thread.join(10)


class Busy:
    """The inner lock of an `EngineLock` that others have in turn: each look but the last one finds another holder."""

    def __init__(self, lock, num_holders):
        self._lock, self._num_left = lock, num_holders

    def acquire(self, blocking=True, timeout=-1):
        self._lock._num_taken += 1
        self._num_left -= 1
        return self._num_left < 0

    def release(self):
        pass


def test_holders_that_come_and_go_are_waited_for():
    lock = EngineLock()
    lock._lock = busy = Busy(lock, 5 * engine_lock._NUM_LOOKS)
    with lock.soon():
        assert busy._num_left < 0


def test_within_says_whether_it_is_held():
    lock = EngineLock()
    with lock.within(0.0) as taken:
        assert taken
    holder = Holder(lock)
    with lock.within(0.01) as taken:
        assert not taken
    holder.let_go()


def submit(engine, max_tokens):
    """A request of the id "same"; gives its deltas."""
    deltas = []
    (request,) = engine.make_requests(Submission([1, 2, 3], greedy(max_tokens), "same"), 0.0)
    engine.add(request, 0, deltas.append)
    return deltas


def run(engine):
    while engine.has_work:
        engine.step()


def test_an_abort_that_cannot_be_seen_to_is_before_the_next_step(llm):
    engine = llm.engine
    deltas = submit(engine, 20)
    engine.step()
    holder = Holder(engine._lock)
    assert engine.abort("same") and not engine.abort("none of this id")
    assert not deltas or deltas[-1].finish_reason is None
    holder.let_go()
    engine.step()
    assert deltas[-1].finish_reason == "abort"
    run(engine)


def test_an_abort_that_comes_late_is_not_of_another_that_has_the_id_by_then(llm):
    engine = llm.engine
    submit(engine, 2)
    holder = Holder(engine._lock)
    assert engine.abort("same")
    holder.let_go()
    while engine.has_work:
        engine._iterations.step()
    deltas = submit(engine, 3)
    run(engine)
    assert deltas[-1].finish_reason == "length" and not engine._late_aborts
