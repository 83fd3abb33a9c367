"""Target: the server of a load, running already or started for it, and what one run on it gives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from absl.flags import FlagValues

from jaxserve.bench.load.client import Item, LoadClient
from jaxserve.bench.load.figures import Objectives, figures
from jaxserve.bench.load.record import FAILED, Record
from jaxserve.bench.load.requests import Load
from jaxserve.bench.load.server_process import ServerProcess, served_model
from jaxserve.bench.report import MeasurementError


@dataclass(frozen=True, slots=True)
class Target:
    """A server that answers.

    Attributes:
      url: without `/v1`.
      model: named in requests.
    """

    url: str
    model: str
    client: LoadClient
    objectives: Objectives

    def run(self, items: Sequence[Item]) -> tuple[dict[str, Any], list[Record]]:
        """Figures and records of one run; `client_us_per_token` is the client's processor time.

        Raises:
          MeasurementError: nothing but failures came back; it names one.
        """
        began = time.process_time()
        records = asyncio.run(self.client.run(items))
        client_s = time.process_time() - began
        if all(record.outcome == FAILED for record in records):
            raise MeasurementError(f"every request to {self.url} failed, the first with: {records[0].error}")
        found = figures(records, self.objectives)
        return found | {"client_us_per_token": 1e6 * client_s / max(found["output_tokens"], 1)}, records

    def warm_up(self, load: Load, count: int, number: int) -> None:
        """Sends `count` requests that are not counted; of another `number` they are others."""
        if count:
            self.run(load.warmup(count, number))


@contextmanager
def open_target(flags: FlagValues, url: str | None, command: str | None) -> Iterator[Target]:
    """The server at `url`, or one that `command` starts and that ends with the context.

    Raises:
      ValueError: the URL or the command cannot be used.
      MeasurementError: the server does not start.
    """
    if url is None:
        assert command is not None
        with ServerProcess(command, api_key=flags.api_key, start_timeout_s=flags.start_timeout_s) as server:
            yield _target(flags, server.url)
    else:
        yield _target(flags, url)


def check_server_flags(flags: FlagValues) -> None:
    """Raises ValueError unless just one of `url` and `server` is given, and the URL is of a server."""
    if (flags.url is None) == (flags.server is None):
        raise ValueError("give url, of a running server, or server, flags or a command that start one; not both")
    if flags.url is not None:
        check_url("url", flags.url)


def check_url(flag: str, url: str) -> None:
    """Raises ValueError, naming the flag, unless `url` is of a server."""
    if not url.startswith(("http://", "https://")) or url.rstrip("/").endswith("/v1"):
        raise ValueError(f"{flag} is {url!r}; it must be http:// or https:// and a host, without /v1")


def _target(flags: FlagValues, url: str) -> Target:
    url = url.rstrip("/")
    model = flags.served_model or served_model(url, flags.api_key)
    client = LoadClient(
        url,
        model,
        api_key=flags.api_key,
        timeout_s=flags.request_timeout_s,
        return_token_ids=flags.return_token_ids,
    )
    return Target(url, model, client, Objectives(flags.slo_ttft_ms, flags.slo_itl_ms, flags.slo_tpot_ms))
