"""Which replica gets a request: pure and deterministic, with the standard library alone.

No clock, no randomness, no I/O, as the scheduler: the router and the simulator use the same object.
- `prompt_keys`: a prompt's beginnings as a bounded number of hashes.
- `block_table`: which of them a replica was given lately.
- `chooser`: the policies.
- `breaker`: when a replica is in rotation.
"""

from jaxserve.config.routing_config import ROUTING_POLICIES, RoutingSettings
from jaxserve.routing.breaker import Breaker, BreakerSettings, BreakerState
from jaxserve.routing.chooser import Choice, ReplicaChooser, RouteRequest
from jaxserve.routing.prompt_keys import NO_PROMPT, PromptKeys, keys_of_text, keys_of_tokens, scope_root

__all__ = [
    "NO_PROMPT",
    "ROUTING_POLICIES",
    "Breaker",
    "BreakerSettings",
    "BreakerState",
    "Choice",
    "PromptKeys",
    "ReplicaChooser",
    "RouteRequest",
    "RoutingSettings",
    "keys_of_text",
    "keys_of_tokens",
    "scope_root",
]
