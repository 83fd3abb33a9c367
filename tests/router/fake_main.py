"""`python -m tests.router.fake_main GRACE NUM_REPLICAS STEP_S`: the launcher over children that run a `FakeEngine`."""

import asyncio
import logging
import sys

from jaxserve.router.children import ChildSettings
from jaxserve.router.launcher import FrontSettings, RouterLauncher
from jaxserve.router.settings import HealthSettings, RouterSettings


async def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    grace, count, step_s = sys.argv[1:]
    command = (sys.executable, "-m", "tests.server.fake_main", grace, step_s, "{port}")
    children = ChildSettings(command, tuple({} for _ in range(int(count))), max_restarts=2, restart_backoff_s=0.2)
    settings = RouterSettings(health=HealthSettings(interval_s=0.1))
    return await RouterLauncher(FrontSettings(http_port=0, drain_grace_s=float(grace)), settings, children).run()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
