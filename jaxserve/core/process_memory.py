"""The most memory that this process has held."""

from __future__ import annotations

import resource
import sys


def peak_memory_bytes() -> int:
    """Peak resident size since the process began: its own memory, and pages of mapped files while they were mapped."""
    try:
        with open("/proc/self/status") as lines:
            for line in lines:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    # Not first: on Linux a process inherits this figure from the one that started it.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, the others KiB.
    return peak if sys.platform == "darwin" else peak * 1024
