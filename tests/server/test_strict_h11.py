"""Requests as bytes come in: the same answer whole and in pieces, and no byte looked at twice."""

import re

import h11
import pytest

from jaxserve.server import strict_h11
from jaxserve.server.strict_h11 import MAX_HEAD_BYTES, StrictConnection

GOOD = b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi"
BAD = {
    "LF alone": b"GET / HTTP/1.1\r\nHost: a\nX: b\r\n\r\n",
    "CR alone": b"GET / HTTP/1.1\r\nHost: a\rX: b\r\n\r\n",
    "folded": b"GET / HTTP/1.1\r\nHost: a\r\n b\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\n",
    "too long": b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n",
}
PIECES = (1, 2, 3, 7, 1 << 20)


def events(data, size):
    """What a connection makes of bytes that come in pieces."""
    connection, found = StrictConnection(), []
    for first in range(0, len(data), size):
        connection.receive_data(data[first : first + size])
        while True:
            event = connection.next_event()
            if event in (h11.NEED_DATA, h11.PAUSED):
                break
            found.append(event)
            if isinstance(event, h11.EndOfMessage):
                connection.send(h11.Response(status_code=204, headers=[]))
                connection.send(h11.EndOfMessage())
                connection.start_next_cycle()
    return found


@pytest.mark.parametrize("size", PIECES)
def test_requests_in_pieces_are_the_requests(size):
    found = events(GOOD * 3, size)
    assert [type(each) for each in found if not isinstance(each, h11.Data)] == [h11.Request, h11.EndOfMessage] * 3
    assert b"".join(each.data for each in found if isinstance(each, h11.Data)) == b"hi" * 3


@pytest.mark.parametrize("size", PIECES)
@pytest.mark.parametrize("name", BAD)
def test_a_bad_head_is_refused_in_any_pieces(name, size):
    with pytest.raises(h11.RemoteProtocolError):
        events(GOOD + BAD[name], size)


def test_a_head_in_small_pieces_is_searched_once(monkeypatch):
    searched = 0

    class Counting:
        def __init__(self, pattern):
            self._pattern = pattern

        def search(self, data, first, end):
            nonlocal searched
            searched += end - first
            return self._pattern.search(data, first, end)

    for name in ("_LINE_ENDS", "_FOLDED"):
        monkeypatch.setattr(strict_h11, name, Counting(re.compile(getattr(strict_h11, name).pattern)))
    head = b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 20_000 + b"\r\n\r\n"
    assert isinstance(events(head, 1)[0], h11.Request)
    assert searched < 8 * len(head)
