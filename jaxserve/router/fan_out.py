"""Requests that concern every replica: merged lists, sums, and changes that all must make."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.responses import Response

from jaxserve.router.pool import Replica, ReplicaPool, cause
from jaxserve.router.proxy import no_replica
from jaxserve.router.upstream import FAILURES, TextHeaders, Upstream
from jaxserve.server.errors import ApiError
from jaxserve.server.json_body import JsonResponse, error_response

TIMEOUT_S = 120.0
"""For one replica's answer: an adapter may be large."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a replica said.

    Attributes:
      status: HTTP status; 503 where there was no answer.
    """

    replica: Replica
    status: int
    body: bytes
    content_type: str

    def response(self) -> Response:
        """The same, for the client."""
        return Response(self.body, self.status, media_type=self.content_type)

    def document(self) -> dict[str, Any]:
        """The body as a JSON object; empty if it is none."""
        try:
            found = orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return {}
        return found if isinstance(found, dict) else {}


async def ask_all(
    pool: ReplicaPool,
    upstream: Upstream,
    method: str,
    target: str,
    headers: TextHeaders,
    body: bytes | None = None,
) -> list[Reply]:
    """The replies of all replicas in rotation, by number.

    Raises:
      ApiError: there is none.
    """
    replicas = pool.in_rotation
    if not replicas:
        raise no_replica()
    return list(await asyncio.gather(*(_ask(each, upstream, method, target, headers, body) for each in replicas)))


async def _ask(
    replica: Replica, upstream: Upstream, method: str, target: str, headers: TextHeaders, body: bytes | None
) -> Reply:
    try:
        async with asyncio.timeout(TIMEOUT_S):
            async with await upstream.open(replica.url + target, method, headers, body) as answer:
                return Reply(replica, answer.status, await answer.read(), answer.content_type)
    except FAILURES as error:
        lost = ApiError("unavailable", f"replica {replica.name} did not answer: {cause(error)}", code="replica_lost")
        return Reply(replica, lost.http_status, orjson.dumps(lost.body()), "application/json")


def merged_models(replies: Sequence[Reply]) -> Response:
    """One list of what the replicas serve, each name once; the first reply where none is a list."""
    cards: dict[str, Any] = {}
    for reply in replies:
        if reply.status == 200:
            for card in reply.document().get("data") or ():
                cards.setdefault(str(card["id"]), card)
    return JsonResponse({"object": "list", "data": list(cards.values())}) if cards else replies[0].response()


def one_model(replies: Sequence[Reply]) -> Response:
    """The card of one that has it, else what the first says."""
    return next((each for each in replies if each.status == 200), replies[0]).response()


def summed_load(replies: Sequence[Reply]) -> Response:
    """`/load` of all: counts added up, the fullest cache; the first reply where none tells."""
    loads = [each.document() for each in replies if each.status == 200]
    if not loads:
        return replies[0].response()
    total: dict[str, Any] = {
        name: sum(load.get(name) or 0 for load in loads)
        for name in ("server_load", "num_requests_running", "num_requests_waiting")
    }
    total["kv_cache_usage_perc"] = max(load.get("kv_cache_usage_perc") or 0.0 for load in loads)
    return JsonResponse(total | {"num_replicas": len(loads)})


def all_or_which(replies: Sequence[Reply]) -> Response:
    """The first reply if all agree that it went well, or that it did not; else an error that names who did what.

    Nothing is undone: what half of the replicas did is theirs to keep until it is asked for again.
    """
    done = [each for each in replies if each.status < 300]
    failed = [each for each in replies if each.status >= 300]
    if not done or not failed:
        return replies[0].response()
    first = failed[0]
    told = first.document().get("error")
    why = told.get("message") if isinstance(told, dict) else None
    message = (
        f"replicas {', '.join(each.replica.name for each in done)} did it,"
        f" {', '.join(each.replica.name for each in failed)} did not; the first of these said {first.status}: {why}"
    )
    return error_response(ApiError("internal", message, code="replicas_disagree"))
