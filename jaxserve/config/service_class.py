"""ServiceClass: a named kind of traffic with limits, targets and defaults of its own."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jaxserve.config.checks import at_least, positive


@dataclass(frozen=True, slots=True)
class ServiceClass:
    """Limits, targets and defaults of the requests that name this class; None: no limit, target or default.

    Attributes:
      name: what a request names.
      max_slots: most requests of the class that hold a slot.
      max_queue_requests, max_queue_tokens: bounds of its part of the waiting queue.
      ttft_target_s: most seconds from arrival to first token. The simulator measures the class against it.
      itl_target_s: most seconds between two tokens. The simulator measures the class against it, and the scheduler
        keeps iterations in which requests of the class decode within it.
      priority: of requests that state none.
      deadline_s: of requests that state none, from their arrival.
    """

    name: str
    max_slots: int | None = None
    max_queue_requests: int | None = None
    max_queue_tokens: int | None = None
    ttft_target_s: float | None = None
    itl_target_s: float | None = None
    priority: int = 0
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name is {self.name!r}; a service class needs a name")
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise ValueError(f"priority of service class {self.name} is {self.priority!r}; it must be an integer")
        for name, low in (("max_slots", 1), ("max_queue_requests", 0), ("max_queue_tokens", 0)):
            if getattr(self, name) is not None:
                at_least(f"{name} of service class {self.name}", getattr(self, name), low)
        for name in ("ttft_target_s", "itl_target_s", "deadline_s"):
            if getattr(self, name) is not None:
                positive(f"{name} of service class {self.name}", getattr(self, name))


def read_service_classes(path: str | Path) -> tuple[ServiceClass, ...]:
    """Reads a JSON file: `{"NAME": {"max_slots": 4, ...}, ...}` with the fields of `ServiceClass`.

    Raises:
      ValueError: the file cannot be read, or breaks a rule; the message names file, class and field.
    """
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"service_classes file {path}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(
            f"service_classes file {path} holds a {type(content).__name__}; it must be an object of classes"
        )
    return tuple(_service_class(path, name, settings) for name, settings in content.items())


def _service_class(path: str | Path, name: str, settings: Any) -> ServiceClass:
    if not isinstance(settings, dict):
        raise ValueError(f"service_classes file {path}: {name} must be an object of settings")
    known = [field.name for field in fields(ServiceClass)][1:]
    for key in settings:
        if key not in known:
            raise ValueError(f"service_classes file {path}: {name} has {key!r}; it may have {', '.join(known)}")
    try:
        return ServiceClass(name, **settings)
    except ValueError as error:
        raise ValueError(f"service_classes file {path}: {error}") from None
