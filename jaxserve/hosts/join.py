"""How a process becomes one of several: first of jax's, then of the leader's."""

from __future__ import annotations

import atexit
import logging
import math
import os
from collections.abc import Callable

import jax

from jaxserve.config import EngineConfig
from jaxserve.config.hosts_config import control_address, host_token
from jaxserve.core import HostLostError, write_last
from jaxserve.hosts.follower import Follower
from jaxserve.hosts.leader import Followers

log = logging.getLogger(__name__)

JOIN_S = 120.0
"""Time for every process to connect to the leader, once jax's processes have found each other."""
_SHUTDOWN_S = 10
_LEAST_HEARTBEAT_S = 10


def join_processes(config: EngineConfig) -> int:
    """Makes this process one of jax's processes, unless it is; before any other use of jax' devices.

    Returns:
      Its id.

    Raises:
      ValueError: the environment does not tell what the settings leave open.
    """
    if not jax.distributed.is_initialized():
        # It would take SIGTERM, on which a server drains.
        jax.config.update("jax_enable_preemption_service", False)
        bound = None if "JAX_COORDINATOR_BIND_ADDRESS" in os.environ else config.coordinator_address
        jax.distributed.initialize(
            config.coordinator_address,
            config.num_processes,
            config.process_id,
            cluster_detection_method=None if config.distributed else "deactivate",
            coordinator_bind_address=bound,
            heartbeat_timeout_seconds=max(_LEAST_HEARTBEAT_S, math.ceil(config.host_timeout_s)),
            shutdown_timeout_seconds=_SHUTDOWN_S,
        )
        log.info("process %d of %d", jax.process_index(), jax.process_count())
    return jax.process_index()


def lead(config: EngineConfig) -> Followers | None:
    """The other processes of an engine, once all are connected; None where there are none.

    Raises:
      ValueError: this process is no leader, or settings are wrong.
      HostLostError: one does not come.
      OSError: `control_address` cannot be listened on.
    """
    if not config.several_processes:
        return None
    token = host_token(config)
    process_id = join_processes(config)
    if process_id:
        raise ValueError(
            f"process_id is {process_id}; only process 0 takes requests: start the others with"
            " python -m jaxserve.server"
        )
    address = control_address(config)
    try:
        followers = Followers(address, jax.process_count(), token, config.host_timeout_s)
    except OSError as error:
        raise ValueError(
            f"control_address {address[0]}:{address[1]} cannot be listened on: {error.strerror or error}"
        ) from error
    followers.accept(JOIN_S)
    atexit.register(_leave, followers)
    return followers


def follow(config: EngineConfig, on_lost: Callable[[HostLostError], None]) -> Follower:
    """Connects to the leader.

    Raises:
      ValueError: settings are wrong.
      HostLostError: there is no leader, or it refuses this process.
    """
    token = host_token(config)
    process_id = join_processes(config)
    return Follower(control_address(config), process_id, token, config.host_timeout_s, on_lost, JOIN_S)


def _leave(followers: Followers) -> None:
    """At the end of the process, before jax's own part, which waits until the other processes end too."""
    if not followers.ready:
        followers.lose(HostLostError("process 0 did not start; its log says why"))
    followers.close()
    if followers.error is not None:  # they have ended, not in good order: jax would abort over it
        try:
            write_last()
        finally:
            os._exit(1)
