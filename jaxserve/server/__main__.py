"""`python -m jaxserve.server`: serves a model over HTTP and gRPC."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from typing import Any

from jaxserve.config.api_keys import merged_keys
from jaxserve.config.flags import engine_config_from_flags, exit_with, parse_flags
from jaxserve.server.tls import tls_files


def main(argv: Sequence[str]) -> int:
    """Parses flags and serves until a signal.

    Returns:
      The exit status.
    """
    flags = parse_flags("server", argv)
    config = engine_config_from_flags(flags)
    try:
        api_keys = merged_keys(flags.api_key, flags.api_key_file)
        tls = tls_files(flags.ssl_certfile, flags.ssl_keyfile)
    except ValueError as error:
        exit_with(f"--{error}")
    # Imported after the flags are checked: jax takes seconds, a mistyped flag should not.
    from jaxserve.engine import AsyncEngine
    from jaxserve.server.console import StartupDisplay
    from jaxserve.server.launcher import Launcher, ServerSettings
    from jaxserve.server.settings import HttpSettings

    http = HttpSettings(
        api_keys=api_keys,
        guard_probes=flags.guard_probes,
        allowed_origins=flags.allowed_origins,
        max_body_bytes=flags.max_body_bytes,
        metrics_compat=flags.metrics_compat,
        profile_dir=flags.profile_dir,
    )
    settings = ServerSettings(
        host=flags.host,
        http_port=flags.http_port,
        grpc_port=flags.grpc_port,
        drain_grace_s=flags.drain_grace_s,
        http=http,
        tls=tls,
        tool_call_parser=flags.tool_call_parser,
    )
    # jax reports every backend that is not there; what is used shows in the memory plan.
    logging.getLogger("jax").setLevel(logging.WARNING)
    display = StartupDisplay(plan_rows=lambda: engine.engine.runner.memory_plan.rows())
    engine: Any = AsyncEngine(config, progress=display.progress)

    async def serve() -> int:
        return await Launcher(engine, settings, display).run()

    return asyncio.run(serve())


if __name__ == "__main__":
    sys.exit(main(sys.argv))
