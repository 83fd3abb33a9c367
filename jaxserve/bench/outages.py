"""`bench outages`: what clients see, and how long it lasts, when a step hangs or a process dies or is killed.

Each fault strikes a service of its own amid `STREAMS` streams. Where it ends, the tool starts it again at once, as a
supervisor would. Times are seconds from the strike on:

    noticed        /health is no longer 200, or nobody answers; of a router: it has a replica less
    ended          all processes have ended
    serving again  the service has answered a request, alone, with the token ids that it had before the fault

Streams end with an error event, are cut off without one, or end whole. A batch job has no streams: whole are the lines
that it has in the end, all of which must be those of a job that nothing struck; `serving again` is its next line.

Programs come from a compilation cache that the first start has filled. Steps are slowed to `STEP_S`, so that a fault
finds the streams at work.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from absl.flags import FlagValues

from jaxserve.bench.host_work import TINY
from jaxserve.bench.report import Column, MeasurementError, report
from jaxserve.faults import ALLOW_VARIABLE
from jaxserve.testing.serving_process import ServingProcess
from jaxserve.testing.tiny import write_tiny_model

STREAMS, TOKENS, STEP_S = 6, 96, 0.03
LOOK_S, LIMIT_S, WHOLE_S = 0.005, 120.0, 600.0
LINES, BATCH = 64, "batch job: kill -9"
STRIKING = "strike"
"""Request id that faults wait for."""
PROBE = {"prompt": "The sea is wide", "max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
LONG = PROBE | {"max_tokens": TOKENS, "stream": True}

COLUMNS = (
    Column("fault", "fault"),
    Column("noticed_s", "noticed s", ".2f"),
    Column("ended_s", "ended s", ".2f"),
    Column("status", "status", "d"),
    Column("again_s", "serving again s", ".2f"),
    Column("error", "error", "d"),
    Column("cut", "cut off", "d"),
    Column("whole", "whole", "d"),
)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, and the service that it strikes.

    Attributes:
      plan: fault plan of its processes; where it waits for `STRIKING`, such a request strikes.
      flags: of the server, besides the common ones.
      kind: of service: one server, one of two processes, or a router of two replicas.
      victim: which process is killed, of a router which replica; None: the plan does what is done.
    """

    name: str
    plan: tuple[dict[str, Any], ...] = ()
    flags: tuple[str, ...] = ()
    kind: str = "server"
    victim: int | None = None


def _at_strike(place: str, kind: str, **more: Any) -> dict[str, Any]:
    return {"at": place, "do": kind, "request_id": STRIKING, **more}


FAULTS = (
    Fault(
        "a step hangs for 3 s; step_timeout_s=1",
        (_at_strike("runner.collect", "hang", seconds=3),),
        ("--step_timeout_s=1",),
    ),
    Fault(
        "a step hangs; step_timeout_s=1, stuck_exit_s=1",
        (_at_strike("runner.collect", "hang", seconds=600),),
        ("--step_timeout_s=1", "--stuck_exit_s=1"),
    ),
    Fault(
        "the device cannot be made ready after a failed step",
        (_at_strike("runner.dispatch", "raise"), {"at": "runner.recover", "do": "raise"}),
    ),
    Fault("server: kill -9", victim=0),
    Fault("engine of two processes: kill -9 of the other one", kind="hosts", victim=1),
    Fault("engine of two processes: kill -9 of the leader", kind="hosts", victim=0),
    Fault("router of two replicas: kill -9 of one", kind="router", victim=0),
)


def run(flags: FlagValues) -> None:
    """Strikes every fault `runs` times and reports medians.

    Raises:
      MeasurementError: a service did not come back, or gives other ids than before; a line of the batch job was lost.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = str(write_tiny_model(folder / "model")) if flags.model == TINY else flags.model
        for kind in {fault.kind: fault for fault in FAULTS}.values():
            _strike(kind, model, folder)  # fills the compilation cache
        results = []
        for fault in FAULTS:
            results.append(_medians([_strike(fault, model, folder) for _ in range(flags.runs)]))
        results.append(_medians([_strike_batch(model, folder / f"batch{number}") for number in range(flags.runs)]))
    report("outages", {"model": flags.model, "runs": flags.runs, "streams": STREAMS}, results, COLUMNS, flags.output)


def _medians(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By key; of ends of streams the sum, of what is no number the first."""
    found = dict(runs[0])
    for key in ("noticed_s", "ended_s", "again_s"):
        if found[key] is not None:
            found[key] = statistics.median(each[key] for each in runs)
    for key in ("error", "cut", "whole"):
        found[key] = sum(each[key] for each in runs)
    return found


def _strike(fault: Fault, model: str, folder: Path) -> dict[str, Any]:
    with ExitStack() as stack:
        start = _starter(fault, model, folder, stack)
        return asyncio.run(_limited(_outage(fault, start), fault.name))


async def _limited(outage: Awaitable[dict[str, Any]], name: str) -> dict[str, Any]:
    """Its result, within `WHOLE_S`.

    Raises:
      MeasurementError: it takes longer.
    """
    try:
        return await asyncio.wait_for(outage, WHOLE_S)
    except TimeoutError:
        raise MeasurementError(f"{name}: it has not been gone through within {WHOLE_S:g} s") from None


def _starter(fault: Fault, model: str, folder: Path, stack: ExitStack) -> Callable[[bool], list[ServingProcess]]:
    """What starts the service's processes, the one that is asked first; all end with `stack`."""
    common = [
        *(f"--model={model}", "--dtype=float32", "--max_model_len=256", "--num_pages=200", "--max_num_seqs=8"),
        *("--decode_buckets=8", "--prefill_buckets=64", "--table_width_buckets=16", "--max_num_batched_tokens=64"),
        *(f"--compile_cache={folder / 'cache'}", "--host_timeout_s=5"),
        *("--startup_timeout_s=300", *fault.flags),
    ]

    def start(struck: bool) -> list[ServingProcess]:
        slow = {"at": "engine.step", "do": "hang", "seconds": STEP_S, "times": None}
        plan = folder / "plan.json"
        plan.write_text(json.dumps([slow, *(() if struck else fault.plan)]))
        words, environment = [*common, f"--fault_plan={plan}"], {ALLOW_VARIABLE: "1"}

        def process(*more: str, **variables: str) -> ServingProcess:
            return stack.enter_context(ServingProcess([*words, *more], environment | variables))

        if fault.kind == "router":
            all_words = ["--num_replicas=2", "--", *words]
            return [stack.enter_context(ServingProcess(all_words, environment, "jaxserve.router"))]
        if fault.kind == "server":
            return [process()]
        together = ("--num_processes=2", "--tensor_parallel_size=2", f"--coordinator_address=127.0.0.1:{_two_ports()}")
        variables = {
            "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
            "JAXSERVE_HOST_TOKEN": "bench outages, on loopback only",
        }
        return [process(*together, f"--process_id={number}", **variables) for number in (0, 1)]

    return start


async def _outage(fault: Fault, start: Callable[[bool], list[ServingProcess]]) -> dict[str, Any]:
    processes = start(False)
    url = await _ready(processes[0])
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        want = await _replicas(session, url)
        alone = await _ids(session, url)
        begun = asyncio.Semaphore(0)
        streams = [asyncio.create_task(_stream(session, url, begun)) for _ in range(STREAMS)]
        for _ in streams:
            await begun.acquire()
        struck_at = time.monotonic()
        striking = None
        if fault.victim is None:
            striking = asyncio.create_task(_stream(session, url, begun, STRIKING))
        elif fault.kind == "router":
            os.kill(_children(processes[0].pid)[fault.victim], signal.SIGKILL)
        else:
            processes[fault.victim].signal(signal.SIGKILL)
        noticed_s = ended_s = None
        while noticed_s is None or (ended_s is None and not await _is_well(session, url, want)):
            if noticed_s is None and not await _is_well(session, url, want):
                noticed_s = time.monotonic() - struck_at
            if all(each.poll() is not None for each in processes):
                ended_s = time.monotonic() - struck_at
            if time.monotonic() - struck_at > LIMIT_S:
                raise MeasurementError(
                    f"{fault.name}: after {LIMIT_S:g} s the service is neither well nor has it ended"
                )
            await asyncio.sleep(LOOK_S)
        ends = Counter(await asyncio.gather(*streams))
        if striking is not None:
            await striking
        status = None
        if ended_s is not None:
            survivors = [each for number, each in enumerate(processes) if number != fault.victim]
            status = (survivors or processes)[0].wait(LIMIT_S)
            url = await _ready(start(True)[0])
        if await _ids(session, url) != alone:
            raise MeasurementError(f"{fault.name}: afterwards a request has other token ids than before")
        again_s = time.monotonic() - struck_at
    times = {"noticed_s": noticed_s, "ended_s": ended_s, "status": status, "again_s": again_s}
    return {"fault": fault.name, **times, **{end: ends[end] for end in ("error", "cut", "whole")}}


async def _ready(process: ServingProcess) -> str:
    return (await asyncio.to_thread(process.wait_until_ready)).url


async def _replicas(session: aiohttp.ClientSession, url: str) -> int | None:
    """How many replicas a router has in rotation, once it has two; None of a server."""
    while True:
        async with session.get(f"{url}/health") as response:
            found: int | None = (await response.json()).get("in_rotation")
        if found is None or found == 2:
            return found
        await asyncio.sleep(LOOK_S)


async def _is_well(session: aiohttp.ClientSession, url: str, replicas: int | None) -> bool:
    try:
        async with session.get(f"{url}/health") as response:
            return response.status == 200 and (await response.json()).get("in_rotation") == replicas
    except (aiohttp.ClientError, OSError):
        return False


async def _ids(session: aiohttp.ClientSession, url: str) -> list[int]:
    async with session.post(f"{url}/v1/completions", json=PROBE) as response:
        body = await response.json()
        if response.status != 200:
            raise MeasurementError(f"a request alone is answered {response.status}: {body}")
        ids: list[int] = body["choices"][0]["token_ids"]
        return ids


async def _stream(
    session: aiohttp.ClientSession, url: str, begun: asyncio.Semaphore, request_id: str | None = None
) -> str:
    """How a stream ends: "error", "cut" or "whole"; releases `begun` at the first event."""
    body = LONG if request_id is None else LONG | {"request_id": request_id}
    last = ""
    with suppress(aiohttp.ClientError, OSError):
        async with session.post(f"{url}/v1/completions", json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: "):
                    if not last:
                        begun.release()
                    last = line.decode().removeprefix("data: ").strip()
    if last == "[DONE]":
        return "whole"
    return "error" if '"error"' in last else "cut"


def _children(pid: int) -> list[int]:
    """Processes that a process has started, oldest first."""
    return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def _two_ports() -> int:
    """A free port whose successor is free too."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            with suppress(OSError, OverflowError):
                second.bind(("127.0.0.1", port + 1))
                return port


def _strike_batch(model: str, folder: Path) -> dict[str, Any]:
    """Kills a batch job amid its lines, and runs the same command again."""
    folder.mkdir()
    body = {"prompt": "The sea is wide", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0.8}
    with (folder / "input").open("w") as lines:
        for number in range(LINES):
            request = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions"}
            lines.write(json.dumps(request | {"body": body | {"seed": number}}) + "\n")

    async def job(output: Path) -> asyncio.subprocess.Process:
        words = [f"--model={model}", "--dtype=float32", "--max_model_len=256", "--num_pages=200", "--max_num_seqs=8"]
        words += [f"--input={folder / 'input'}", f"--output={output}", f"--compile_cache={folder.parent / 'cache'}"]
        quiet = {"stdout": asyncio.subprocess.DEVNULL, "stderr": asyncio.subprocess.DEVNULL}
        return await asyncio.create_subprocess_exec(sys.executable, "-m", "jaxserve.batch", *words, **quiet)  # type: ignore[arg-type]

    async def strike() -> dict[str, Any]:
        whole, output = folder / "whole", folder / "output"
        if await (await job(whole)).wait():
            raise MeasurementError("the batch job failed though nothing struck it")
        process = await job(output)
        while _num_lines(output) < LINES // 4 and process.returncode is None:
            await asyncio.sleep(LOOK_S)
        process.kill()
        struck_at = time.monotonic()
        await process.wait()
        ended_s, had = time.monotonic() - struck_at, _num_lines(output)
        process = await job(output)
        while _num_lines(output) <= had and process.returncode is None:
            await asyncio.sleep(LOOK_S)
        again_s = time.monotonic() - struck_at
        if await process.wait() or _texts(output) != _texts(whole):
            raise MeasurementError("the batch job that was killed and run again has other lines than one that was not")
        times = {"noticed_s": None, "ended_s": ended_s, "status": -signal.SIGKILL, "again_s": again_s}
        return {"fault": BATCH, **times, "error": 0, "cut": 0, "whole": _num_lines(output)}

    return asyncio.run(_limited(strike(), BATCH))


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _texts(path: Path) -> dict[str, str]:
    lines = map(json.loads, path.read_text().splitlines())
    return {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in lines}
