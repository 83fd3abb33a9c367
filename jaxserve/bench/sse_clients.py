"""`python -m jaxserve.bench.sse_clients '[PORT, STREAMS, PATH, BODY]'`: the clients of `bench sse`.

Opens so many streams at once, reads them to their ends and prints how many events came.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any


async def count_events(port: int, streams: int, path: str, body: dict[str, Any]) -> int:
    """Events of all streams together."""
    payload = json.dumps(body).encode()
    lines = (
        f"POST {path} HTTP/1.1",
        "Host: 127.0.0.1",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(payload)}",
        "\r\n",
    )
    request = "\r\n".join(lines).encode() + payload

    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        count, rest = 0, b""
        while data := await reader.read(1 << 16):
            rest += data
            count += rest.count(b"data: ")
            rest = rest[-5:]  # shorter than the mark, which may be cut
        writer.close()
        return count

    return sum(await asyncio.gather(*(one() for _ in range(streams))))


if __name__ == "__main__":
    print(asyncio.run(count_events(*json.loads(sys.argv[1]))))
