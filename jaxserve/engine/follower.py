"""A process that follows the engine of another: it loads its part of the model and repeats what the leader runs."""

from __future__ import annotations

import logging
from collections.abc import Callable

from jaxserve.config import EngineConfig
from jaxserve.core import HostLostError
from jaxserve.engine.served_model import load_served_model
from jaxserve.hosts import follow, given, join_agreement, join_memory, programs_of
from jaxserve.loading import resolve_model
from jaxserve.loading.fingerprint import checkpoint_fingerprint
from jaxserve.models import stored_rank, zero_lora
from jaxserve.runtime import enable_compile_cache

log = logging.getLogger(__name__)


class EngineFollower:
    """Runs on the caller's thread; other threads may look at its attributes.

    Args:
      config: as the leader's, but for `hosts_config.LOCAL_SETTINGS`.
      on_lost: called on any thread when the leader is lost; should end the process, since `run` may never return.
      on_joined: called on the thread that runs once the leader has taken this process in.

    Attributes:
      state: "loading", "warming_up", "ready" or "stopped".
      progress: done, total and what was done last.
    """

    def __init__(
        self, config: EngineConfig, on_lost: Callable[[HostLostError], None], on_joined: Callable[[], None]
    ) -> None:
        self._config = config
        self._on_lost = on_lost
        self._on_joined = on_joined
        self.state = "loading"
        self.progress: tuple[int, int, str] = (0, 0, "waiting for the other processes")

    def run(self) -> None:
        """Follows the leader until it says stop.

        Raises:
          ValueError: settings that do not fit the model, the machine or the leader's.
          CheckpointError, UnsupportedModelError: the model cannot be loaded.
          HostLostError: there is no leader, or it refuses this process.
        """
        config = self._config
        follower = follow(config, self._on_lost)
        try:
            self._on_joined()
            enable_compile_cache(config.compile_cache)
            resolved = resolve_model(config.model, self._progressed)
            join_agreement(follower, given(config, checkpoint_fingerprint(resolved)))
            served = load_served_model(config, resolved, self._progressed)
            runner = served.runner(config, join_memory(follower, served.free_bytes))
            follower.report(programs_of(runner))
            adapter = None
            if config.enable_lora:
                stacked = served.form == "stacked"
                adapter = zero_lora(served.config, config.dtype, stored_rank(config.max_lora_rank), stacked=stacked)
            self.state = "warming_up"
            follower.run(runner, adapter, self._progressed, self._ready)
        except BaseException as error:
            follower.fail(error)
            raise
        self.state = "stopped"

    def _progressed(self, done: int, total: int, what: str) -> None:
        self.progress = (done, total, what)

    def _ready(self) -> None:
        self.state = "ready"
        log.info("ready: every step of the leader's is repeated here")
