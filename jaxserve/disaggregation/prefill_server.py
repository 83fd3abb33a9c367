"""PrefillServer: computes prompts for decode servers and sends them the pages, over connections of `frames`.

A pull is an ordinary request of the engine that samples nothing: queue, chunks, prefix cache, deadlines and trace are
those of any other. Its pages are sent as they are computed, while later chunks still are. A thread serves a
connection, one pull; what is computed outlives a lost connection for a while (`exports`), so a decode server that comes
back goes on with the block it lacks.
"""

from __future__ import annotations

import array
import contextlib
import secrets
import select
import socket
import threading
import time
from dataclasses import dataclass
from dataclasses import field as setting
from typing import Any

from absl import logging

from jaxserve.core import FinishReason, JaxserveError, RejectedError, SamplingParams, Submission, Terms
from jaxserve.disaggregation.exports import Export, Exports
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
from jaxserve.disaggregation.jax_transport import JaxSender
from jaxserve.disaggregation.kv_layout import KVLayout, as_bytes
from jaxserve.disaggregation.metrics import PrefillMetrics
from jaxserve.disaggregation.transports import chooses_jax
from jaxserve.engine import AsyncEngine
from jaxserve.runtime import PageBlock

WINDOW = 4
"""Blocks that may be on their way without an acknowledgement."""
WAIT_S = 1.0
"""A connection hears at least as often, so that silence means that it is dead."""
STEP_S = 0.1
MAX_CONNECTIONS = 256
LOG_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class PrefillSettings:
    """Where to listen for decode servers, and what to grant them.

    Attributes:
      host, port: 0 picks a free port.
      token: shared with the decode servers; "": none is needed.
      max_bytes: of pages that wait to be taken.
      hold_s: seconds that pages wait for a lost connection.
      timeout_s: most seconds that a connection may stand still.
      transport: "stream", "jax" or "auto".
    """

    host: str = "127.0.0.1"
    port: int = 8100
    token: str = setting(default="", repr=False)
    max_bytes: int = 1 << 30
    hold_s: float = 10.0
    timeout_s: float = 10.0
    transport: str = "auto"


class _RefusedError(JaxserveError):
    """A pull is refused."""

    def __init__(self, reason: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.reason, self.retry_after_s = reason, retry_after_s


class PrefillServer:
    """Listens from its making on, and refuses (`starting`) until `start` was called with a ready engine.

    Args:
      settings: see `PrefillSettings`.

    Raises:
      OSError: the address cannot be had.
    """

    def __init__(self, settings: PrefillSettings) -> None:
        self._settings = settings
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        self._listener = socket.create_server((settings.host, settings.port), family=family, backlog=128)
        self._connections = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._stopping = threading.Event()
        self._draining = False
        self._started = threading.Event()
        self._exports = Exports(settings.max_bytes, settings.hold_s, self._abort)
        threading.Thread(target=self._accept, name="kv-accept", daemon=True).start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    def start(self, engine: AsyncEngine, metrics: PrefillMetrics | None = None) -> None:
        """Begins to answer; see `RemotePrefill.start`."""
        self._engine = engine
        self._layout = KVLayout.of(engine.engine)
        self._metrics = metrics or PrefillMetrics(engine.metrics.registry, engine.model_name)
        settings = self._settings
        self._metrics.held_bytes.set_function(lambda: self._exports.num_bytes)
        uses_jax = chooses_jax(settings.transport, engine.engine.runner.kv_layout)
        self._jax = JaxSender(settings.host) if uses_jax else None
        self._started.set()
        threading.Thread(target=self._sweep, name="kv-sweep", daemon=True).start()

    def drain(self, grace_s: float) -> None:
        """Refuses new pulls and waits for those that are served."""
        self._draining = True
        end = time.monotonic() + grace_s
        while len(self._exports) and time.monotonic() < end:
            time.sleep(0.02)

    def stop(self) -> None:
        """Ends every connection and forgets every page; also before `start`."""
        self._stopping.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # else a thread that waits for a connection gets one more
        self._listener.close()
        self._exports.close_all()

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:  # of `stop`, or too many files are open
                if not self._stopping.wait(STEP_S):
                    logging.log_every_n_seconds(logging.WARNING, "no connection is accepted: %s", LOG_EVERY_S, error)
                continue
            if not self._connections.acquire(blocking=False):
                connection.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), name="kv-export", daemon=True).start()
            except RuntimeError as error:
                self._connections.release()
                connection.close()
                logging.log_every_n_seconds(logging.WARNING, "no connection is served: %s", LOG_EVERY_S, error)

    def _abort(self, request_id: str) -> None:
        self._engine.engine.abort(request_id)

    def _sweep(self) -> None:
        while not self._stopping.wait(min(1.0, self._settings.hold_s / 4)):
            try:
                if count := self._exports.expire(time.monotonic()):
                    self._metrics.expired.inc(count)
                    logging.warning("the pages of %d prompts were given up: nobody came for them", count)
            except Exception:
                logging.exception("pages that nobody came for could not be given up; this is tried again")

    def _serve(self, connection: socket.socket) -> None:
        channel = Channel(connection, self._settings.timeout_s)
        try:
            if not self._started.is_set():
                _tell(channel, {"reason": "starting", "message": "the prefill server is starting"})
                return
            self._answer(channel, connection)
        except _RefusedError as error:
            self._metrics.refused(error.reason)
            fields = {"reason": error.reason, "message": str(error)}
            _tell(channel, fields if error.retry_after_s is None else fields | {"retry_after_s": error.retry_after_s})
        except FrameError as error:
            self._metrics.refused("protocol")
            _tell(channel, {"reason": "protocol", "message": str(error)})
        except OSError:
            pass  # whoever it was may come again; the export waits
        except Exception:
            logging.exception("a prompt could not be computed for a decode server")
            self._metrics.refused("failed")
            _tell(channel, {"reason": "failed", "message": "the prefill server failed; its log has the cause"})
        finally:
            channel.close()
            self._connections.release()

    def _answer(self, channel: Channel, connection: socket.socket) -> None:
        channel.limit(HANDSHAKE_S)
        self._greet(channel)
        channel.limit()
        # Token ids, as many as a prompt may have.
        _, fields, size = channel.receive(Kind.PULL, max_payload=4 * self._engine.max_model_len)
        prompt = array.array("i", bytes(channel.read(size)[: size // 4 * 4]))
        key, first = field(fields, "key", str), field(fields, "first", int)
        export = self._exports.reconnect(key, connection) if first >= 0 else None
        if export is None:
            if first > 0:
                raise _RefusedError("protocol", f"there is no pull {key[:40]!r} to go on with")
            export = self._begin(key, fields, prompt.tolist(), connection)
        try:
            channel.send(Kind.ACCEPT, self._accepted(export))
            done = self._send(channel, connection, export, max(first, 0))
        except OSError:
            # Who is done says so and closes; what was still sent to it fails before that is read.
            if _said_done(channel, connection):
                self._exports.close(export, connection)
            else:
                self._exports.leave(export, connection)
            raise
        except BaseException:
            self._exports.close(export, connection)
            raise
        self._exports.close(export, connection)
        if done:
            self._metrics.served.inc()

    def _greet(self, channel: Channel) -> None:
        """Both sides show that they know the token, and that their pages are alike."""
        token, nonce = self._settings.token, secrets.token_hex(16)
        channel.send(Kind.HELLO, self._hello(nonce))
        _, fields, _ = channel.receive(Kind.AUTH)
        if not proves(token, nonce, "decode", fields.get("proof")):
            raise _RefusedError("token", "the token is wrong; both servers need the same (--kv_token_file)")
        channel.send(Kind.PROOF, {"proof": proof(token, field(fields, "nonce", str), "prefill")})

    def _hello(self, nonce: str) -> dict[str, Any]:
        most = self._engine.max_model_len
        return {"version": VERSION, "nonce": nonce, "layout": self._layout.to_json(), "max_tokens": most}

    def _begin(self, key: str, fields: dict[str, Any], prompt: list[int], connection: socket.socket) -> Export:
        """Queues the prompt.

        Raises:
          _RefusedError: it cannot be had.
          FrameError: a field is missing or of another type.
        """
        try:
            layout = KVLayout.from_json(fields.get("layout"))
        except ValueError as error:
            raise _RefusedError("protocol", str(error)) from error
        if (difference := self._layout.difference(layout)) is not None:
            raise _RefusedError("layout", difference)
        if self._draining or self._engine.state != "ready":
            raise _RefusedError("draining", f"the prefill server is {self._engine.state}")
        size = self._layout.page_size
        if not prompt or len(prompt) % size:
            raise _RefusedError("protocol", f"{len(prompt)} tokens are asked for; they must be whole pages of {size}")
        on_device = self._jax is not None and fields.get("transport") == "jax"
        num_bytes = self._layout.num_pages(len(prompt)) * self._layout.page_bytes
        request_id = field(fields, "request_id", str)
        export = Export(key, request_id, num_bytes, on_device)
        submission = Submission(
            prompt,
            SamplingParams(max_tokens=0),
            request_id,
            _terms(fields),
            adapter=field(fields, "adapter", str),
            kv=export,
        )
        if not self._exports.open(export, connection):
            raise _RefusedError(
                "busy", f"{self._exports.num_bytes} of {self._exports.max_bytes} bytes wait to be taken", 1.0
            )
        engine = self._engine.engine
        try:
            with engine.metrics.counting_refusals(1):
                (request,) = engine.make_requests(submission, time.monotonic())
            engine.add(request, 0, export.take_delta)
        except (ValueError, JaxserveError) as error:
            self._exports.close(export)
            if isinstance(error, RejectedError):
                raise _RefusedError("engine", str(error), error.rejection.retry_after_s) from error
            raise _RefusedError("engine" if isinstance(error, JaxserveError) else "invalid", str(error)) from error
        except BaseException:
            self._exports.close(export)
            raise
        export.queued = True
        self._engine.wake()
        return export

    def _accepted(self, export: Export) -> dict[str, Any]:
        if self._jax is not None and export.on_device:
            return {"transport": "jax", "address": self._jax.address}
        return {"transport": "stream"}

    def _send(self, channel: Channel, connection: socket.socket, export: Export, index: int) -> bool:
        """Sends block `index` and those after it as they come; whether the other side has taken all."""
        acknowledged, heard_at = index - 1, time.monotonic()
        while True:
            item = self._wait_for(export, index)
            while index - acknowledged > WINDOW or _has_input(connection):
                kind, fields, _ = channel.receive(Kind.ACK, Kind.DONE)
                if kind is Kind.DONE:
                    return False
                acknowledged = _acknowledged(fields, acknowledged, index)
                export.acknowledge(acknowledged)
            if isinstance(item, PageBlock):
                self._send_block(channel, export, index, item)
                index += 1
            elif item == FinishReason.LENGTH:
                channel.send(Kind.END, {"blocks": index})
                while (frame := channel.receive(Kind.ACK, Kind.DONE))[0] is Kind.ACK:
                    export.acknowledge(_acknowledged(frame[1], acknowledged, index))
                return True
            elif item is not None:
                raise _RefusedError("engine", f"the prompt was not computed: {item}")
            elif time.monotonic() - heard_at < WAIT_S:
                continue
            else:
                channel.send(Kind.WAIT)
            heard_at = time.monotonic()

    def _wait_for(self, export: Export, index: int) -> PageBlock | str | None:
        try:
            item = export.wait_for(index, STEP_S)
        except KeyError as error:
            raise _RefusedError("protocol", f"block {index} was acknowledged, and is gone") from error
        if item is None and self._engine.state not in ("ready", "draining"):
            raise _RefusedError("engine", f"the engine is {self._engine.state}")
        return item

    def _send_block(self, channel: Channel, export: Export, index: int, block: PageBlock) -> None:
        fields: dict[str, Any] = {"index": index, "group": block.group, "first": block.first, "count": block.count}
        if self._jax is not None and export.on_device:
            channel.send(Kind.BLOCK, fields | {"number": self._jax.offer(block)})
        else:
            parts = as_bytes(block.leaves)
            fields["crc"] = checksum(index, block.group, block.first, block.count, parts)
            channel.send(Kind.BLOCK, fields, parts)
        self._metrics.num_bytes.inc(block.count * self._layout.page_bytes)


def _acknowledged(fields: dict[str, Any], before: int, index: int) -> int:
    number = field(fields, "index", int)
    if not before < number < index:
        raise FrameError(f"block {number} is acknowledged; {before + 1} to {index - 1} are on their way")
    return number


def _has_input(connection: socket.socket) -> bool:
    poll = select.poll()  # `select` knows no descriptors above 1023
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def _said_done(channel: Channel, connection: socket.socket) -> bool:
    """Whether a lost connection's other side had said, behind acknowledgements, that it wants no more."""
    channel.limit(STEP_S)
    try:
        while _has_input(connection):
            if channel.receive(Kind.ACK, Kind.DONE)[0] is Kind.DONE:
                return True
    except (OSError, FrameError):
        pass
    return False


def _terms(fields: dict[str, Any]) -> Terms:
    priority, deadline_s = fields.get("priority"), fields.get("deadline_s")
    return Terms(
        priority=None if priority is None else field(fields, "priority", int),
        deadline_s=None if deadline_s is None else float(field(fields, "deadline_s", float)),
        tenant=field(fields, "tenant", str),
        cache_salt=field(fields, "cache_salt", str),
        operation="remote_prefill",
        traceparent=field(fields, "traceparent", str),
    )


def _tell(channel: Channel, fields: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        channel.send(Kind.REFUSE, fields)
