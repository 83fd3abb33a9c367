"""`python -m jaxserve.router`: one HTTP front before several replicas."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import sys
from collections.abc import Sequence

from absl.flags import FlagValues

from jaxserve.config.api_keys import merged_keys
from jaxserve.config.flags import exit_with, parse_flags, routing_settings_from_flags
from jaxserve.config.print_config import settings_as_flagfile, settings_as_json
from jaxserve.router.children import ChildSettings, server_command
from jaxserve.router.devices import device_environments
from jaxserve.router.launcher import FrontSettings, RouterLauncher
from jaxserve.router.settings import HealthSettings, ProxySettings, RouterSettings
from jaxserve.routing import BreakerSettings
from jaxserve.server.bounded_http import http_limits
from jaxserve.server.host_guard import answered_hosts
from jaxserve.server.log_format import queue_logs, set_log_format
from jaxserve.server.tls import tls_files


def main(argv: Sequence[str]) -> int:
    """Parses flags and serves until a signal.

    Returns:
      The exit status.
    """
    own, behind = _split(list(argv))
    flags = parse_flags("router", own)
    if flags.print_config:
        as_text = settings_as_json if flags.log_format == "json" else settings_as_flagfile
        with contextlib.suppress(BrokenPipeError):  # a reader like `head` has seen enough
            print(as_text("router", flags), flush=True)
        return 0
    try:
        replicas = _replicas(flags, behind)
        settings = _settings(flags)
        front = FrontSettings(
            host=flags.host,
            http_port=flags.http_port,
            drain_grace_s=flags.drain_grace_s,
            tls=tls_files(flags.ssl_certfile, flags.ssl_keyfile),
            limits=http_limits(flags),
        )
    except ValueError as error:
        exit_with(f"--{error}")
    set_log_format(flags.log_format)
    queue_logs("stdout", "stderr")

    async def serve() -> int:
        return await RouterLauncher(front, settings, replicas).run()

    return asyncio.run(serve())


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """The router's own arguments, and those behind a lone `--`."""
    if "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def _replicas(flags: FlagValues, behind: Sequence[str]) -> tuple[str, ...] | ChildSettings:
    """Where the replicas are, or how to start them.

    Raises:
      ValueError: naming the flag.
    """
    if bool(flags.replicas) == (flags.num_replicas is not None):
        raise ValueError("replicas, of running servers, or num_replicas, of servers to start: give one of the two")
    server_flags = [*shlex.split(flags.replica_flags), *behind]
    if flags.replicas:
        if server_flags:
            raise ValueError("replica_flags are given without num_replicas; running servers have their own")
        if len(set(flags.replicas)) < len(flags.replicas):
            raise ValueError("replicas names a server twice; name each once")
        return tuple(flags.replicas)
    environments = device_environments(flags.replica_devices, flags.num_replicas, flags.devices_per_replica, os.environ)
    # What the router holds its clients to holds at the replicas too; keys decide on tenants there.
    same = [f"--max_body_bytes={flags.max_body_bytes}", f"--drain_grace_s={flags.drain_grace_s}"]
    same.append(f"--log_format={flags.log_format}")
    if flags.api_key_file:
        same.append(f"--api_key_file={flags.api_key_file.path}")
    keys = {"JAXSERVE_API_KEY": flags.api_key} if flags.api_key else {}
    return ChildSettings(
        server_command([*same, *server_flags]),
        tuple(environment | keys for environment in environments),
        flags.max_restarts,
        flags.restart_backoff_s,
    )


def _settings(flags: FlagValues) -> RouterSettings:
    """Everything but where the replicas are.

    Raises:
      ValueError: naming the flag.
    """
    keys = merged_keys(flags.api_key, flags.api_key_file)
    of_operators = next((each.key for each in keys if not each.tenant), None)
    return RouterSettings(
        routing=routing_settings_from_flags(flags),
        breaker=BreakerSettings(
            failure_threshold=flags.cb_failure_threshold,
            open_s=flags.cb_timeout_s,
            probe_failure_threshold=flags.health_failure_threshold,
        ),
        health=HealthSettings(
            interval_s=flags.health_check_interval_s,
            timeout_s=flags.health_check_timeout_s,
            api_key=flags.replica_api_key or of_operators,
        ),
        proxy=ProxySettings(
            max_body_bytes=flags.max_body_bytes,
            max_retries=flags.max_retries,
            connect_timeout_s=flags.connect_timeout_s,
            replica_timeout_s=flags.replica_timeout_s,
            session_header=flags.session_header,
        ),
        api_keys=keys,
        guard_probes=flags.guard_probes,
        allowed_origins=flags.allowed_origins,
        allowed_hosts=answered_hosts(flags.allowed_hosts, flags.host, bool(keys)),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv))
