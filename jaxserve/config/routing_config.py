"""RoutingSettings: how a router chooses among replicas; `jaxserve.routing.chooser` tells what each policy does."""

from __future__ import annotations

from dataclasses import dataclass

CACHE_AWARE, LEAST_LOADED, ROUND_ROBIN = "cache_aware", "least_loaded", "round_robin"
ROUTING_POLICIES = (CACHE_AWARE, LEAST_LOADED, ROUND_ROBIN)


@dataclass(frozen=True, slots=True)
class RoutingSettings:
    """How replicas are chosen.

    Attributes:
      policy: one of `ROUTING_POLICIES`.
      cache_threshold: share of a prompt, in [0, 1], by which a match must be longer than another to outweigh its load.
      balance_abs_threshold, balance_rel_threshold: beyond both, a replica is overloaded beside the least loaded.
      cache_table_blocks: most blocks remembered per replica; also the most sessions.

    Raises:
      ValueError: a value breaks its rule.
    """

    policy: str = CACHE_AWARE
    cache_threshold: float = 0.1
    balance_abs_threshold: int = 8
    balance_rel_threshold: float = 1.5
    cache_table_blocks: int = 65_536

    def __post_init__(self) -> None:
        if self.policy not in ROUTING_POLICIES:
            raise ValueError(f"routing_policy is {self.policy!r}; it must be one of {', '.join(ROUTING_POLICIES)}")
        if not 0.0 <= self.cache_threshold <= 1.0:
            raise ValueError(f"cache_threshold is {self.cache_threshold:g}; it must be between 0 and 1")
        if self.balance_abs_threshold < 0:
            raise ValueError(f"balance_abs_threshold is {self.balance_abs_threshold}; it must be 0 or more")
        if self.balance_rel_threshold < 1.0:
            raise ValueError(f"balance_rel_threshold is {self.balance_rel_threshold:g}; it must be at least 1")
        if self.cache_table_blocks < 1:
            raise ValueError(f"cache_table_blocks is {self.cache_table_blocks}; it must be at least 1")
