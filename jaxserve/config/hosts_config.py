"""Rules of the settings for several hosts: processes that hold one model together (docs/distributed.md)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.config.checks import at_least, positive
from jaxserve.config.policy_config import SWAPPING_PREEMPTIONS

if TYPE_CHECKING:
    from jaxserve.config.engine_config import EngineConfig

HOST_TOKEN_VARIABLE = "JAXSERVE_HOST_TOKEN"
MIN_TOKEN_CHARS = 16
LOCAL_SETTINGS = frozenset(
    {
        *("process_id", "coordinator_address", "control_address", "distributed", "num_processes"),
        *(
            "host_token_file",
            "host_timeout_s",
            "model",
            "tokenizer",
            "chat_template",
            "special_tokens_in_chat",
            "skip_tokenizer_init",
        ),
        *("served_model_name", "seed", "compile_cache", "trace_file", "lora_modules", "service_classes"),
        *("max_queue_requests", "max_queue_tokens", "max_grammar_bytes"),
        *("step_timeout_s", "stuck_exit_s", "startup_timeout_s", "crash_dump_dir"),
    }
)
"""Settings in which the processes of an engine may differ; all others are part of what they must agree on."""


def check_hosts(config: EngineConfig) -> None:
    """Raises ValueError if the settings for several hosts contradict each other or the rest."""
    if config.num_processes is not None:
        at_least("num_processes", config.num_processes, 1)
    positive("host_timeout_s", config.host_timeout_s)
    if not config.several_processes:
        for name in ("process_id", "coordinator_address", "control_address", "host_token_file"):
            if getattr(config, name) is not None:
                raise ValueError(
                    f"{name} is set and num_processes is {config.num_processes or 1}; set num_processes to the number"
                    " of processes, or distributed to take it from the environment"
                )
        return
    if not config.distributed:
        for name in ("process_id", "coordinator_address"):
            if getattr(config, name) is None:
                raise ValueError(
                    f"{name} is missing and num_processes is {config.num_processes}; set it, or distributed to take it"
                    " from the environment"
                )
    if config.process_id is not None:
        at_least("process_id", config.process_id, 0)
        if config.num_processes is not None and config.process_id >= config.num_processes:
            raise ValueError(
                f"process_id is {config.process_id} and num_processes is {config.num_processes}; ids go from 0 to"
                " num_processes - 1"
            )
    for name in ("coordinator_address", "control_address"):
        if (value := getattr(config, name)) is not None:
            split_address(name, value)
    if config.coordinator_address is None and config.control_address is None:
        raise ValueError(
            "control_address is missing and coordinator_address comes from the environment; set it to an address and"
            " port of process 0"
        )
    if config.preemption in SWAPPING_PREEMPTIONS:
        raise ValueError(
            f"preemption is {config.preemption} with several processes, of which each holds a part of every page; use"
            " recompute or pause"
        )
    if config.disaggregation != "none":
        raise ValueError(
            f"disaggregation is {config.disaggregation} with several processes, of which each holds a part of every"
            " page; engines that move pages run in one process each"
        )


def control_address(config: EngineConfig) -> tuple[str, int]:
    """Where process 0 takes the connections of the others: `control_address`, or the port after the coordinator's."""
    if config.control_address is not None:
        return split_address("control_address", config.control_address)
    assert config.coordinator_address is not None, "checked by check_hosts"
    host, port = split_address("coordinator_address", config.coordinator_address)
    return host, port + 1


def split_address(name: str, value: str) -> tuple[str, int]:
    """Host and port of `host:port`; an IPv6 host has brackets.

    Raises:
      ValueError: it is not of that form.
    """
    host, _, port = value.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{name} is {value!r}; it must be host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def host_token(config: EngineConfig) -> bytes:
    """What the processes know and nobody else: of `host_token_file`, else of the environment.

    Raises:
      ValueError: there is none, or it is too short.
    """
    where = HOST_TOKEN_VARIABLE
    if config.host_token_file is not None:
        where = f"host_token_file {config.host_token_file}"
        try:
            token = Path(config.host_token_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{where} cannot be read: {error}") from None
    else:
        token = os.environ.get(HOST_TOKEN_VARIABLE, "").strip()
    if len(token) < MIN_TOKEN_CHARS:
        raise ValueError(
            f"{where} has {len(token)} characters; several processes need a shared token of at least {MIN_TOKEN_CHARS}:"
            f" set {HOST_TOKEN_VARIABLE} or host_token_file alike for all of them"
        )
    return token.encode()
