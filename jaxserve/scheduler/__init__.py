"""The scheduler: requests in, step plans out. Pure Python, standard library only.

Start with `scheduler.py`, whose first screen states the rules; `plan.py` is what comes out of it.
"""

from jaxserve.scheduler.counters import Counters
from jaxserve.scheduler.plan import (
    DecodeRow,
    DecodeRows,
    PageUpdate,
    Placement,
    PrefillChunk,
    StepPlan,
    StepResult,
    TokenEvent,
)
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.state import Flight
from jaxserve.scheduler.token_events import TokenEvents
from jaxserve.scheduler.trace import SCHEMA_VERSION, TraceWriter

__all__ = [
    "SCHEMA_VERSION",
    "Counters",
    "DecodeRow",
    "DecodeRows",
    "Flight",
    "PageUpdate",
    "Placement",
    "PrefillChunk",
    "Scheduler",
    "Sequence",
    "StepPlan",
    "StepResult",
    "TokenEvent",
    "TokenEvents",
    "TraceWriter",
]
