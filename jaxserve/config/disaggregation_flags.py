"""Flags of disaggregated prefill and decode: what a server is, whom it talks to, and what it grants them."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Any

from absl.flags import ArgumentParser, BooleanParser, FlagValues

from jaxserve.config.engine_config import DISAGGREGATIONS
from jaxserve.config.flag import flags_for
from jaxserve.config.flag_parsers import ChoiceParser, FloatParser, IntParser, ListParser, RepeatedParser, TextParser

KV_TRANSFERS = ("auto", "stream", "jax")
TOKEN_VARIABLE = "JAXSERVE_KV_TOKEN"
MIN_TOKEN_CHARS = 16
_WILDCARDS = ("", "0.0.0.0", "::")


class AddressParser(ArgumentParser[tuple[str, int]]):
    """A host and a port."""

    syntactic_help = "host:port"

    def parse(self, argument: Any) -> tuple[str, int]:
        if isinstance(argument, tuple):
            return argument
        host, _, port = str(argument).rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError("must be host:port, as 10.0.0.5:8100 or [::1]:8100")
        return host, int(port)

    def flag_type(self) -> str:
        return "host:port"


DISAGGREGATION_FLAGS = flags_for(
    "server",
    "Disaggregated prefill and decode",
    (
        "disaggregation",
        ChoiceParser(DISAGGREGATIONS),
        "none",
        "prefill: compute prompts for decode servers; decode: have prompts computed by prefill servers",
    ),
    (
        "prefill_workers",
        ListParser(AddressParser()),
        (),
        "kv_host:kv_port of the prefill servers that a decode server asks",
    ),
    (
        "kv_host",
        TextParser(),
        "127.0.0.1",
        "address on which a prefill server is asked; with kv_transfer=jax also a decode server's, which pulls there",
    ),
    ("kv_port", IntParser(0, 65535), 8100, "port on which a prefill server is asked; 0: any free port"),
    (
        "kv_token_file",
        TextParser(),
        None,
        f"file with the token that both servers share, else {TOKEN_VARIABLE}; needed beyond this machine",
    ),
    (
        "kv_transfer",
        ChoiceParser(KV_TRANSFERS),
        "auto",
        "stream: pages over the connection, checksummed and resumable; jax: by jax.experimental.transfer, not"
        " checksummed; auto: stream; alike on both servers",
    ),
    (
        "kv_transfer_space",
        FloatParser(low=1e-6),
        1.0,
        "GiB of host memory for pages on their way, on each server; with kv_transfer=jax of the device's, beside what"
        " memory_fraction grants",
    ),
    ("kv_hold_s", FloatParser(low=0.1), 10.0, "seconds that a prefill server keeps pages whose connection was lost"),
    (
        "remote_prefill_min_tokens",
        IntParser(low=1),
        256,
        "a decode server computes prompts with fewer tokens left to compute itself",
    ),
    ("remote_prefill_timeout_s", FloatParser(low=0.01), 30.0, "most seconds that prefill servers get for one prompt"),
    (
        "local_prefill_fallback",
        BooleanParser(),
        True,
        "a decode server computes what no prefill server does; else such a request is refused with 503",
    ),
)


SIMULATED_SPLIT_FLAGS = flags_for(
    "simulate",
    "Prefill and decode on engines of their own",
    ("prefill_engines", IntParser(low=0), 0, "engines that compute prompts for others; 0: none, each engine does all"),
    ("decode_engines", IntParser(low=1), 1, "engines that requests end on, by turns"),
    (
        "prefill_setting",
        RepeatedParser(),
        None,
        "scheduler flag of the prefill engines alone, as max_num_batched_tokens=2048; may be given several times",
    ),
    ("link_bandwidth", FloatParser(low=1e-3), 25.0, "GB/s that leave a prefill engine"),
    ("link_latency_s", FloatParser(low=0), 1e-3, "seconds from a request's last byte to its arrival"),
    ("kv_token_bytes", FloatParser(low=1e-3), None, "of a token's K/V over all layers; default: the roofline's"),
    (
        "remote_prefill_min_tokens",
        IntParser(low=1),
        256,
        "prompts with fewer tokens to compute stay with decode engines",
    ),
)


def kv_token(path: str | None) -> str:
    """The shared token, of the file or the environment; "" where there is neither.

    Raises:
      ValueError: the file cannot be read, or the token is short; never says it.
    """
    where = f"kv_token_file {path}" if path else TOKEN_VARIABLE
    try:
        token = Path(path).read_text().strip() if path else os.environ.get(TOKEN_VARIABLE, "").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{where} cannot be read: {error}") from None
    if (path or token) and len(token) < MIN_TOKEN_CHARS:
        raise ValueError(f"{where} has a token of {len(token)} characters; it must have at least {MIN_TOKEN_CHARS}")
    return token


def check_disaggregation(flags: FlagValues, token: str) -> None:
    """Raises ValueError unless the flags go together."""
    role, workers = flags.disaggregation, flags.prefill_workers
    if role == "decode" and not workers:
        raise ValueError("disaggregation is decode and prefill_workers is empty; name the prefill servers")
    if workers and role != "decode":
        raise ValueError(f"prefill_workers is set and disaggregation is {role}; only a decode server asks them")
    if role != "none" and flags.kv_transfer == "jax" and flags.kv_host in _WILDCARDS:
        raise ValueError(
            f"kv_host is {flags.kv_host} and kv_transfer is jax, which tells the other server this address; name the"
            " one at which this machine is reached"
        )
    hosts = [flags.kv_host] if role == "prefill" else [host for host, _ in workers]
    beyond = next((host for host in hosts if not _is_loopback(host)), None)
    if beyond is not None and not token:
        raise ValueError(
            f"kv_token_file is not set and {beyond} is not this machine alone; give both servers one token"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
