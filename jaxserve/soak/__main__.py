"""`tools/soak [--flag=value ...] [-- SERVER FLAGS]`: starts a server, soaks it, reports; status 1 on a breach."""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from jaxserve.config.command import run_command
from jaxserve.faults import ALLOW_VARIABLE
from jaxserve.soak.kinds import Sizes
from jaxserve.soak.report import document, text, write
from jaxserve.soak.run import Soaked, Subject, soak
from jaxserve.soak.schedule import Shape
from jaxserve.soak.watch import Limits
from jaxserve.testing.serving_process import ServingProcess
from jaxserve.testing.tiny import write_tiny_model

TINY = "tiny"
CLASSES: dict[str, dict[str, Any]] = {"gold": {"priority": -1}, "bronze": {"priority": 1, "max_queue_requests": 12}}
SERVER_FLAGS = (
    "--dtype=float32",
    "--max_model_len=512",
    "--max_num_seqs=6",
    "--max_num_batched_tokens=64",
    "--num_pages=40",
    "--max_queue_requests=24",
    "--enable_prefix_caching",
    "--policy=priority",
    "--priority_preemption",
    "--reservation=optimistic",
    "--preemption=auto",
    "--swap_space=0.01",
)
"""A pool and a queue that are soon full, and policies that preempt; what follows `--` overrides them."""
END_S = 60.0


def main(argv: Sequence[str]) -> int:
    """Parses flags and soaks.

    Returns:
      The exit status: 0 when nothing was found.
    """
    own, server = _split(argv[1:])
    flags = _parser().parse_args(own)
    sizes = Sizes(flags.max_words, flags.max_tokens, tuple(CLASSES))
    shape = Shape(flags.seconds, flags.rate, min(flags.round_s, flags.seconds / 2), flags.burst, flags.storm)
    limits = Limits(growth_mib=flags.max_growth_mib)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = flags.model
        if model == TINY:
            model = str(write_tiny_model(folder / "model", max_position=512))
        classes = folder / "classes.json"
        classes.write_text(json.dumps(CLASSES))
        faults = [f"--fault_plan={flags.fault_plan}"] if flags.fault_plan else []
        words = [f"--model={model}", *SERVER_FLAGS, f"--service_classes={classes}", *faults, *server]
        environment = {ALLOW_VARIABLE: "1"} if faults else {}
        process = stack.enter_context(ServingProcess(words, environment))
        process.wait_until_ready()
        subject = Subject(process.url, process.grpc_address, lambda: process.poll() is None)
        soaked = asyncio.run(soak(subject, flags.seed, shape, sizes, limits, bool(faults)))
        _end(process, soaked)
    settings = vars(flags) | {"server": words}
    found = document(soaked, settings, limits)
    print(text(found))
    if flags.output:
        write(found, flags.output)
    return 1 if soaked.findings.num_breaches else 0


def _end(process: ServingProcess, soaked: Soaked) -> None:
    """An idle server ends by itself, with status 0, and has logged no traceback."""
    if process.poll() is None:
        process.signal()
        status = process.wait(END_S)
        if status:
            soaked.findings.breach("end", f"the server ended with {status}")
    if not soaked.findings.faults_allowed and any("Traceback" in line for line in process.tail):
        soaked.findings.breach("log", f"the server logged {''.join(process.tail[-12:])}")


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The tool's own flags, and the server's, which follow `--`."""
    if "--" in words:
        cut = list(words).index("--")
        return list(words[:cut]), list(words[cut + 1 :])
    return list(words), []


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tools/soak", description=__doc__)
    add = parser.add_argument
    add("--seconds", type=float, default=60.0, help="that rounds of traffic begin in")
    add("--model", default=TINY, help="tiny: a random one of a few KB; or as for the server")
    add("--seed", type=int, default=0, help="of the traffic")
    add("--rate", type=float, default=12.0, help="actions a second of the mixed traffic")
    add("--round_s", type=float, default=15.0, help="seconds of mixed traffic before a burst and a rest")
    add("--burst", type=int, default=60, help="requests at once")
    add("--storm", type=int, default=80, help="connections at once that come and go")
    add("--max_words", type=int, default=12, help="of a prompt")
    add("--max_tokens", type=int, default=40, help="of an output; cancelled ones ask for four times as many")
    add("--max_growth_mib", type=float, default=32.0, help="of memory over the last two thirds of the time")
    add("--fault_plan", help="of the server: its requests may then fail, and nothing else may")
    add("--output", help="writes OUTPUT.json and OUTPUT.md")
    return parser


if __name__ == "__main__":
    run_command(main)
