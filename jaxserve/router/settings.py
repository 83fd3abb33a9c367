"""What the router can be told."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxserve.config.api_keys import ApiKey
from jaxserve.routing import BreakerSettings, RoutingSettings


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """How replicas are probed.

    Attributes:
      interval_s: between two probes of a replica.
      timeout_s: for one probe.
      api_key: for what a replica tells with a key only; None: none is sent.
    """

    interval_s: float = 1.0
    timeout_s: float = 5.0
    api_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """How requests are passed on.

    Attributes:
      max_body_bytes: largest request body.
      max_retries: further replicas that a request may be given when one fails it before the client has a byte.
      connect_timeout_s: for a connection to a replica.
      replica_timeout_s: longest silence of a replica in an answer.
      session_header: header that names a session; "": none does.
    """

    max_body_bytes: int = 8 << 20
    max_retries: int = 2
    connect_timeout_s: float = 2.0
    replica_timeout_s: float = 600.0
    session_header: str = "X-Session-Id"


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Everything but where the replicas are.

    Attributes:
      api_keys: one is needed on every path but the probes; none: the replicas alone check.
      guard_probes: the probes need one too.
      allowed_origins, allowed_hosts: see `jaxserve.server.settings.HttpSettings`.
    """

    routing: RoutingSettings = field(default_factory=RoutingSettings)
    breaker: BreakerSettings = field(default_factory=BreakerSettings)
    health: HealthSettings = field(default_factory=HealthSettings)
    proxy: ProxySettings = field(default_factory=ProxySettings)
    api_keys: tuple[ApiKey, ...] = ()
    guard_probes: bool = False
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
