"""HTTP clients of a soak: each does one action, judges what came back and tells the findings."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import time
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from jaxserve.soak import answers
from jaxserve.soak.answers import Verdict, judge_error, judge_stream, judge_whole
from jaxserve.soak.findings import Findings
from jaxserve.soak.kinds import Action

STUCK_S = 240.0
"""An action without an end after so long is stuck."""
SLOW_BYTES, SLOW_PAUSE_S = 512, 0.02
"""What a slow reader takes at a time, and how long it waits between."""


class HttpClients:
    """Does actions over HTTP, on connections that are kept for each other; a context of one round.

    Args:
      url: of the server.
      findings: that are told.
    """

    def __init__(self, url: str, findings: Findings) -> None:
        self._url, self._findings = url, findings

    async def __aenter__(self) -> HttpClients:
        # Kept for less than the server keeps them: one that it closes at that moment fails the request on it.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3)
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(self._url, connector=connector, timeout=timeout, read_bufsize=2048)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def do(self, action: Action) -> None:
        """One action, from its request to its end."""
        try:
            async with asyncio.timeout(STUCK_S):
                verdict = await self._verdict(action)
        except TimeoutError:
            verdict = Verdict(answers.STUCK, f"no end within {STUCK_S:g} s")
        except (aiohttp.ClientError, OSError) as error:
            verdict = Verdict(answers.BROKEN, f"the connection failed: {error!r}")
        tell(self._findings, action, verdict)

    async def _verdict(self, action: Action) -> Verdict:
        match action.kind:
            case "tokenize":
                return await self._tokenize(action)
            case "duplicate":
                return await self._duplicate(action)
            case "cancel":
                return await self._cancel(action)
        return await self._ask(action)

    async def _ask(self, action: Action, *, fresh_id: bool = True) -> Verdict:
        path = "/v1/chat/completions" if "messages" in action.body else "/v1/completions"
        body = {"request_id": action.request_id} | action.body if fresh_id else action.body
        data = action.raw if action.raw is not None else json.dumps(body).encode()
        began = time.monotonic()
        headers = {"Content-Type": "application/json"}
        async with self._session.post(path, data=data, headers=headers) as response:
            if response.status != 200:
                verdict = judge_error(response.status, await response.read())
                if verdict.outcome == answers.REJECTED:
                    self._findings.latencies_s["refusal"].append(time.monotonic() - began)
                return verdict
            content = await self._read(action, response)
        streamed = action.body.get("stream", False)
        return judge_stream(action, content) if streamed else judge_whole(action, content)

    async def _read(self, action: Action, response: aiohttp.ClientResponse) -> bytes:
        if action.kind != "slow_reader":
            return await response.read()
        pieces = []
        while piece := await response.content.read(SLOW_BYTES):
            pieces.append(piece)
            await asyncio.sleep(SLOW_PAUSE_S)
        return b"".join(pieces)

    async def _cancel(self, action: Action) -> Verdict:
        """Goes away at its moment, unless the answer is there before."""
        asking = asyncio.create_task(self._ask(action))
        done, _ = await asyncio.wait([asking], timeout=action.leave_after_s)
        if done:
            return asking.result()
        asking.cancel()
        await asyncio.wait([asking])
        return Verdict(answers.LEFT)

    async def _duplicate(self, action: Action) -> Verdict:
        """Two at once with one id: one at least is whole, and what is refused is refused by name."""
        body = action.body | {"request_id": action.request_id}
        same = Action(action.at, action.number, action.kind, body)
        first, second = await asyncio.gather(self._ask(same, fresh_id=False), self._ask(same, fresh_id=False))
        for verdict in (first, second):
            if verdict.problem:
                return verdict
        ends = {first.outcome, second.outcome}
        if ends == {answers.REFUSED}:
            return Verdict(answers.BROKEN, "both requests with one id were refused")
        return first if first.outcome != answers.REFUSED else second

    async def _tokenize(self, action: Action) -> Verdict:
        text = action.body["prompt"]
        async with self._session.post("/tokenize", json={"prompt": text, "add_special_tokens": False}) as response:
            if response.status != 200:
                return judge_error(response.status, await response.read())
            tokens = (await response.json())["tokens"]
        async with self._session.post("/detokenize", json={"tokens": tokens}) as response:
            if response.status != 200:
                return judge_error(response.status, await response.read())
            back = (await response.json())["prompt"]
        return Verdict(answers.COMPLETED, "" if back == text else f"{text!r} came back as {back!r}")


def tell(findings: Findings, action: Action, verdict: Verdict) -> None:
    """Counts an end, and what is wrong with it."""
    findings.count(action.kind, verdict.outcome)
    if verdict.problem:
        findings.breach(f"answer of {action.kind}", f"{action.request_id}: {verdict.problem}")
    elif not answers.allowed(action.kind, verdict.outcome, findings.faults_allowed):
        asked = str(action.raw or action.body)[:200]
        findings.breach(f"end of {action.kind}", f"{action.request_id} ended as {verdict.outcome}: {asked}")


async def storm(url: str, rng: random.Random, count: int, findings: Findings) -> None:
    """`count` connections at once that come and go: without a word, amid a request, or right after one."""
    await asyncio.gather(*(_come_and_go(url, rng.randrange(4), rng.random() * 0.3, findings) for _ in range(count)))


async def _come_and_go(url: str, way: int, stay_s: float, findings: Findings) -> None:
    host, port = urlsplit(url).hostname, urlsplit(url).port
    body = json.dumps({"prompt": "the sea", "max_tokens": 50, "stream": True, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n".encode()
    head += f"Content-Length: {len(body)}\r\n\r\n".encode()
    sent: tuple[bytes, ...] = (b"", head[:40], head + body[:10], head + body)
    try:
        async with asyncio.timeout(STUCK_S):
            _, writer = await asyncio.open_connection(host, port)
            writer.write(sent[way])
            await asyncio.sleep(stay_s)
            reset(writer)
    except OSError as error:
        findings.breach("storm", f"a connection failed: {error!r}")
    findings.count("storm", answers.LEFT)


def reset(writer: asyncio.StreamWriter) -> None:
    """Closes a connection with RST, not FIN."""
    connection: Any = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
