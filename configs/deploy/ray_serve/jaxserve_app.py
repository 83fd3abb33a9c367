"""jaxserve as a Ray Serve application: every Serve replica is a process with an engine and the server's HTTP routes.

    serve run configs/deploy/ray_serve/serve_config.yaml          from the folder of the repository
    serve run --app-dir configs/deploy/ray_serve jaxserve_app:build_app

The routes, streams included, are `jaxserve.server`'s own; Ray Serve's proxy spreads requests by queue length and starts
replicas that have died again. A replica is alive while its engine is. docs/replicas.md tells when to use which front.
"""

# Ray Serve reads the builder's annotation, which must be the class itself: no `from __future__ import annotations`.
import asyncio
from typing import Any

from pydantic import BaseModel, Field
from ray import serve
from ray.serve import Application


class Arguments(BaseModel):
    """What `args` of the application may hold.

    Attributes:
      engine: settings of the engine, under the names of the server's flags.
    """

    model_config = {"extra": "forbid"}
    engine: dict[str, Any] = Field(default_factory=lambda: {"model": "smollm2-135m"})


@serve.deployment
@serve.ingress()
class JaxserveReplica:
    """One engine behind the server's HTTP application.

    Args:
      settings: fields of `jaxserve.EngineConfig`.

    Raises:
      RuntimeError: the engine did not start; it names the cause.
    """

    async def __init__(self, settings: dict[str, Any]) -> None:
        # In the replica's own process, where Ray has set which devices it may see.
        from jaxserve import AsyncEngine, EngineConfig
        from jaxserve.server.process import wait_until_ready

        lists = {name: tuple(value) for name, value in settings.items() if isinstance(value, list)}
        self._engine = AsyncEngine(EngineConfig(**settings | lists))
        self._engine.start()
        if not await wait_until_ready(self._engine, asyncio.Event()):
            raise RuntimeError(f"the engine did not start: {self._engine.error}")

    def __serve_build_asgi_app__(self) -> Any:
        """The routes; Ray Serve calls this after the constructor."""
        from jaxserve.server.http_app import build_app as build_routes

        return build_routes(self._engine)

    def check_health(self) -> None:
        """Ray Serve replaces a replica for which this raises."""
        if self._engine.state == "dead":
            raise RuntimeError(f"the engine is dead: {self._engine.error}")

    async def __del__(self) -> None:
        await asyncio.to_thread(self._engine.shutdown)


def build_app(args: Arguments) -> Application:
    """The application; `args` come from the configuration or from `serve run ... engine=...`."""
    return JaxserveReplica.bind(args.engine)
