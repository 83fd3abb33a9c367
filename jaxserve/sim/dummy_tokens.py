"""DummyTokens: tokens for a replay, alike where the recorded ones were alike as far as a prefix cache can tell.

Without a prefix cache every token is the same. With one, a trace numbers full pages: equal numbers, equal
content from the first token on. All tokens of such a page are made from its number, so the replay's pages
are alike in the same places. Pages fill up with outputs after they are needed as prompts, so the numbers
are gathered from the whole trace first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from jaxserve.config import SchedulerConfig
from jaxserve.scheduler.snapshot import STOP_IDS, page_token
from jaxserve.scheduler.trace_records import AbortEvent, AddEvent, EventsRecord, ExpireEvent, IterationRecord

TOKEN, STOP = 0, *STOP_IDS


class DummyTokens:
    """Tokens of the requests of a trace.

    Args:
      records: of the whole trace; read only with a prefix cache.
      live: where the trace begins in the middle of a run, id and page numbers of the requests that were live then.
    """

    def __init__(
        self, config: SchedulerConfig, records: Iterable[EventsRecord], live: Sequence[tuple[str, list[int]]] = ()
    ) -> None:
        self._page_size = config.page_size
        self._to_come: deque[list[int]] = deque()  # page numbers by accepted arrival
        self._current: dict[str, tuple[int, list[int]]] = {}  # by id: number of the arrival, page numbers
        self._num_accepted = 0
        self._shares = config.enable_prefix_caching
        if self._shares:
            self._current = {name: (arrival, list(pages)) for arrival, (name, pages) in enumerate(live)}
            self._num_accepted = len(self._current)
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
        return page_token(pages[page]) if page < len(pages) else page_token(arrival) + 1

    def _gather(self, records: Iterable[EventsRecord]) -> None:
        live = {name: pages for name, (_, pages) in self._current.items()}
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
