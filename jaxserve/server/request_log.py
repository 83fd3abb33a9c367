"""What becomes of ended requests besides their answers: a line in the log, a span.

The engine hands each `RequestRecord` over under its lock, so all that happens there is a `put` into a bounded queue;
writing, and whatever it waits for, is on a thread of its own. Records that find the queue full are counted and the
count is logged: a log that cannot be written never holds up a token.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from jaxserve.core import RequestRecord
from jaxserve.server.errors import status_of_end

log = logging.getLogger("jaxserve.server.requests")

CAPACITY = 10_000
"""Records that may wait to be written."""

Sink = Callable[[RequestRecord], None]
TextOf = Callable[[Sequence[int]], str]


class RequestFeed:
    """Takes records from any thread without waiting and gives them to sinks on its own, as a context manager.

    Args:
      sinks: called in order with each record; what they raise is logged and ends nothing.
      capacity: records that may wait.
    """

    def __init__(self, sinks: Sequence[Sink], capacity: int = CAPACITY) -> None:
        self._sinks = sinks
        self._records: queue.Queue[RequestRecord | None] = queue.Queue(capacity)
        self._num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)

    def __call__(self, record: RequestRecord) -> None:
        """Takes a record in, or drops it when too many wait."""
        try:
            self._records.put_nowait(record)
        except queue.Full:
            self._num_dropped += 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        """Gives what waits to the sinks, for a few seconds at most."""
        try:
            self._records.put(None, timeout=1)
        except queue.Full:
            return  # the sinks do not get on
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while (record := self._records.get()) is not None:
            for sink in self._sinks:
                try:
                    sink(record)
                except Exception:
                    log.exception("a record of a request could not be written")
            dropped, self._num_dropped = self._num_dropped, 0
            if dropped:
                log.warning("%d records of requests were dropped: they came faster than they could be written", dropped)


class RequestLog:
    """A sink that logs a line per request.

    Args:
      text_of: gives the text of a prompt, to be logged too; None: no prompt is logged.
      max_chars: of a prompt's text.
    """

    def __init__(self, text_of: TextOf | None = None, max_chars: int = 256) -> None:
        self._text_of = text_of
        self._max_chars = max_chars

    def __call__(self, record: RequestRecord) -> None:
        """Logs it."""
        fields = request_fields(record)
        if self._text_of is not None:
            # A token is at least a character, or part of one: no more of them are needed.
            ids = record.request.prompt_token_ids[: 4 * self._max_chars]
            fields["prompt"] = self._text_of(ids)[: self._max_chars]
        log.info("%s", _line(fields), extra={"fields": fields})


def request_fields(record: RequestRecord) -> dict[str, Any]:
    """What the log says of a request; a field that has no value is None."""
    request = record.request
    return {
        "request_id": request.request_id,
        "tenant": request.tenant or None,
        "service_class": request.service_class or None,
        "status": status_of_end(record.outcome, record.rejected, record.cause),
        "finish_reason": record.outcome,
        "cause": record.cause or None,
        "prompt_tokens": request.num_prompt_tokens,
        "cached_tokens": record.num_cached_tokens,
        "output_tokens": record.num_output_tokens,
        "queue_s": _rounded(record.queue_s),
        "ttft_s": _rounded(record.ttft_s),
        "mean_itl_s": _rounded(record.mean_itl_s),
        "e2e_s": _rounded(record.e2e_s),
    }


def _line(fields: dict[str, Any]) -> str:
    # Ids, tenants and prompts are the client's: quoted where they hold more than plain words.
    return "request " + " ".join(f"{name}={_quoted(value)}" for name, value in fields.items() if value is not None)


def _quoted(value: Any) -> str:
    text = str(value)
    plain = text.isascii() and text.isprintable() and not set(text) & set(' "=\\') and text
    return text if plain else json.dumps(text)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
