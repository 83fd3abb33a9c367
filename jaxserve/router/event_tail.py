"""EventTail: passes server-sent events on whole, so that an error event can follow whatever was sent."""

from __future__ import annotations

MAX_TAIL_BYTES = 1 << 20
"""An event longer than this is passed on in pieces."""
_ENDS = b"\n\n", b"\n\r\n"
"""Of a line and of the blank one behind it; lines end with LF or CRLF."""


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
        if data.endswith(_ENDS):
            self._rest = b""
            return data
        end = max(at + len(each) if (at := data.rfind(each)) >= 0 else 0 for each in _ENDS)
        if not end and len(data) > MAX_TAIL_BYTES:
            end = len(data)
        self._rest = data[end:]
        return data[:end]

    def flush(self) -> bytes:
        """What is held, at the end of a stream that ended well."""
        rest, self._rest = self._rest, b""
        return rest
