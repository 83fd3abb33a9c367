"""`tools/rolling_restart [--flag=value ...] [-- SERVER FLAGS]`: a rolling restart; status 1 if a request failed."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack

from jaxserve.config.command import run_command
from jaxserve.rolling_restart.restart import Restarted, rolling_restart
from jaxserve.testing.serving_process import ServingProcess
from jaxserve.testing.tiny import write_tiny_model

TINY = "tiny"


def main(argv: Sequence[str]) -> int:
    """Starts servers, restarts them one by one under load, and tells what clients saw.

    Returns:
      The exit status: 0 when no request failed.
    """
    words = list(argv[1:])
    cut = words.index("--") if "--" in words else len(words)
    flags = _parser().parse_args(words[:cut])
    servers: list[ServingProcess] = []
    with ExitStack() as stack:
        model = flags.model
        if model == TINY:
            model = str(write_tiny_model(stack.enter_context(tempfile.TemporaryDirectory())))
        drain = [f"--drain_delay_s={flags.drain_delay_s}", f"--drain_grace_s={flags.drain_grace_s}"]
        server_flags = [f"--model={model}", *drain, *words[cut + 1 :]]

        def start() -> ServingProcess:
            server = ServingProcess(server_flags)
            stack.callback(server.end)
            return server.wait_until_ready()

        servers += [start() for _ in range(flags.num_servers)]
        restarted = asyncio.run(rolling_restart(start, servers, flags.clients, flags.max_tokens))
    _show(restarted)
    return 1 if restarted.clients.failures else 0


def _show(restarted: Restarted) -> None:
    for way, count in sorted(restarted.clients.served.items()):
        print(f"{way}: {count} requests served")
    print(f"from SIGTERM to the end: {', '.join(f'{each:.1f}' for each in restarted.leave_s)} s")
    print(f"from the start to the first turn: {', '.join(f'{each:.1f}' for each in restarted.start_s)} s")
    print(f"{len(restarted.clients.failures)} requests failed")
    for failure in restarted.clients.failures[:10]:
        print(f"  {failure}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tools/rolling_restart", description=__doc__)
    add = parser.add_argument
    add("--num_servers", type=int, default=2, help="behind the balancer")
    add("--model", default=TINY, help="tiny: a random one of a few KB; or as for the server")
    add("--clients", type=int, default=2, help="of each way: kept and fresh connections, streams, gRPC")
    add("--max_tokens", type=int, default=60, help="of every request")
    add(
        "--drain_delay_s", type=float, default=1.0, help="of the servers: several of the balancer's probes, 0.2 s apart"
    )
    add("--drain_grace_s", type=float, default=30.0, help="of the servers")
    return parser


if __name__ == "__main__":
    run_command(main)
