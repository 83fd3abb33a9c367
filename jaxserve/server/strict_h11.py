"""h11, and what it forgives: what two servers may read in two ways is refused.

A front before this one, or behind it, that finds another end of a request than this one does lets a client put a
request of its own into somebody else's connection. So a request must say its length once and in one way, and lines end
with CR LF, as RFC 9112 has it, whatever it lets a server put up with.
"""

from __future__ import annotations

import re

import h11

MAX_HEAD_BYTES = 64 << 10
MAX_FIELDS = 256
_LINE_ENDS = re.compile(rb"(?<!\r)\n|\r(?!\n|\Z)")
_FOLDED = re.compile(rb"\n[ \t]")
_LENGTH = re.compile(rb"[ \t]*[0-9]{1,18}[ \t]*")
_VERSIONS = (b" HTTP/1.1", b" HTTP/1.0")


class StrictConnection(h11.Connection):
    """The server's side of a connection.

    Attributes:
      fault: what is wrong with the request that was refused last, for the client.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self.fault = ""
        self._num_checked = 0  # bytes of a head that is not whole yet: however small its pieces, each is looked at once

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """As h11's; raises RemoteProtocolError for more."""
        try:
            if self.their_state is h11.IDLE:
                data = self.trailing_data[0]
                _check_head(data, self._num_checked)
                self._num_checked = len(data)
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            self.fault = str(error)
            raise
        if event is not h11.NEED_DATA:
            self._num_checked = 0
        return event


def _check_head(data: bytes, num_checked: int) -> None:
    """Looks at the beginning of a request, whole or not, of which so many bytes have been looked at.

    Raises:
      RemoteProtocolError: it is not to be read further.
    """
    end = data.find(b"\r\n\r\n", max(num_checked - 3, 0))
    length = len(data) if end < 0 else end
    if length > MAX_HEAD_BYTES:
        raise h11.RemoteProtocolError(f"the head is longer than {MAX_HEAD_BYTES} bytes")
    first = max(num_checked - 1, 0)
    if _LINE_ENDS.search(data, first, length):
        raise h11.RemoteProtocolError("a line of the head does not end with CR LF")
    if _FOLDED.search(data, first, length):
        raise h11.RemoteProtocolError("a header goes on in the next line")
    if end >= 0:
        request_line, *fields = data[:end].split(b"\r\n")
        _check_framing(request_line, fields)


def _check_framing(request_line: bytes, fields: list[bytes]) -> None:
    if not request_line.endswith(_VERSIONS):
        raise h11.RemoteProtocolError("the request line does not end with HTTP/1.1")
    if len(fields) > MAX_FIELDS:
        raise h11.RemoteProtocolError(f"there are {len(fields)} headers; the limit is {MAX_FIELDS}")
    values: dict[bytes, list[bytes]] = {b"content-length": [], b"transfer-encoding": []}
    for line in fields:
        name, _, value = line.partition(b":")
        found = values.get(name.strip().lower())
        if found is not None:
            found.append(value)
    lengths, codings = values.values()
    if len(lengths) + len(codings) > 1:
        raise h11.RemoteProtocolError("the body's length is given twice: one Content-Length or Transfer-Encoding")
    if lengths and not _LENGTH.fullmatch(lengths[0]):
        raise h11.RemoteProtocolError("Content-Length is no number of bytes")
    if codings and request_line.endswith(_VERSIONS[1]):
        raise h11.RemoteProtocolError("HTTP/1.0 has no Transfer-Encoding")
