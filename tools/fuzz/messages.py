"""Targets: traces, scenarios and workloads, and what processes tell each other."""

from __future__ import annotations

import functools
import json
import socket
import struct
from typing import Any

import numpy as np

from jaxserve.core import HostLostError
from jaxserve.disaggregation.frames import Channel, FrameError, Kind, field, proof, proves
from jaxserve.hosts.messages import StepReader, read_arrays, read_digest, write_arrays
from jaxserve.runtime.slot_state import SlotRow
from jaxserve.scheduler.trace import TraceWriter
from jaxserve.scheduler.trace_reader import TraceReader
from jaxserve.sim.cost_model import UnitCost
from jaxserve.sim.fixed_workload import load_workload
from jaxserve.sim.request_log import COMPLETED
from jaxserve.sim.scenario import load_scenario, parse_scenario, run_scenario
from jaxserve.sim.simulator import Simulator
from jaxserve.sim.source import TimedSource
from tools.fuzz.files import folder, written
from tools.fuzz.taker import Taker, damaged, document, json_text, text
from tools.fuzz.target import Target

SCENARIOS: list[Any] = [
    {
        "scenario": "s",
        "policy": {
            "max_active": 2,
            "max_queue": 1,
            "token_budget": 6,
            "prefill_chunk": 4,
            "priority_preemption": True,
            "page_size": 4,
            "num_pages": 9,
            "reservation": "optimistic",
            "preemption": "recompute",
        },
        "requests": [
            {"id": "a", "arrival": 0, "priority": "low", "prompt": 8, "output": 6},
            {"id": "b", "arrival": 1, "priority": "high", "prompt": 3, "output": 3},
            {"id": "c", "arrival": 1, "priority": 0, "prompt": 2, "output": 2},
        ],
        "expected": {"termination": "all_terminal", "trace": [{"iteration": 0}], "requests": {"a": {}}},
    }
]
WORKLOADS: list[Any] = [
    {
        "name": "w",
        "num_requests": 5,
        "seed": 2,
        "arrivals": {"kind": "gamma", "rate": 6.0, "cv": 3.0},
        "classes": [
            {
                "name": "a",
                "share": 0.7,
                "priority": "high",
                "tenant": "web",
                "deadline_s": 30,
                "prompt": {"kind": "lognormal", "median": 20, "sigma": 0.9, "max": 200},
                "output": {"kind": "exponential", "mean": 15, "min": 1, "max": 80},
                "max_tokens": 80,
                "shared_prefix": {"tokens": 12, "groups": 4},
            },
            {
                "name": "b",
                "prompt": {"kind": "uniform", "low": 1, "high": 6},
                "output": {"kind": "list", "values": [5]},
            },
        ],
    },
    {
        "num_requests": 3,
        "arrivals": {"kind": "closed_loop", "concurrency": 2, "think_s": 0.5},
        "prompt": 4,
        "output": 2,
    },
    {"num_requests": 2, "arrivals": {"kind": "trace", "times": [0.5, 1]}, "prompt": 4, "output": 2},
    {
        "name": "listed",
        "requests": [
            {"arrival": 0.5, "prompt_len": 4, "max_tokens": 8, "output": 3, "priority": "low", "tenant": "t"},
            {"prompt_ids": [1, 2, 3], "max_tokens": 2},
        ],
    },
]


@functools.cache
def _trace() -> tuple[Any, ...]:
    """Header and records of a run."""
    scenario = parse_scenario(SCENARIOS[0], "seed")
    path = folder() / "seed_trace.jsonl"
    writer = TraceWriter(path, model="tiny", config=scenario.config)
    Simulator(scenario.config, UnitCost(), TimedSource(iter(scenario.arrivals)), trace=writer).run()
    writer.close()
    return tuple(json.loads(line) for line in path.read_text().splitlines())


def _damaged_trace(data: bytes) -> bytes:
    """Some lines damaged, dropped or doubled."""
    taker = Taker(data)
    if taker.below(8) == 0:
        return taker.rest()
    lines = list(_trace())
    for _ in range(1 + taker.below(3)):
        index = taker.below(len(lines))
        match taker.below(8):
            case 0 if len(lines) > 1:
                del lines[index]
            case 1:
                lines.insert(index, lines[taker.below(len(lines))])
            case _:
                lines[index] = document(taker, [lines[index]])
    whole = b"".join(text(line) + b"\n" for line in lines)
    return damaged(taker, whole) if taker.below(8) == 0 else whole


def _trace_reader(data: bytes) -> None:
    reader = TraceReader(written("trace.jsonl", _damaged_trace(data)))
    for number, record in enumerate(reader):
        assert record.line == number + 2


def _recorded_workload(data: bytes) -> None:
    load_workload(written("recorded.jsonl", _damaged_trace(data)))


def _scenario(data: bytes) -> None:
    scenario = load_scenario(written("scenario.json", json_text(data, SCENARIOS)))
    sizes = [arrival.request.num_prompt_tokens + arrival.request.max_tokens for arrival in scenario.arrivals]
    if sum(sizes) > 2000 or scenario.config.num_pages > 10_000 or scenario.config.max_num_seqs > 1000:
        return  # a run of this size may take its time
    result = run_scenario(scenario, 200)
    if result["termination"] == "all_terminal":
        assert all(each["completed"] is not None or each["result"] != COMPLETED for each in result["requests"].values())


def _workload(data: bytes) -> None:
    workload = load_workload(written("workload.json", json_text(data, WORKLOADS)))
    assert workload.num_requests >= 1 and workload.longest >= 2
    assert workload.rate is None or workload.rate >= 0
    text(workload.name)


_FIELDS = {"nonce": "abc", "proof": "0f", "key": "k", "first": 0, "request_id": "r", "index": 1, "max_tokens": 5.0}


def _frames(data: bytes) -> None:
    taker = Taker(data)
    kind = taker.of((*Kind, 0, 12, 255))
    body = taker.some(taker.below(60)) if taker.below(3) == 0 else text(document(taker, [_FIELDS]))
    payload = taker.some(taker.below(20))
    lengths = [len(body), len(payload)]
    if taker.below(4) == 0:
        lengths[taker.below(2)] = taker.of((0, 1, 2**16, 2**16 + 1, 2**32 - 1))
    frame = struct.pack(">BxxxIQ", kind, *lengths) + body + payload
    if taker.below(8) == 0:
        frame = damaged(taker, frame)
    here, there = socket.socketpair(socket.AF_UNIX)
    channel = _UnixChannel(here, 5.0)
    try:
        there.sendall(frame)
        there.shutdown(socket.SHUT_WR)
        _, fields, size = channel.receive(Kind.AUTH, Kind.PULL, Kind.BLOCK, max_payload=64)
        assert size <= 64
        assert len(channel.read(size)) == size
        proves("token", "nonce", "decode", fields.get("proof"))
        proof("token", field(fields, "nonce", str), "prefill")
        field(fields, "first", int)
        field(fields, "max_tokens", float)
    finally:
        channel.close()
        there.close()


class _UnixChannel(Channel):
    """Over a pair of sockets, which know nothing of TCP's options."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        super().__init__(_WithoutOptions(connection), timeout_s)  # type: ignore[arg-type]


class _WithoutOptions:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def setsockopt(self, *_: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


def _about(bucket: list[int]) -> dict[str, Any]:
    return {
        "iteration": 3,
        "bucket": bucket,
        "rows": [2, 0],
        "steps": 1,
        "floats": 4,
        "new_floats": True,
        "limits": False,
        "slots": [],
    }


def _host_messages(data: bytes) -> None:
    taker = Taker(data)
    arrays = [np.arange(9, dtype=np.int32), np.ones(4, np.float32)]
    about = _about([2, 0, 0, 4])
    if taker.below(2):
        about["slots"] = [1]
        arrays += [np.zeros(2, np.int32) for _ in SlotRow._fields]
    match taker.below(4):
        case 0:
            payload = taker.rest()
        case 1:
            payload = damaged(taker, b"".join(write_arrays(about, arrays)))
        case _:
            head = text(document(taker, [about | {"arrays": [[each.dtype.name, each.shape] for each in arrays]}]))
            blobs = b"".join(each.tobytes() for each in arrays)
            payload = len(head).to_bytes(4, "little") + head + blobs
    if taker.below(8) == 0:
        read_digest(payload)
        return
    for array in read_arrays(payload)[1]:
        assert not array.flags.writeable
    StepReader().read(payload)


TARGETS = (
    Target("trace_reader", _trace_reader, (ValueError,)),
    Target("recorded_workload", _recorded_workload, (ValueError,)),
    Target("scenario", _scenario, (ValueError,)),
    Target("workload", _workload, (ValueError,)),
    Target("frames", _frames, (FrameError, OSError)),
    Target("host_messages", _host_messages, (HostLostError,)),
)
