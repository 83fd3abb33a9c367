"""DummyTokens: tokens for a replay, alike where the recorded ones were alike as far as a prefix cache can tell.

Without a prefix cache every token is the same. With one, a trace numbers full pages: equal numbers, equal
content from the first token on. All tokens of such a page are made from its number, so the replay's pages
are alike in the same places. Pages fill up with outputs after they are needed as prompts, so the numbers
are gathered from the whole trace first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from jaxserve.config import SchedulerConfig
from jaxserve.scheduler.trace_reader import AbortEvent, AddEvent, EventsRecord, ExpireEvent, IterationRecord

TOKEN, STOP = 0, 1
_FIRST = 2


class DummyTokens:
    """Tokens of the requests of a trace.

    Args:
      records: of the whole trace; read only with a prefix cache.
    """

    def __init__(self, config: SchedulerConfig, records: Iterable[EventsRecord]) -> None:
        self._page_size = config.page_size
        self._to_come: deque[list[int]] = deque()  # page numbers by accepted arrival
        self._current: dict[str, tuple[int, list[int]]] = {}  # by id: number of the arrival, page numbers
        self._num_accepted = 0
        self._shares = config.enable_prefix_caching
        if self._shares:
            self._gather(records)

    def prompt_of(self, event: AddEvent) -> tuple[int, ...]:
        """The prompt of an arrival; asked once for each, in order."""
        if not self._shares or not event.accepted:
            return (TOKEN,) * event.num_prompt_tokens
        self._current[event.request_id] = (self._num_accepted, self._to_come.popleft())
        self._num_accepted += 1
        return tuple(self.at(event.request_id, index) for index in range(event.num_prompt_tokens))

    def at(self, request_id: str, index: int) -> int:
        """The token at `index` of prompt and output."""
        if not self._shares or request_id not in self._current:
            return TOKEN
        arrival, pages = self._current[request_id]
        page = index // self._page_size
        return _FIRST + (2 * pages[page] if page < len(pages) else 2 * arrival + 1)

    def _gather(self, records: Iterable[EventsRecord]) -> None:
        live: dict[str, list[int]] = {}
        for record in records:
            for event in record.events:
                if isinstance(event, AbortEvent | ExpireEvent):
                    live.pop(event.request_id, []).extend(event.pages)
                elif isinstance(event, AddEvent) and event.accepted:
                    live[event.request_id] = list(event.pages)
                    self._to_come.append(live[event.request_id])
            if isinstance(record, IterationRecord):
                for request_id, numbers in record.named:
                    live.get(request_id, []).extend(numbers)
                for request_id in record.completed_in_update:
                    live.pop(request_id, None)
