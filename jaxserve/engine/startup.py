"""What a start took: seconds and peak memory by stage."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from jaxserve.core import peak_memory_bytes

WEIGHTS, PROGRAMS = "weights", "programs"


@dataclass(slots=True)
class StartupFigures:
    """Stages of a start.

    Attributes:
      seconds: by stage: `WEIGHTS`, reading and placing them; `PROGRAMS`, memory plan and warm-up.
      peak_bytes: the most memory the process had held at the stage's end.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Counts the block to a stage; a stage may have several."""
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
        self.peak_bytes[name] = peak_memory_bytes()
