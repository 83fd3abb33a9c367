"""OpenStreams: the streams of requests that have not ended, by the client's id; from any thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from jaxserve.engine.stream import RequestStream


class OpenStreams:
    """Each id is of one stream at a time."""

    def __init__(self) -> None:
        self._streams: dict[str, RequestStream] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    def find(self, request_id: str) -> RequestStream | None:
        """The stream of that id, if there is one."""
        with self._lock:
            return self._streams.get(request_id)

    def all(self) -> list[RequestStream]:
        """Those of now."""
        with self._lock:
            return list(self._streams.values())

    def register(self, streams: Sequence[RequestStream]) -> str | None:
        """Takes the ids of all streams or of none.

        Returns:
          An id that is taken, or comes twice; None when all are registered.
        """
        named = {stream.request_id: stream for stream in streams}
        with self._lock:
            taken = [request_id for request_id in named if request_id in self._streams]
            if not taken and len(named) == len(streams):
                self._streams.update(named)
                return None
        return taken[0] if taken else next(iter(named))

    def forget(self, stream: RequestStream) -> None:
        """Gives its id free; nothing happens when another stream has it."""
        with self._lock:
            if self._streams.get(stream.request_id) is stream:
                del self._streams[stream.request_id]
