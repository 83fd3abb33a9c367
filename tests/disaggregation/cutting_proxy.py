"""A connection that is cut."""

from __future__ import annotations

import contextlib
import select
import socket
import threading


class CuttingProxy:
    """Forwards to a port; a connection is cut after so many bytes came back, `num_cuts` times."""

    def __init__(self, port: int, num_bytes: int, num_cuts: int) -> None:
        self._port, self._num_bytes, self._left = port, num_bytes, num_cuts
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.num_connections = 0
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            most = self._num_bytes if self._left > 0 else 1 << 60
            self._left -= 1
            self._threads.append(threading.Thread(target=self._forward, args=(near, most)))
            self._threads[-1].start()

    def _forward(self, near: socket.socket, most: int) -> None:
        with near, socket.create_connection(("127.0.0.1", self._port)) as far, contextlib.suppress(OSError):
            while most > 0:
                for source in select.select([near, far], [], [])[0]:
                    data = source.recv(min(most, 1 << 14))
                    if not data:
                        return
                    (far if source is near else near).sendall(data)
                    most -= len(data) if source is far else 0

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(60)
