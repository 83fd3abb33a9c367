"""TLS of both fronts, from one certificate and key."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files.

    Attributes:
      certfile: the certificate, then those that vouch for it.
      keyfile: its private key, without a passphrase.
    """

    certfile: str
    keyfile: str

    def check(self) -> None:
        """Raises ValueError naming the flag whose file cannot be read, or unless they are a certificate and its key."""
        for flag, path in (("ssl_certfile", self.certfile), ("ssl_keyfile", self.keyfile)):
            try:
                Path(path).read_bytes()
            except OSError as error:
                raise ValueError(f"{flag} is {path}: {error.strerror}") from None
        try:
            # A key with a passphrase would ask the terminal for it.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certfile, self.keyfile, lambda: "")
        except (ssl.SSLError, ValueError) as error:
            raise ValueError(
                f"ssl_certfile is {self.certfile} and ssl_keyfile is {self.keyfile}: they must be a certificate and its"
                f" private key, as PEM without a passphrase ({error})"
            ) from None

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """For `add_secure_port`."""
        pair = (Path(self.keyfile).read_bytes(), Path(self.certfile).read_bytes())
        return grpc.ssl_server_credentials([pair])


def uvicorn_options(files: TlsFiles | None) -> dict[str, Any]:
    """Arguments of `uvicorn.Config`."""
    return {} if files is None else {"ssl_certfile": files.certfile, "ssl_keyfile": files.keyfile}


def tls_files(certfile: str | None, keyfile: str | None) -> TlsFiles | None:
    """The files of two flags; None when neither is given.

    Raises:
      ValueError: one is missing, or they do not fit.
    """
    if not certfile and not keyfile:
        return None
    if not certfile or not keyfile:
        given, missing = ("ssl_certfile", "ssl_keyfile") if certfile else ("ssl_keyfile", "ssl_certfile")
        raise ValueError(f"{missing} is missing; {given} needs it")
    files = TlsFiles(certfile, keyfile)
    files.check()
    return files
