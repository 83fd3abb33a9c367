"""The real engine with a gate in front of each step, so that tests decide when it runs; and one that breaks."""

from __future__ import annotations

import threading
import time
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.engine.engine import Progress


class GatedEngine(Engine):
    """`gate` cleared: no step begins. `fault` set: the next step raises it. `step_s`: added to each, as by a device."""

    def __init__(self, config: EngineConfig, progress: Progress | None = None, **kwargs: Any) -> None:
        super().__init__(config, progress=progress, **kwargs)
        self.gate = threading.Event()
        self.gate.set()
        self.fault: Exception | None = None
        self.step_s = 0.0

    def step(self) -> bool:
        self.gate.wait()
        time.sleep(self.step_s)
        if self.fault is not None:
            raise self.fault
        return super().step()

    @property
    def clean(self) -> bool:
        """Nothing is live and no page is owned."""
        scheduler = self.scheduler
        return not self.has_work and scheduler.idle and scheduler.pages_owned == 0
