"""What the processes of an engine tell each other, and how it is written.

Small things are JSON. Arrays are raw little-endian bytes behind a JSON head that has their types and shapes: the head's
length in 4 bytes, the head, the arrays one behind the other. `RunChain` names everything that was run so far.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxserve.core import HostLostError
from jaxserve.runtime import PreparedStep, StepHandle
from jaxserve.runtime.slot_state import SlotRow
from jaxserve.scheduler import StepPlan
from jaxserve.tables import Bucket, StepTables

DIGEST_BYTES = 16
PIECE_BYTES = 64 << 20
"""Of what has no bound, as an adapter: other frames, as signs of life, go in between."""
_BROKEN = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    StopIteration,
    struct.error,
)
"""What reading bytes of another form comes to."""
_LENGTH = struct.Struct("<I")
_STEP_ID = struct.Struct("<Q")


class Kind(IntEnum):
    """Kinds of frames."""

    PULSE = 0  # both ways: a sign of life
    REPORT = 1  # to the leader, at the start: JSON
    DECISION = 2  # from the leader, at the start: JSON
    WARM_UP = 3  # from here on, from the leader: what to run, in order
    STEP = 4
    SAMPLE = 5
    ADAPTER = 6
    STOP = 7
    DIGEST = 8  # to the leader: what a step came to
    FAILED = 9  # both ways: text of an error, the last frame
    ADAPTER_PART = 10  # from the leader: bytes of the arrays that the next ADAPTER tells of


class RunChain:
    """A running digest of everything that was run, so that two processes can compare it in 16 bytes."""

    def __init__(self) -> None:
        self._digest = bytes(DIGEST_BYTES)

    def add(self, kind: Kind, parts: Sequence[bytes | memoryview]) -> bytes:
        """Adds what a frame asks for; returns the digest."""
        digest = hashlib.blake2b(self._digest, digest_size=DIGEST_BYTES, person=bytes([kind]))
        for part in parts:
            digest.update(part)
        self._digest = digest.digest()
        return self._digest


def step_digest(chain: bytes, handle: StepHandle, num_decode: int, num_prefill: int) -> bytes:
    """What a step came to: the plans up to it, and its tokens. Waits for them.

    Args:
      chain: of everything run up to the step's sampling.
      num_decode, num_prefill: rows of its plan; others are padding.
    """
    assert handle.outputs is not None, f"step {handle.plan.iteration} is not sampled"
    tokens = np.asarray(handle.outputs.tokens)
    rows = handle.bucket.decode_rows
    live = [tokens[..., :num_decode], tokens[..., rows : rows + num_prefill]]
    return hashlib.blake2b(
        chain + b"".join(np.ascontiguousarray(part).tobytes() for part in live), digest_size=DIGEST_BYTES
    ).digest()


def write_digest(iteration: int, digest: bytes) -> bytes:
    """The payload of a `DIGEST`."""
    return _STEP_ID.pack(iteration) + digest


def read_digest(payload: bytes) -> tuple[int, bytes]:
    """Iteration and digest of a `DIGEST`."""
    if len(payload) != _STEP_ID.size + DIGEST_BYTES:
        raise HostLostError(f"a digest of {len(payload)} bytes; it has {_STEP_ID.size + DIGEST_BYTES}")
    return _STEP_ID.unpack_from(payload)[0], payload[_STEP_ID.size :]


def write_arrays(about: dict[str, Any], arrays: Sequence[np.ndarray[Any, Any]]) -> list[bytes | memoryview]:
    """A payload of a JSON object and arrays."""
    head = json.dumps({**about, "arrays": [[array.dtype.name, array.shape] for array in arrays]}).encode()
    # Of their bytes: the buffer of a bfloat16 array has no format that memoryview knows.
    blobs = [memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8)) for array in arrays]
    return [_LENGTH.pack(len(head)), head, *blobs]


def pieces_of(parts: Sequence[bytes | memoryview]) -> Iterator[memoryview]:
    """A payload of `write_arrays` in frames' worth of at most `PIECE_BYTES`."""
    for part in map(memoryview, parts):
        for first in range(0, len(part), PIECE_BYTES):
            yield part[first : first + PIECE_BYTES]


def read_json(payload: bytes) -> dict[str, Any]:
    """The object of a `REPORT` or a `DECISION`.

    Raises:
      HostLostError: it is none.
    """
    try:
        value = json.loads(payload)
    except _BROKEN as error:
        raise HostLostError(f"a message of {len(payload)} bytes is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise HostLostError(f"a message of {len(payload)} bytes is a {type(value).__name__}; it must be an object")
    return value


def read_arrays(payload: bytes) -> tuple[dict[str, Any], list[np.ndarray[Any, Any]]]:
    """JSON object and arrays of a payload of `write_arrays`; the arrays are read-only views of it.

    Raises:
      HostLostError: it is none.
    """
    try:
        (length,) = _LENGTH.unpack_from(payload)
        first = _LENGTH.size + length
        about = read_json(payload[_LENGTH.size : first])
        arrays = []
        for name, shape in about.pop("arrays"):
            dtype = jnp.dtype(str(name))
            if any(type(size) is not int or size < 0 for size in shape):
                raise ValueError(f"an array has the shape {shape}")
            count = math.prod(shape)
            arrays.append(np.frombuffer(payload, dtype, count, first).reshape(shape))
            first += count * dtype.itemsize
    except _BROKEN as error:
        raise HostLostError(f"a message of {len(payload)} bytes cannot be read: {error}") from error
    if first != len(payload):
        raise HostLostError(f"a message of {len(payload)} bytes has {first} bytes of arrays")
    return about, arrays


class StepWriter:
    """Writes prepared steps; float32 blobs that are the last ones of their size are left out."""

    def __init__(self) -> None:
        self._floats: dict[int, np.ndarray[Any, Any]] = {}

    def write(self, prepared: PreparedStep) -> list[bytes | memoryview]:
        """The payload of a `STEP`."""
        plan, tables, bucket = prepared.plan, prepared.tables, prepared.tables.bucket
        assert not plan.swaps, f"plan {plan.iteration} swaps pages, which several processes do not"
        is_new = self._floats.get(tables.floats.size) is not tables.floats
        self._floats[tables.floats.size] = tables.floats
        arrays = [tables.ints]
        arrays += [tables.floats] if is_new else []
        arrays += [] if tables.limits is None else [tables.limits]
        for _, row in prepared.slot_rows:
            arrays += row
        about = {
            "iteration": plan.iteration,
            "bucket": [bucket.decode_rows, bucket.prefill_tokens, bucket.prefill_rows, bucket.table_width],
            "rows": [len(plan.decode), len(plan.prefill)],
            "steps": plan.num_steps,
            "floats": tables.floats.size,
            "new_floats": is_new,
            "limits": tables.limits is not None,
            "slots": [slot for slot, _ in prepared.slot_rows],
        }
        return write_arrays(about, arrays)


class StepReader:
    """Reads what a `StepWriter` wrote, in its order."""

    def __init__(self) -> None:
        self._floats: dict[int, np.ndarray[Any, Any]] = {}

    def read(self, payload: bytes) -> tuple[PreparedStep, int, int]:
        """The step, and the numbers of its decode rows and chunks; its plan has no more than what running it needs.

        Raises:
          HostLostError: the payload is none of a step.
        """
        about, arrays = read_arrays(payload)
        try:
            return self._step(about, arrays)
        except _BROKEN as error:
            raise HostLostError(f"a step that cannot be read came: {type(error).__name__}: {error}") from error

    def _step(self, about: dict[str, Any], arrays: list[np.ndarray[Any, Any]]) -> tuple[PreparedStep, int, int]:
        rest = iter(arrays)
        ints = next(rest)
        if about["new_floats"]:
            self._floats[about["floats"]] = next(rest)
        limits = next(rest) if about["limits"] else None
        size = len(SlotRow._fields)
        values = list(rest)
        rows = [
            (slot, SlotRow(*values[index * size : (index + 1) * size])) for index, slot in enumerate(about["slots"])
        ]
        tables = StepTables(Bucket(*about["bucket"]), ints, self._floats[about["floats"]], limits)
        num_decode, num_prefill = about["rows"]
        plan = StepPlan(about["iteration"], num_steps=about["steps"])
        return PreparedStep(plan, rows, tables), num_decode, num_prefill
