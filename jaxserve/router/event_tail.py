"""EventTail: passes server-sent events on whole, so that an error event can follow whatever was sent."""

from __future__ import annotations

MAX_TAIL_BYTES = 1 << 20
"""An event longer than this is passed on in pieces."""
_END = b"\n\n"


class EventTail:
    """Cuts a stream of bytes behind its last whole event.

    What comes out is what went in, byte for byte. Servers write whole events, so hardly ever is anything held back: the
    part of an event that was cut in two on its way.
    """

    def __init__(self) -> None:
        self._rest = b""

    def take(self, chunk: bytes) -> bytes:
        """What may be passed on once `chunk` has come; the rest is held."""
        data = self._rest + chunk if self._rest else chunk
        if data.endswith(_END):
            self._rest = b""
            return data
        end = data.rfind(_END) + len(_END)
        if end < len(_END):
            end = len(data) if len(data) > MAX_TAIL_BYTES else 0
        self._rest = data[end:]
        return data[:end]

    def flush(self) -> bytes:
        """What is held, at the end of a stream that ended well."""
        rest, self._rest = self._rest, b""
        return rest
