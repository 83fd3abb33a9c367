"""EngineThread: an Engine stepped by a thread of its own, from loading to its end, under a watchdog.

    thread     load, warm up, step, step, ...                       watchdog   how old is the last progress?

Its state is a `Lifecycle`. An exception in the thread is the engine's death: every open stream fails. The watchdog sees
to steps that do not come back. Past `step_timeout_s` the engine is stuck, and every open stream fails. If the step
returns after all, what was live is aborted before the engine goes on; if it has not after `stuck_exit_s` more, or when
it is shut down, the engine is dead. So is a start that goes no further for `startup_timeout_s`. An engine that drains
is watched like one that is ready.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from absl import logging

from jaxserve.config import EngineConfig
from jaxserve.core import (
    EngineDeadError,
    EngineStuckError,
    JaxserveError,
    NotReadyError,
    RejectedError,
    Rejection,
)
from jaxserve.engine.engine import Engine, Progress
from jaxserve.engine.lifecycle import DEAD, DRAINING, READY, STOPPED, STUCK, WARMING_UP, Lifecycle
from jaxserve.engine.log_aside import log_aside
from jaxserve.engine.metrics import EngineMetrics
from jaxserve.engine.monitor import RequestListener
from jaxserve.engine.open_streams import OpenStreams
from jaxserve.engine.watchdog import StepClock, Watchdog, look_period_s
from jaxserve.faults import failpoint

EngineFactory = Callable[[EngineConfig, Progress], Engine]
LAST_STEP_S = 10.0
"""So long a shutdown waits for the step that runs."""
LAST_WORDS_S = 5.0
"""And for what a death writes: its log record and its last iterations."""


class EngineThread:
    """Starts loading in its thread on `start`; the engine takes requests once `state` is "ready".

    Args:
      config: engine settings.
      progress: told of loading and warm-up, on the engine's thread.
      factory: makes the engine; tests put faults in here.
      on_request_end: told of every end and refusal; see `monitor.RequestListener`.
      on_death: told that the engine is dead, on whichever thread it shows, before open streams fail.
      trace_buffer: iterations that are remembered.
      clock: of the watchdog; seconds, monotonic.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: Progress | None = None,
        factory: EngineFactory | None = None,
        on_request_end: RequestListener | None = None,
        on_death: Callable[[], None] | None = None,
        trace_buffer: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.model_root = config.model
        self.progress: tuple[int, int, str] = (0, 0, "loading")
        self.created = int(time.time())
        self._on_progress = progress
        self._factory = factory or (lambda config, progress: Engine(config, progress=progress))
        self._on_request_end = on_request_end
        self._trace_buffer = trace_buffer
        self._engine: Engine | None = None
        self._work = threading.Condition()
        self._on_death = on_death
        self._lifecycle = Lifecycle()
        self._stopping = False
        self._streams = OpenStreams()
        self._has_died = threading.Event()  # and all of it is told
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._steps = StepClock(clock)
        limits = (config.step_timeout_s, config.stuck_exit_s, config.startup_timeout_s)
        self._watchdog = Watchdog(look_period_s(*limits), self._look) if any(limits) else None

    def start(self) -> None:
        """Begins loading and warm-up; returns at once."""
        self._steps.working()
        self._thread.start()
        if self._watchdog is not None:
            self._watchdog.start()

    @property
    def state(self) -> str:
        """One of `lifecycle.STATES`."""
        return self._lifecycle.state

    @property
    def error(self) -> BaseException | None:
        """What it died of."""
        return self._lifecycle.error

    @property
    def step_age_s(self) -> float:
        """Seconds since the last progress while there is work; 0 when idle."""
        return self._steps.age_s

    @property
    def engine(self) -> Engine:
        """The engine.

        Raises:
          NotReadyError: the model is still loading.
        """
        if self._engine is None:
            self._raise_unless_ready()
            raise NotReadyError("the model is loading")
        return self._engine

    def shutdown(self) -> None:
        """Ends the thread; open streams fail. It is dead, not stopped, if its step does not end."""
        with self._work:
            self._stopping = True
            self._work.notify()
        if self._watchdog is not None:
            self._watchdog.stop()
        # One that died of a hang, or of another process, may be inside a step that never ends.
        waits = self._thread.is_alive() and threading.current_thread() is not self._thread
        if waits and self.state not in (STUCK, DEAD):
            self._thread.join(timeout=LAST_STEP_S)
        if waits and self._thread.is_alive() and self.state in (READY, DRAINING, STUCK):
            self._die(EngineStuckError(f"the engine was shut down in a step that had lasted {self.step_age_s:.1f} s"))
        if self.state == DEAD:  # its log record and its last iterations are still being written, maybe
            self._has_died.wait(LAST_WORDS_S)
        for stream in self._streams.all():
            stream.fail(EngineDeadError("the engine was shut down"))
        self._lifecycle.move(STOPPED)

    @property
    def metrics(self) -> EngineMetrics:
        """The engine's metrics."""
        return self.engine.metrics

    def _run(self) -> None:
        try:
            engine = self._factory(self.config, self._progressed)
            engine.monitor.on_request_end = self._on_request_end
            engine.monitor.keep(self._trace_buffer)
            engine.on_lost(self._die)
            engine.metrics.show_state(lambda: self.state, lambda: self.step_age_s)
            self._engine = engine
            self._lifecycle.move(WARMING_UP)
            engine.warm_up()
            self._steps.idle()
            self._lifecycle.move(READY)
            while not self._stopping:
                self._steps.working()
                if engine.has_work:
                    failpoint("engine.step")
                stepped = engine.step()
                if stepped or not engine.has_work or engine.gathers:
                    self._got_on(engine)
                if not stepped:
                    self._wait(engine)
            engine.land()
            self._steps.idle()
            engine.close()
        except BaseException as error:
            self._die(error)

    def wake(self) -> None:
        """A request was added to the engine itself."""
        with self._work:
            self._work.notify()

    def _wait(self, engine: Engine) -> None:
        with self._work:
            if engine.has_work:  # nothing may run yet: a batch that is still filling
                self._work.wait(timeout=0.001)
            else:
                self._steps.idle()
                self._work.wait_for(lambda: self._stopping or engine.has_work, timeout=1.0)

    def _got_on(self, engine: Engine) -> None:
        """There was progress, or nothing to do yet; so a stuck engine goes on."""
        age_s = self._steps.age_s
        self._steps.progressed()
        if self.state != STUCK:
            return
        error = self._not_going_on()
        for stream in self._streams.all():
            stream.fail(error)  # one that came between has not failed yet
            stream.cancel()
        if self._lifecycle.resume():
            engine.metrics.resumed()
            logging.warning("the engine goes on: a step came back after %.1f s", age_s)

    def _look(self, late_s: float) -> bool:
        """The watchdog's look; False once there is nothing left to watch."""
        self._steps.forgive(late_s)
        state, age_s = self.state, self._steps.age_s
        config = self.config
        if state in (STOPPED, DEAD):
            return False
        serves = state in (READY, DRAINING)
        if serves and config.step_timeout_s and age_s > config.step_timeout_s:
            self._get_stuck()
        elif state == STUCK and config.stuck_exit_s and age_s > config.step_timeout_s + config.stuck_exit_s:
            self._die(EngineStuckError(f"the engine made no step for {age_s:.1f} s"))
        elif not serves and state != STUCK and config.startup_timeout_s and age_s > config.startup_timeout_s:
            what = self.progress[2]
            self._die(EngineStuckError(f"the start made no progress for {age_s:.0f} s, after {what}"))
        return True

    def _get_stuck(self) -> None:
        if not self._lifecycle.move(STUCK):
            return
        self.metrics.stuck()
        error = self._not_going_on()
        for stream in self._streams.all():
            stream.fail(error)
        log_aside(logging.ERROR, "%s; open requests fail, new ones are refused", error)

    def _die(self, error: BaseException) -> None:
        before = self._lifecycle.die(error)
        if before == DEAD:  # on another thread, of the same cause
            return
        self._stopping = True
        if self._on_death is not None:
            self._on_death()
        # A model or setting that does not fit is the operator's to mend: its message says how.
        expected = isinstance(error, EngineStuckError) or (
            before not in (READY, DRAINING, STUCK) and isinstance(error, ValueError | JaxserveError)
        )
        for stream in self._streams.all():
            stream.fail(self._not_going_on())
        log_aside(logging.ERROR, "engine died: %r", error, exc_info=None if expected else error)
        if self._engine is not None:
            self._engine.close(error)
        for stream in self._streams.all():
            stream.cancel()  # whose reader does not see to it: each has its end in the counts
        self._has_died.set()

    def _not_going_on(self) -> JaxserveError:
        """What requests of a stuck or dead engine fail with."""
        if self.state == DEAD:
            return EngineDeadError(f"the engine died: {type(self.error).__name__}; the server must be restarted")
        return EngineStuckError(f"the engine is stuck: it has made no step for {self.step_age_s:.1f} s")

    def _progressed(self, stage: str, done: int, total: int, what: str) -> None:
        self.progress = (done, total, f"{stage}: {what}")
        self._steps.progressed()
        if self._on_progress:
            self._on_progress(stage, done, total, what)

    def _raise_unless_ready(self, num_choices: int = 0) -> None:
        """Raises unless requests are taken; one of so many choices is counted where it is refused for good."""
        state = self.state
        if state in (STUCK, DEAD):
            raise self._not_going_on()
        if state in (DRAINING, STOPPED):
            if num_choices:
                self.metrics.rejected("draining", num_choices)
            raise RejectedError(Rejection("draining", "the server is shutting down", retry_after_s=5.0))
        if state != READY:
            done, total, what = self.progress
            raise NotReadyError(f"the server is starting ({what}, {done} of {total})")
