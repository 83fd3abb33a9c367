"""WaitsFor: why the queue's front got no slot when a plan was made."""

from __future__ import annotations

from enum import StrEnum


class WaitsFor(StrEnum):
    """What the front lacked; of several things the first in this order. All but `SLOT` leave a slot idle."""

    SLOT = "slot"
    """All are held."""
    PREEMPTION = "preemption"
    """Somebody lost slot or pages since the plan before: nobody is promoted into what was given back."""
    RELEASE = "release"
    """A step has failed, and others are tried alone meanwhile."""
    CLASS = "class"
    """All that wait are of service classes at their slot limit."""
    BATCH = "batch"
    """The batching fills no slot before a whole batch has ended, or has gathered."""
    STEP = "step"
    """The front was preempted, and its last step is still in flight."""
    PAGES = "pages"
    """The reservation finds none for it."""
