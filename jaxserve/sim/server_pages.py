"""Reads pages of a running server over HTTP, with its API key; says in words why one cannot be read."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from http.client import HTTPException


class UnreadableServerError(Exception):
    """The server cannot be looked at; the message says why and what to do."""


class ForbiddenError(UnreadableServerError):
    """The key is right and does not open this."""


class ServerPages:
    """Asks one server.

    Args:
      url: as http://127.0.0.1:8000.
      api_key: sent when it is not None.
      timeout_s: most seconds without a byte of an answer.

    Raises:
      UnreadableServerError: `url` is no HTTP address, or `api_key` cannot be sent.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 10.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise UnreadableServerError(f"--url is {url!r}; it must begin with http:// or https://")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise UnreadableServerError("--api_key has a character that no HTTP header carries; it must be ASCII text")
        self.url = url.rstrip("/")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._timeout_s = timeout_s

    def get(self, path: str) -> bytes:
        """The body of the answer to a GET.

        Raises:
          ForbiddenError: the key does not open this page.
          UnreadableServerError: there is no answer, it is no 200, or the server wants a key, or another.
        """
        address = self.url + path
        try:
            request = urllib.request.Request(address, headers=self._headers)
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                body: bytes = answer.read()
                return body
        except urllib.error.HTTPError as error:
            with error:
                raise _told(address, error.code, _message(error.read())) from error
        except (OSError, HTTPException, ValueError) as error:  # ValueError: of an address with a mistake
            reason = getattr(error, "reason", error)
            raise UnreadableServerError(
                f"{self.url} does not answer: {reason}; is the server running there?"
            ) from error


def _told(address: str, status: int, message: str) -> UnreadableServerError:
    match status:
        case 401:
            return UnreadableServerError(
                f"{address}: {message or 'an API key is needed'}; set --api_key or JAXSERVE_API_KEY"
            )
        case 403:
            return ForbiddenError(message)
        case 503:
            return UnreadableServerError(f"{address} is not ready: {message}")
    return UnreadableServerError(f"{address} answers {status}; it must answer 200; is it a jaxserve server?")


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
