"""JaxSender and JaxReceiver: pages from device to device by `jax.experimental.transfer`.

The frames stay as they are, and say which block comes next, but a block's bytes do not pass through them: the sender
offers its arrays under a number, the receiver pulls that number. Nothing is checksummed, and a connection that is lost
begins anew. Who pulls is not asked for the token; the number, which only the frames tell, takes its place.
"""

from __future__ import annotations

import queue
import secrets
import threading
from typing import Any

import jax
from jax.experimental import transfer

from jaxserve.runtime import PageBlock


class JaxSender:
    """Offers blocks.

    Args:
      host: address to listen on; the ports are chosen.
    """

    def __init__(self, host: str) -> None:
        self._server = _start(host)

    @property
    def address(self) -> str:
        """Where receivers connect."""
        return str(self._server.address())

    def offer(self, block: PageBlock) -> int:
        """The number under which a block can be pulled, once; not to be guessed."""
        number = secrets.randbits(62)
        self._server.await_pull(number, list(block.leaves))
        return number


class JaxReceiver:
    """Pulls blocks.

    Args:
      host: address of this side.
      shapes: of the arrays of a block, with shardings.
    """

    def __init__(self, host: str, shapes: list[jax.ShapeDtypeStruct]) -> None:
        self._server = _start(host)
        self._shapes = shapes
        self._connections: dict[str, Any] = {}
        self._lock = threading.Lock()

    def pull(self, address: str, number: int, timeout_s: float) -> tuple[jax.Array, ...]:
        """The arrays of a block, on the device.

        Raises:
          OSError: they did not come in time, or the connection is lost.
        """
        with self._lock:
            if address not in self._connections:
                self._connections[address] = self._server.connect(address)
            connection = self._connections[address]
        came: queue.SimpleQueue[tuple[jax.Array, ...] | Exception] = queue.SimpleQueue()

        def pull() -> None:
            try:
                came.put(tuple(jax.block_until_ready(connection.pull(number, self._shapes))))
            except Exception as error:
                came.put(error)

        # A pull of what is never offered, or from a server that is gone, does not return: the thread is left behind.
        threading.Thread(target=pull, name="kv-pull-jax", daemon=True).start()
        try:
            arrays = came.get(timeout=timeout_s)
        except queue.Empty:
            arrays = TimeoutError(f"nothing came in {timeout_s:.1f} s")
        if isinstance(arrays, Exception):
            with self._lock:
                self._connections.pop(address, None)
            raise OSError(f"block {number} of {address} did not come: {str(arrays)[:200]}") from arrays
        return arrays


def _start(host: str) -> Any:
    where = f"[{host}]:0" if ":" in host else f"{host}:0"
    return transfer.start_transfer_server(jax.devices()[0].client, where, [where])
