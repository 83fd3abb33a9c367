"""`python -m tests.server.fake_main GRACE STEP_S [HTTP_PORT [GRPC_PORT [DELAY]]]`: the launcher over a `FakeEngine`."""

import asyncio
import sys

from jaxserve.server.console import StartupDisplay
from jaxserve.server.launcher import Launcher, ServerSettings
from tests.server.fake_engine import FakeEngine


async def main() -> int:
    engine = FakeEngine()
    engine.step_s = float(sys.argv[2])
    http_port = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    grpc_port = int(sys.argv[4]) if len(sys.argv) > 4 else 0
    delay = float(sys.argv[5]) if len(sys.argv) > 5 else 0.0
    settings = ServerSettings(
        http_port=http_port, grpc_port=grpc_port, drain_delay_s=delay, drain_grace_s=float(sys.argv[1])
    )
    return await Launcher(engine, settings, StartupDisplay()).run()


sys.exit(asyncio.run(main()))
