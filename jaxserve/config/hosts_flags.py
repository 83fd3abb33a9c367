"""The flags of several hosts, as `flag_table` lists an engine's: name, parser, help."""

from __future__ import annotations

from typing import Any

from absl.flags import ArgumentParser, BooleanParser

from jaxserve.config.flag_parsers import FloatParser, IntParser, TextParser

HOSTS_FLAGS: tuple[tuple[str, ArgumentParser[Any], str], ...] = (
    (
        "num_processes",
        IntParser(low=1),
        "processes that hold the model together, one per host; default: one",
    ),
    ("process_id", IntParser(low=0), "of this process; 0 serves, the others follow it"),
    ("coordinator_address", TextParser(), "host:port of process 0 where jax's processes find each other"),
    (
        "distributed",
        BooleanParser(),
        "take of these three what is not set from the environment, where jax knows it: TPU pods, Slurm, Open MPI",
    ),
    (
        "control_address",
        TextParser(),
        "host:port of process 0 where the others get every iteration; default: the port after coordinator_address",
    ),
    (
        "host_token_file",
        TextParser(),
        "file with the token that the processes share; default: JAXSERVE_HOST_TOKEN of the environment",
    ),
    (
        "host_timeout_s",
        FloatParser(low=1),
        "seconds without a sign of life, or an iteration's end, until a process is lost",
    ),
)
