"""An engine thread of scripted steps under a watchdog, on a clock that a test turns."""

import threading
import time
from types import SimpleNamespace

from jaxserve.config import EngineConfig
from jaxserve.engine.engine_thread import EngineThread
from tests.engine.turned_clock import Clock

STEP_S, EXIT_S, START_S = 60.0, 30.0, 300.0


def until(condition, what):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, f"{what} did not come true"
        time.sleep(0.001)


class Gate:
    """Something of the engine's thread that begins and waits for the test to let it end."""

    def __init__(self):
        self._entered, self._may_leave = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self):
        self._entered.release()
        assert self._may_leave.acquire(timeout=30), "the test did not let it end"

    def entered(self):
        assert self._entered.acquire(timeout=10), "the engine's thread did not come"

    def leave(self):
        self._may_leave.release()


class Metrics:
    def __init__(self):
        self.num_stuck = self.num_resumed = 0

    def show_state(self, read_state, read_age_s):
        self.read_state, self.read_age_s = read_state, read_age_s

    def stuck(self):
        self.num_stuck += 1

    def resumed(self):
        self.num_resumed += 1


class Engine:
    """Has work when told so; loading, warm-up and each step wait at a gate."""

    def __init__(self, progress):
        self.progress = progress
        self.monitor = SimpleNamespace(keep=lambda num: None)
        self.metrics = Metrics()
        self.has_work = self.gathers = self.plans_nothing = False
        self.num_steps = 0
        self.warming, self.stepping = Gate(), Gate()
        self.closed_with = []

    def on_lost(self, die):
        pass

    def warm_up(self):
        self.warming()

    def step(self):
        self.num_steps += 1
        if self.has_work and not self.gathers and not self.plans_nothing:
            self.stepping()
            return True
        return False

    def land(self):
        pass

    def close(self, error=None):
        self.closed_with.append(error)


class Stream:
    """An open stream of a client."""

    def __init__(self, request_id):
        self.request_id = request_id
        self.errors, self.num_cancelled = [], 0

    def fail(self, error):
        self.errors.append(error)

    def cancel(self):
        self.num_cancelled += 1


class Watched(EngineThread):
    """An EngineThread that is looked at when the test says so, and by nobody else."""

    def __init__(self, **limits):
        self.clock = Clock()
        self.deaths = 0
        self.loading = Gate()
        self.fake = None
        limits = {"step_timeout_s": STEP_S, "stuck_exit_s": EXIT_S, "startup_timeout_s": START_S} | limits
        config = EngineConfig(model="none", **limits)
        super().__init__(config, factory=self._make, on_death=self._died, clock=self.clock)
        self.looks = self._watchdog is not None
        self._watchdog = None

    def _make(self, config, progress):
        self.loading()
        self.fake = Engine(progress)
        return self.fake

    def _died(self):
        self.deaths += 1

    def begin(self):
        self.start()
        self.loading.entered()

    def warm(self):
        self.begin()
        self.loading.leave()
        until(lambda: self.fake is not None, "loading ends")
        self.fake.warming.entered()

    def ready(self):
        self.warm()
        self.fake.warming.leave()
        until(lambda: self.state == "ready", "ready")

    def in_step(self):
        """Work comes, and a step begins that does not end."""
        self.ready()
        self.work()

    def rest(self):
        """Waits until the thread has found nothing to do."""
        until(lambda: self._steps._since is None, "idle")

    def work(self):
        self.fake.has_work = True
        self.wake()
        self.fake.stepping.entered()

    def open(self, request_id="one"):
        stream = Stream(request_id)
        assert self._streams.register([stream]) is None
        return stream

    def after(self, seconds, late_s=0.0):
        """The state that a look finds so much later, and whether there is anything left to watch."""
        self.clock.now += seconds
        goes_on = self._look(late_s)
        return self.state if goes_on else f"{self.state}, unwatched"

    def end(self):
        if not self._thread.ident:
            return
        self._stopping = True
        self.loading.leave()
        until(lambda: self.fake is not None, "loading ends")
        self.fake.has_work = False
        self.fake.warming.leave()
        self.fake.stepping.leave()
        self.wake()
        self._thread.join(10)
        assert not self._thread.is_alive()
