"""Pull: one prompt's pages from one prefill server, over as many connections as it takes.

A connection that is lost, or whose block is damaged, is made anew and goes on with the block that is lacking; a server
that does not answer the question at all is not asked again. What a prefill server sends is compared with what the
prompt must have, block by block: no length or place is taken on trust.
"""

from __future__ import annotations

import array
import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxserve.core import JaxserveError
from jaxserve.disaggregation.frames import (
    HANDSHAKE_S,
    VERSION,
    Channel,
    FrameError,
    Kind,
    checksum,
    field,
    proof,
    proves,
)
from jaxserve.disaggregation.kv_layout import KVLayout, as_bytes
from jaxserve.runtime import PageBlock
from jaxserve.runtime.kv_pool import SWAP_BLOCK

CONNECT_S = 2.0
SILENCE_S = 5.0
"""A prefill server says something every second."""
MAX_RESUMES = 3
BACKOFF_S = 0.1
_OF_REFUSALS = {"layout": "layout", "token": "token", "protocol": "protocol", "starting": "unreachable"}

PullByNumber = Callable[[str, int, float], tuple[Any, ...]]
"""Gets a block's arrays by address, number and seconds; see `JaxReceiver.pull`."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A prompt to be computed.

    Attributes:
      request_id: of the request here; its request there has the same.
      prompt: token ids of whole pages.
      adapter: name of its LoRA adapter; "": none.
      priority: None: the prefill server's own.
      deadline_s: seconds that are left of its deadline; None: there is none.
      tenant, cache_salt, traceparent: see `Terms`.
    """

    request_id: str
    prompt: tuple[int, ...]
    adapter: str = ""
    priority: int | None = None
    deadline_s: float | None = None
    tenant: str = ""
    cache_salt: str = ""
    traceparent: str = ""


class PullError(JaxserveError):
    """A prefill server did not compute a prompt.

    Attributes:
      reason: one of `metrics.LOCAL_REASONS`.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Pages:
    """The pages of one prompt, as far as they have come.

    Args:
      layout: of this engine.
      num_tokens: of the prompt, whole pages.

    Attributes:
      blocks: in the order in which they came.
    """

    def __init__(self, layout: KVLayout, num_tokens: int) -> None:
        self._layout = layout
        self._num_pages = num_tokens // layout.page_size
        self._next = layout.first_pages(num_tokens)
        self.blocks: list[PageBlock] = []

    @property
    def complete(self) -> bool:
        """All are there."""
        return all(number == self._num_pages for number in self._next)

    def place(self, fields: dict[str, Any]) -> tuple[int, int, int]:
        """Group, first page and count of the block that comes next.

        Raises:
          FrameError: it is not the one that must come, or not of this prompt.
        """
        index, group = field(fields, "index", int), field(fields, "group", int)
        first, count = field(fields, "first", int), field(fields, "count", int)
        if index != len(self.blocks):
            raise FrameError(f"block {index} came; {len(self.blocks)} was to come")
        if not 0 <= group < len(self._next):
            raise FrameError(f"block {index} is of group {group}; there are {len(self._next)}")
        if first != self._next[group] or not 1 <= count <= SWAP_BLOCK or first + count > self._num_pages:
            raise FrameError(
                f"block {index} has {count} pages from {first} on of group {group}; {self._next[group]} was to come, of"
                f" {self._num_pages}"
            )
        return group, first, count

    def add(self, block: PageBlock) -> None:
        """The block whose place was asked for has come."""
        self.blocks.append(block)
        self._next[block.group] += block.count


class Puller:
    """Asks one prefill server, from any threads.

    Args:
      address: host and port.
      layout: of this engine.
      token: shared with it; "": none.
      pull_by_number: moves blocks where they do not come over the connection; None: they do.
    """

    def __init__(
        self, address: tuple[str, int], layout: KVLayout, token: str, pull_by_number: PullByNumber | None = None
    ) -> None:
        self._address = address
        self._layout = layout
        self._token = token
        self._pull_by_number = pull_by_number

    def pull(
        self,
        wanted: Wanted,
        timeout_s: float,
        cancelled: threading.Event,
        on_resume: Callable[[], None] = lambda: None,
    ) -> list[PageBlock]:
        """All pages of a prompt.

        Args:
          timeout_s: most seconds in all.
          cancelled: when it is set, nobody wants them any more.
          on_resume: told of every connection after the first.

        Raises:
          PullError: they cannot be had.
        """
        pages, key = Pages(self._layout, len(wanted.prompt)), secrets.token_hex(16)
        ends_at = time.monotonic() + timeout_s
        for attempt in range(MAX_RESUMES + 1):
            if attempt:
                on_resume()
            try:
                self._connect_and_take(wanted, key, pages, ends_at, cancelled)
                return pages.blocks
            except (OSError, FrameError) as error:
                reason = "protocol" if isinstance(error, FrameError) else "unreachable"
                if attempt == MAX_RESUMES or isinstance(error, ConnectionRefusedError):
                    raise PullError(reason, f"{self._name}: {error}") from error
            if cancelled.wait(min(BACKOFF_S * 2**attempt, max(ends_at - time.monotonic(), 0.0))):
                raise PullError("timeout", f"{self._name}: nobody waits for it any more")
        raise AssertionError("every attempt returns or raises")

    @property
    def _name(self) -> str:
        return f"prefill server {self._address[0]}:{self._address[1]}"

    def _connect_and_take(
        self, wanted: Wanted, key: str, pages: Pages, ends_at: float, cancelled: threading.Event
    ) -> None:
        left = ends_at - time.monotonic()
        if left <= 0.0:
            raise PullError("timeout", f"{self._name} did not answer in time")
        try:
            connection = socket.create_connection(self._address, min(CONNECT_S, left))
        except TimeoutError as error:
            raise PullError("unreachable", f"{self._name} does not answer: {error}") from error
        channel = Channel(connection, SILENCE_S)
        try:
            accepted = self._ask(channel, wanted, key, len(pages.blocks))
            try:
                address = self._transport(accepted)
                self._take(channel, pages, address, ends_at, cancelled)
            except PullError:
                with contextlib.suppress(OSError):
                    channel.send(Kind.DONE)  # nobody comes back for the rest
                raise
        finally:
            channel.close()

    def _ask(self, channel: Channel, wanted: Wanted, key: str, first: int) -> dict[str, Any]:
        """What the server says to the question.

        Raises:
          PullError: it refuses, or says nothing.
        """
        try:
            channel.limit(HANDSHAKE_S)
            self._greet(channel, len(wanted.prompt))
            channel.limit()
            prompt = memoryview(array.array("i", wanted.prompt).tobytes())
            channel.send(Kind.PULL, self._question(wanted, key, first), [prompt])
            try:
                return self._expect(channel, Kind.ACCEPT)[1]
            except TimeoutError:
                with contextlib.suppress(OSError):
                    channel.send(Kind.DONE)  # nobody waits for what it may have begun
                raise
        except TimeoutError as error:
            raise PullError("unreachable", f"{self._name} does not answer: {error}") from error

    def _greet(self, channel: Channel, num_tokens: int) -> None:
        _, hello = self._expect(channel, Kind.HELLO)
        if hello.get("version") != VERSION:
            message = (
                f"{self._name} speaks version {hello.get('version')}, this server {VERSION}; use one version of both"
            )
            raise PullError("protocol", message)
        nonce = secrets.token_hex(16)
        channel.send(Kind.AUTH, {"proof": proof(self._token, field(hello, "nonce", str), "decode"), "nonce": nonce})
        _, answer = self._expect(channel, Kind.PROOF)
        if not proves(self._token, nonce, "prefill", answer.get("proof")):
            raise PullError("token", f"{self._name} does not know the token; both servers need the same")
        try:
            difference = self._layout.difference(KVLayout.from_json(hello.get("layout")))
        except ValueError as error:
            raise FrameError(str(error)) from error
        if difference is not None:
            raise PullError("layout", f"{self._name}: {difference}")
        most = field(hello, "max_tokens", int)
        if num_tokens > most:
            raise PullError("refused", f"{self._name} takes {most} tokens; the prompt has {num_tokens}")

    def _question(self, wanted: Wanted, key: str, first: int) -> dict[str, Any]:
        return {
            "key": key,
            "first": first,
            "request_id": wanted.request_id,
            "adapter": wanted.adapter,
            "priority": wanted.priority,
            "deadline_s": wanted.deadline_s,
            "tenant": wanted.tenant,
            "cache_salt": wanted.cache_salt,
            "traceparent": wanted.traceparent,
            "transport": "stream" if self._pull_by_number is None else "jax",
            "layout": self._layout.to_json(),
        }

    def _expect(self, channel: Channel, *kinds: Kind, max_payload: int = 0) -> tuple[Kind, dict[str, Any]]:
        """The next frame, unless it is a refusal; its payload, at most `max_payload`, is still to be read."""
        kind, fields, size = channel.receive(*kinds, Kind.REFUSE, max_payload=max_payload)
        if kind is Kind.REFUSE:
            reason = _OF_REFUSALS.get(str(fields.get("reason")), "refused")
            raise PullError(
                reason, f"{self._name} refused ({fields.get('reason')}): {str(fields.get('message'))[:500]}"
            )
        return kind, fields | {"payload": size}

    def _transport(self, accepted: dict[str, Any]) -> str:
        """The address to pull blocks from; "": they come over the connection."""
        transport = accepted.get("transport")
        if (transport == "jax") != (self._pull_by_number is not None):
            raise PullError("protocol", f"{self._name} moves pages by {transport!r}; set --kv_transfer alike on both")
        return field(accepted, "address", str) if transport == "jax" else ""

    def _take(self, channel: Channel, pages: Pages, address: str, ends_at: float, cancelled: threading.Event) -> None:
        most = 0 if address else SWAP_BLOCK * self._layout.page_bytes
        while True:
            kind, fields = self._expect(channel, Kind.BLOCK, Kind.WAIT, Kind.END, max_payload=most)
            if kind is Kind.BLOCK:
                pages.add(self._block(channel, pages, fields, address, ends_at))
                channel.send(Kind.ACK, {"index": len(pages.blocks) - 1})
            elif kind is Kind.END:
                if not pages.complete:
                    raise FrameError(f"the end came after {len(pages.blocks)} blocks, with pages missing")
                channel.send(Kind.DONE)
                return
            if cancelled.is_set() or time.monotonic() > ends_at:
                raise PullError("timeout", f"{self._name} did not compute the prompt in time")

    def _block(self, channel: Channel, pages: Pages, fields: dict[str, Any], address: str, ends_at: float) -> PageBlock:
        group, first, count = pages.place(fields)
        if address:
            assert self._pull_by_number is not None
            left = max(min(ends_at - time.monotonic(), SILENCE_S), 0.0)
            return PageBlock(group, first, count, self._pull_by_number(address, field(fields, "number", int), left))
        if fields["payload"] != count * self._layout.page_bytes:
            raise FrameError(
                f"{count} pages have {fields['payload']} bytes; {count * self._layout.page_bytes} were due"
            )
        arrays = self._layout.empty(count)
        parts = as_bytes(arrays)
        for part in parts:
            channel.read_into(part)
        if checksum(len(pages.blocks), group, first, count, parts) != fields.get("crc"):
            raise FrameError(f"block {len(pages.blocks)} is damaged: its checksum differs")
        return PageBlock(group, first, count, tuple(arrays))
