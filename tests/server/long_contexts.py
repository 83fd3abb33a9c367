"""A server of long contexts, on buffers so small that a reader who stops is noticed."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.engine import AsyncEngine
from jaxserve.testing.tiny import write_tiny_model
from tests.server.gated_engine import GatedEngine
from tests.server.running import RunningServer, until

SLOTS = 5


@contextlib.contextmanager
def serve_long_contexts(
    model: Path, max_model_len: int, page_size: int = 16, max_queue_requests: int = 8, **overrides: Any
) -> Iterator[RunningServer]:
    """The tiny model on `SLOTS` slots, each of which may fill the context; `overrides` of its config.json."""
    width = -(-max_model_len // page_size)
    config = EngineConfig(
        model=str(write_tiny_model(model, max_position=max_model_len, **overrides)),
        dtype="float32",
        max_model_len=max_model_len,
        max_num_seqs=SLOTS,
        max_queue_requests=max_queue_requests,
        max_num_batched_tokens=64,
        prefill_chunk=16,
        page_size=page_size,
        num_pages=SLOTS * width + 1,
        decode_buckets=(SLOTS,),
        prefill_buckets=(64,),
        table_width_buckets=(width,),
        served_model_name="tiny",
        compile_cache="",
    )
    engine = AsyncEngine(config, factory=GatedEngine)
    engine.start()
    until(lambda: engine.state in ("ready", "dead"), 200, "ready")
    server = RunningServer(lambda: engine)
    # Accepted connections inherit it: the kernel is not to hold a whole answer for a reader that stalls.
    server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
    yield server
    server.stop()
    engine.engine.gate.set()
    engine.shutdown()


def narrow_connection(server: RunningServer, receive_bytes: int = 2048) -> socket.socket:
    """A connection whose client takes little in unless it reads.

    Under a few KiB a pause makes Linux close the window so far that it opens at the server's next probe only, up to
    two minutes later.
    """
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.connect(("127.0.0.1", server.port))
    return connection


def unchunked(data: bytes) -> str:
    """The body of a chunked HTTP answer."""
    rest, body = data.split(b"\r\n\r\n", 1)[1], b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        if int(size, 16) == 0:
            break
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return body.decode()
