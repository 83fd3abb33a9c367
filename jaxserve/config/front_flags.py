"""Flags of what listens on a port: `server` and `router`."""

from __future__ import annotations

from absl.flags import BooleanParser

from jaxserve.config.bench_flags import LOG_LEVELS
from jaxserve.config.flag import flags_for
from jaxserve.config.flag_parsers import (
    ApiKeyFileParser,
    ChoiceParser,
    FloatParser,
    HostNameParser,
    IntParser,
    ListParser,
    OriginParser,
    TextParser,
)

FRONTS = frozenset({"server", "router"})
LOG_FORMATS = ("text", "json")
_TEXT, _BOOL, _PORT = TextParser(), BooleanParser(), IntParser(0, 65535)
_SECONDS = FloatParser(low=0.1)

SERVER_NETWORK_FLAGS = [
    *flags_for(
        FRONTS,
        "Network",
        ("host", _TEXT, "127.0.0.1", "address to listen on"),
        ("http_port", _PORT, 8000, "0: any free port"),
    ),
    *flags_for("server", "Network", ("grpc_port", _PORT, 9000, "0: any free port")),
    *flags_for(
        FRONTS,
        "Network",
        ("api_key", _TEXT, None, "key that clients must send as bearer token; better given as JAXSERVE_API_KEY"),
        (
            "api_key_file",
            ApiKeyFileParser(),
            (),
            "file with a key a line, as key or tenant:key; a tenant's key makes its requests that tenant's",
        ),
        ("guard_probes", _BOOL, False, "health, readiness, version and metrics need a key too"),
        ("ssl_certfile", _TEXT, None, "certificate chain (PEM): every port is served over TLS"),
        ("ssl_keyfile", _TEXT, None, "private key (PEM) of ssl_certfile, without a passphrase"),
        (
            "allowed_origins",
            ListParser(OriginParser()),
            (),
            "origins whose web pages may read answers (CORS), or *; default: none",
        ),
        (
            "allowed_hosts",
            ListParser(HostNameParser()),
            (),
            "names (Host headers) to answer to, with those below them, or *; addresses and localhost always are;"
            " default: no other on loopback without keys, all elsewhere",
        ),
        ("max_body_bytes", IntParser(low=1), 8 << 20, "largest request body"),
        ("header_timeout_s", _SECONDS, 20.0, "seconds that the head of an HTTP request may take"),
        ("body_timeout_s", _SECONDS, 120.0, "seconds that the body of an HTTP request may take after its head"),
        (
            "max_connections",
            IntParser(low=0),
            0,
            "HTTP connections at a time, some for probes besides; 0: by the limit of open files",
        ),
    ),
]
"""Where and for whom; `router` has no gRPC."""

FRONT_OPERATION_FLAGS = flags_for(
    FRONTS,
    "Operation",
    ("drain_grace_s", FloatParser(low=0), 30.0, "seconds that open requests get to end after SIGTERM"),
    ("log_level", ChoiceParser(LOG_LEVELS), "info", "least level that is logged"),
    ("log_format", ChoiceParser(LOG_FORMATS), "text", "json: one object a line for every log record"),
    ("print_config", _BOOL, False, "print the settings as a flagfile, or as JSON under log_format json, and exit"),
)

SERVER_DRAIN_FLAGS = flags_for(
    "server",
    "Operation",
    (
        "drain_delay_s",
        FloatParser(low=0),
        0.0,
        "seconds after SIGTERM in which requests are still taken, at least, while /ready says 503; 0: refused at once",
    ),
)
