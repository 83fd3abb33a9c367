"""A fault plan: which places fail, how, and when; docs/reliability.md has the places.

A JSON list of objects, as in

    [{"at": "runner.dispatch", "do": "raise", "iteration": 12},
     {"at": "runner.dispatch", "do": "nan", "request_id": "bad-*", "times": 1},
     {"at": "runner.collect", "do": "hang", "skip": 40, "seconds": 5}]

A fault strikes when its place is passed and all that it names fits; `skip` such passages go by before, from then on
every `every`-th is struck, and after `times` strikes it is spent.
"""

from __future__ import annotations

import errno
import fnmatch
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

ALLOW_VARIABLE = "JAXSERVE_ALLOW_FAULTS"
"""Environment variable that must be 1 where a fault plan is given."""
PLACES = (
    "engine.step",
    "runner.dispatch",
    "runner.sample",
    "runner.collect",
    "runner.recover",
    "swap.out",
    "tokenizer.encode",
    "grammar.compile",
    "grammar.mask",
    "trace.write",
    "batch.write",
)
"""Places that a fault may name: "runner" ones are passed once in an iteration; "engine.step" by the loop of an engine
with a thread of its own, where nothing can be recovered: it dies of what is raised there."""
KINDS = ("raise", "hang", "disk_full", "kill", "out_of_memory", "nan")
"""raise: an `InjectedFault`; hang: sleeps `seconds`; disk_full: OSError ENOSPC; kill: SIGKILL to the own process;
out_of_memory, nan: the place is told, and does as a device without memory or with broken numbers would."""
TOLD = frozenset(("out_of_memory", "nan"))
_TOLD_AT = {"out_of_memory": ("runner.dispatch", "runner.sample", "runner.collect"), "nan": ("runner.dispatch",)}


MAX_HANG_S = 86400


class InjectedFault(RuntimeError):
    """A fault that a plan asked for."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One entry of a plan.

    Attributes:
      at: one of `PLACES`.
      do: one of `KINDS`.
      iteration: of the plan that is run; None: any.
      request_id: pattern (fnmatch) of a request that must take part; None: any.
      skip: passages that fit and go by before it strikes.
      every: of the passages after those, it strikes the first, and then every so many-th.
      times: passages it strikes; None: without end.
      seconds: of "hang".
    """

    at: str
    do: str
    iteration: int | None = None
    request_id: str | None = None
    skip: int = 0
    every: int = 1
    times: int | None = 1
    seconds: float = 1.0

    def __post_init__(self) -> None:
        if self.at not in PLACES:
            raise ValueError(f"at is {self.at!r}; places are {', '.join(PLACES)}")
        if self.do not in KINDS:
            raise ValueError(f"do is {self.do!r}; kinds are {', '.join(KINDS)}")
        if self.at not in _TOLD_AT.get(self.do, PLACES):
            raise ValueError(f"do is {self.do!r} at {self.at}; it is for {', '.join(_TOLD_AT[self.do])}")
        if self.skip < 0 or self.every < 1 or (self.times is not None and self.times < 1):
            raise ValueError(
                f"skip, every, times are {self.skip}, {self.every}, {self.times}; they are at least 0, 1, 1"
            )
        if not 0 <= self.seconds <= MAX_HANG_S:
            raise ValueError(f"seconds is {self.seconds}; it is from 0 to {MAX_HANG_S}")

    def fits(self, iteration: int | None, request_ids: Iterable[str]) -> bool:
        """Whether a passage is one that it names."""
        if self.iteration is not None and iteration != self.iteration:
            return False
        return self.request_id is None or any(fnmatch.fnmatchcase(each, self.request_id) for each in request_ids)


class FaultPlan:
    """Counts passages and strikes; from any thread.

    Attributes:
      struck: strikes so far, by place and kind.
    """

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        self.struck: Counter[tuple[str, str]] = Counter()
        self._passed = [0] * len(self.faults)
        self._lock = threading.Lock()

    def strike(self, at: str, iteration: int | None, request_ids: Iterable[str]) -> Fault | None:
        """Passes a place.

        Returns:
          A fault of a kind that the place itself must carry out; None when there is nothing to do.

        Raises:
          InjectedFault, OSError: as the plan says.
        """
        fault = self._next(at, iteration, tuple(request_ids))
        if fault is None or fault.do in TOLD:
            return fault
        if fault.do == "raise":
            raise InjectedFault(f"{at}: the fault plan says so")
        if fault.do == "disk_full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if fault.do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(fault.seconds)
        return None

    def _next(self, at: str, iteration: int | None, request_ids: tuple[str, ...]) -> Fault | None:
        with self._lock:
            for index, fault in enumerate(self.faults):
                if fault.at != at or not fault.fits(iteration, request_ids):
                    continue
                passed, self._passed[index] = self._passed[index], self._passed[index] + 1
                strike, between = divmod(passed - fault.skip, fault.every)
                if strike >= 0 and not between and (fault.times is None or strike < fault.times):
                    self.struck[at, fault.do] += 1
                    return fault
        return None


def read_fault_plan(path: str) -> FaultPlan:
    """Reads a plan, where plans are allowed.

    Raises:
      ValueError: they are not, or the file is no plan; says what is wrong.
    """
    if os.environ.get(ALLOW_VARIABLE) != "1":
        raise ValueError(f"fault_plan breaks the engine on purpose; a test sets {ALLOW_VARIABLE}=1 in the environment")
    try:
        entries = json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"fault_plan {path} cannot be read: {error}") from None
    if not isinstance(entries, list):
        raise ValueError(f"fault_plan {path} holds {type(entries).__name__}; it must be a JSON list of objects")
    return FaultPlan(_fault(entry, f"fault_plan {path}, entry {number}") for number, entry in enumerate(entries))


_TYPES: dict[str, tuple[type, ...]] = {
    "at": (str,),
    "do": (str,),
    "iteration": (int, type(None)),
    "request_id": (str, type(None)),
    "skip": (int,),
    "every": (int,),
    "times": (int, type(None)),
    "seconds": (int, float),
}
assert set(_TYPES) == {field.name for field in fields(Fault)}


def _fault(entry: Any, where: str) -> Fault:
    if not isinstance(entry, dict):
        raise ValueError(f"{where} is {type(entry).__name__}; it must be an object")
    for name, value in entry.items():
        if name not in _TYPES:
            raise ValueError(f"{where} has {name!r}; names are {', '.join(_TYPES)}")
        if isinstance(value, bool) or not isinstance(value, _TYPES[name]):
            raise ValueError(f"{where}: {name} is {value!r}")
    if missing := [name for name in ("at", "do") if name not in entry]:
        raise ValueError(f"{where} lacks {missing[0]!r}")
    try:
        return Fault(**entry)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
