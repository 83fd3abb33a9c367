"""A server in a process of its own, for tests of what only a whole process shows."""

import os
import subprocess
import sys
import threading


class ServerProcess:
    """A server in a process of its own.

    Attributes:
      url, grpc_address: where, once `ready` returned.
    """

    def __init__(self, *arguments, **environment):
        self.process = subprocess.Popen(
            [sys.executable, "-m", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )
        self.errors = []
        self._reader = threading.Thread(target=lambda: self.errors.extend(self.process.stderr), daemon=True)
        self._reader.start()

    def ready(self):
        """Waits for the machine-readable line."""
        line = self.process.stdout.readline().split()
        assert line[:2] == ["jaxserve", "ready"], "".join(self.errors)
        addresses = dict(word.split("=") for word in line[2:])
        self.url = f"http://{addresses['http']}"
        self.grpc_address = addresses["grpc"]
        assert set(addresses) == {"http", "grpc"}
        return self

    def wait(self, seconds=20):
        """Its exit status."""
        status = self.process.wait(seconds)
        self._reader.join(5)
        return status
