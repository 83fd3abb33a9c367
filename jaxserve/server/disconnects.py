"""Noticing that a client has gone."""

from __future__ import annotations

from starlette.types import Receive


async def disconnected(receive: Receive) -> None:
    """Returns once the client's connection is closed; the request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
