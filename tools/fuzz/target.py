"""Target: what one fuzzed thing is, what it may raise, and what time it has."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

MAX_CPU_S = 5.0
"""Processor time of one input. Instrumented code is several times slower; the seeds take milliseconds."""


class TooSlow(Exception):
    """An input took longer than any of its size may."""


@dataclass(frozen=True, slots=True)
class Target:
    """One thing to fuzz.

    Attributes:
      name: on the command line, and the folder of its saved inputs in tests/fuzz/corpus.
      run: takes a fuzzer's bytes.
      allowed: what it may raise; all else is a finding.
    """

    name: str
    run: Callable[[bytes], object]
    allowed: tuple[type[Exception], ...]

    def __call__(self, data: bytes) -> None:
        """Runs one input.

        Raises:
          TooSlow: it took more than `MAX_CPU_S`.
          BaseException: whatever is not allowed.
        """
        began = time.thread_time()
        try:
            self.run(data)
        except self.allowed as error:
            check_message(error)
        took = time.thread_time() - began
        if took > MAX_CPU_S:
            raise TooSlow(f"{self.name}: {len(data)} bytes took {took:.1f} s")


def check_message(error: Exception) -> None:
    """A refusal says something, in a text that a log can hold."""
    message = str(error)
    assert message, f"a {type(error).__name__} without a message"
    assert len(message) < 20_000, f"a message of {len(message)} characters: {message[:200]}"
