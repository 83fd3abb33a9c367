"""Which way pages go: over the connection, or by `jax.experimental.transfer`."""

from __future__ import annotations

import jax
from absl import logging

from jaxserve.disaggregation.pull import PullByNumber
from jaxserve.runtime.kv_pool import SWAP_BLOCK, PoolLayout


def chooses_jax(transport: str, kv: PoolLayout) -> bool:
    """Whether pages go by jax, which is only where that is asked for: a stream is checksummed, resumable, and tried.

    Raises:
      ValueError: it is asked for and cannot be.
    """
    if transport == "jax" and kv.mesh.size > 1:
        raise ValueError("kv_transfer is jax and the model is on several devices; use stream, which does that too")
    return transport == "jax"


def receiver(transport: str, host: str, kv: PoolLayout) -> PullByNumber | None:
    """What pulls blocks; None: they come over the connection."""
    if not chooses_jax(transport, kv):
        return None
    from jaxserve.disaggregation.jax_transport import JaxReceiver

    logging.info("pages come by jax.experimental.transfer")
    return JaxReceiver(host, jax.tree.leaves(kv.abstract(SWAP_BLOCK))).pull
