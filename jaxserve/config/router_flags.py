"""Flags of `router` beside those that every front has; policies and thresholds are named as in the field's routers."""

from __future__ import annotations

from absl.flags import ArgumentParser

from jaxserve.config.flag import flags_for
from jaxserve.config.flag_parsers import ChoiceParser, FloatParser, IntParser, ListParser, TextParser
from jaxserve.config.routing_config import ROUTING_POLICIES, RoutingSettings

DEVICE_KINDS = ("auto", "none", "gpu", "tpu")


class UrlParser(ArgumentParser[str]):
    """A server's address."""

    syntactic_help = "a URL"

    def parse(self, argument: str) -> str:
        url = str(argument).rstrip("/")
        scheme, separator, host = url.partition("://")
        if scheme not in ("http", "https") or not separator or not host or set(host) & set("/?# @"):
            raise ValueError("must be http:// or https:// and a host, without a path, as http://127.0.0.1:8001")
        return url

    def flag_type(self) -> str:
        return "url"


_TEXT, _DEFAULTS = TextParser(), RoutingSettings()
ROUTING_FLAGS = (
    (
        "routing_policy",
        ChoiceParser(ROUTING_POLICIES),
        _DEFAULTS.policy,
        "cache_aware: where most of the prompt is cached unless that is overloaded; least_loaded; round_robin",
    ),
    (
        "cache_threshold",
        FloatParser(low=0),
        _DEFAULTS.cache_threshold,
        "cache_aware: share of a prompt by which a match must be longer than another to outweigh its load",
    ),
    (
        "balance_abs_threshold",
        IntParser(low=0),
        _DEFAULTS.balance_abs_threshold,
        "cache_aware: requests above the least loaded up to which a replica is not overloaded",
    ),
    (
        "balance_rel_threshold",
        FloatParser(low=1),
        _DEFAULTS.balance_rel_threshold,
        "cache_aware: times the requests of the least loaded up to which a replica is not overloaded",
    ),
    (
        "cache_table_blocks",
        IntParser(low=1),
        _DEFAULTS.cache_table_blocks,
        "blocks of prompts remembered per replica; also most sessions",
    ),
)
"""Of the policy; `simulate` takes them too."""

ROUTER_FLAGS = [
    *flags_for(
        "router",
        "Replicas",
        ("replicas", ListParser(UrlParser()), (), "servers that run already, as http://127.0.0.1:8001,http://..."),
        ("num_replicas", IntParser(low=1), None, "start so many servers instead, each on a free loopback port"),
        (
            "replica_flags",
            _TEXT,
            "",
            "flags of each jaxserve.server that is started, in one text; those behind a lone -- are added to them",
        ),
        (
            "replica_devices",
            ChoiceParser(DEVICE_KINDS),
            "auto",
            "split this machine's GPUs or TPU chips among the servers that are started; none: all see the same",
        ),
        ("devices_per_replica", IntParser(low=1), 1, "GPUs or TPU chips of each"),
        ("max_restarts", IntParser(low=0), 5, "times in a row that a server is started again after it has died"),
        ("restart_backoff_s", FloatParser(low=0), 1.0, "seconds before it is; doubled each time in a row"),
        (
            "replica_api_key",
            _TEXT,
            None,
            "key for asking replicas for models and load; default: the first without a tenant",
        ),
    ),
    *flags_for(
        "router",
        "Routing",
        *ROUTING_FLAGS,
        ("session_header", _TEXT, "X-Session-Id", "header that names a session, whose requests stay on one replica"),
    ),
    *flags_for(
        "router",
        "Failures",
        ("max_retries", IntParser(low=0), 2, "further replicas tried for a request of which no byte was sent on"),
        ("connect_timeout_s", FloatParser(low=0.01), 2.0, "seconds for a connection to a replica"),
        ("replica_timeout_s", FloatParser(low=0.1), 600.0, "longest silence of a replica within an answer"),
        ("health_check_interval_s", FloatParser(low=0.05), 1.0, "seconds between two probes of a replica"),
        ("health_check_timeout_s", FloatParser(low=0.05), 5.0, "seconds for a probe"),
        ("health_failure_threshold", IntParser(low=1), 3, "unanswered probes in a row that take it out of rotation"),
        ("cb_failure_threshold", IntParser(low=1), 3, "failed requests in a row that do (circuit breaker)"),
        ("cb_timeout_s", FloatParser(low=0), 5.0, "seconds that it then stays out at least; doubled each time"),
    ),
]
