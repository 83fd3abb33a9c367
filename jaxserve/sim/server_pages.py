"""Reads pages of a running server over HTTP, with its API key; says in words why one cannot be read."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException


class UnreadableServerError(Exception):
    """The server cannot be looked at; the message says why and what to do."""


class ForbiddenError(UnreadableServerError):
    """The key is right and does not open this."""


@dataclass(frozen=True, slots=True)
class ServerState:
    """What a server's `/ready` says.

    Attributes:
      state: of docs/reliability.md, "Health in every state".
      is_ready: it takes requests.
      reason: why it is not, in words; "": it is, or does not say.
      step_age_s: since the engine's last step, while it has or had work; None: not told.
    """

    state: str
    is_ready: bool
    reason: str = ""
    step_age_s: float | None = None

    @property
    def goes_on(self) -> bool:
        """Whether it works on requests: it is ready, or ends those that it has."""
        return self.is_ready or self.state == "draining"

    @property
    def text(self) -> str:
        """State, reason and age in one line."""
        parts = [f"{self.state}: {self.reason}" if self.reason else self.state]
        if self.step_age_s and self.state != "stuck":  # whose reason has it
            parts.append(f"the last step was {self.step_age_s:.1f} s ago")
        return "; ".join(parts)


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
        status, body = self._ask(path)
        if status == 200:
            return body
        state = self.state() if status == 503 else None
        if state is not None and not state.is_ready:
            raise UnreadableServerError(f"{self.url} is {state.text}")
        raise _told(self.url + path, status, _message(body))

    def state(self) -> ServerState | None:
        """What the server says of itself; None where what answers has no such page.

        Raises:
          UnreadableServerError: there is no answer, the server wants a key, or another, or it is a router.
        """
        status, body = self._ask("/ready")
        if status in (401, 403):
            raise _told(f"{self.url}/ready", status, _message(body))
        if status not in (200, 503):
            return None
        if _is_of_router(body):
            raise UnreadableServerError(
                f"{self.url} is a router; ask a replica at its own address, as {self.url}/v1/router/replicas lists"
            )
        return _read_state(body)

    def _ask(self, path: str) -> tuple[int, bytes]:
        """Status and body.

        Raises:
          UnreadableServerError: there is no answer.
        """
        address = self.url + path
        try:
            request = urllib.request.Request(address, headers=self._headers)
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()
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
    says = f" ({message})" if message else ""
    return UnreadableServerError(f"{address} answers {status}{says}; it must answer 200; is it a jaxserve server?")


def _is_of_router(ready: bytes) -> bool:
    """Whether a router wrote this answer to /ready: it counts its replicas."""
    try:
        return "in_rotation" in json.loads(ready)
    except (ValueError, TypeError):
        return False


def _read_state(body: bytes) -> ServerState | None:
    try:
        told = json.loads(body)
        age_s = told.get("step_age_s")
        is_ready = bool(told["ready"])
        reason = "" if is_ready else str(told.get("reason", ""))
        return ServerState(str(told["state"]), is_ready, reason, None if age_s is None else float(age_s))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
