"""What is sent is what is read: arrays, steps, digests."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core import HostLostError, Request, SamplingParams
from jaxserve.hosts.messages import (
    Kind,
    RunChain,
    StepReader,
    StepWriter,
    read_arrays,
    read_digest,
    write_arrays,
    write_digest,
)
from jaxserve.runtime import PreparedStep
from jaxserve.runtime.slot_state import slot_row
from jaxserve.scheduler import DecodeRow, DecodeRows, StepPlan
from jaxserve.tables import Bucket, StepTables


def test_arrays_of_every_type_and_shape_come_back():
    arrays = [
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.asarray(7, np.int32),
        np.asarray([True, False]),
        np.zeros((0, 4), np.float32),
        np.asarray([[1.5, -2.0]], jnp.bfloat16),
        np.arange(12, dtype=np.uint32).reshape(3, 4)[:, ::2],
    ]
    about, read = read_arrays(b"".join(write_arrays({"place": 2}, arrays)))
    assert about == {"place": 2}
    for array, other in zip(arrays, read, strict=True):
        assert (array.dtype, array.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(array, other)
        assert not other.flags.writeable


def test_a_message_of_another_length_is_refused():
    payload = b"".join(write_arrays({}, [np.zeros(3, np.int32)]))
    with pytest.raises(HostLostError, match="bytes of arrays"):
        read_arrays(payload + b"x")
    with pytest.raises(HostLostError, match="a digest of 3 bytes"):
        read_digest(b"abc")
    assert read_digest(write_digest(5, bytes(16))) == (5, bytes(16))


def prepared(iteration, floats, limits=None, rows=()):
    bucket = Bucket(2, 0, 0, 4)
    decode = DecodeRows.of([DecodeRow("a", 0, 3, 1), DecodeRow("b", 1, 4, 1)])
    plan = StepPlan(iteration, decode, num_steps=1 if limits is None else 3)
    return PreparedStep(plan, list(rows), StepTables(bucket, np.full(9, iteration, np.int32), floats, limits))


def test_steps_come_back_and_unchanged_floats_are_not_sent_again():
    request = Request("a", (1, 2), SamplingParams(logit_bias={3: 2.0}), max_tokens=4)
    row = slot_row(request, [4, 4], 4, 10)
    floats, limits = np.arange(4, dtype=np.float32), np.ones((2, 11), np.int32)
    others = floats + 1
    writer, reader = StepWriter(), StepReader()
    sizes = []
    for step in (
        prepared(0, floats, rows=[(1, row)]),
        prepared(1, floats),
        prepared(2, others, limits),
        prepared(3, others),
    ):
        payload = b"".join(writer.write(step))
        sizes.append(len(payload))
        read, num_decode, num_prefill = reader.read(payload)
        assert (read.plan.iteration, read.plan.num_steps) == (step.plan.iteration, step.plan.num_steps)
        assert (num_decode, num_prefill, read.tables.bucket) == (2, 0, step.tables.bucket)
        np.testing.assert_array_equal(read.tables.ints, step.tables.ints)
        np.testing.assert_array_equal(read.tables.floats, step.tables.floats)
        assert (read.tables.limits is None) == (step.tables.limits is None)
        assert [slot for slot, _ in read.slot_rows] == [slot for slot, _ in step.slot_rows]
        for (_, got), (_, sent) in zip(read.slot_rows, step.slot_rows, strict=True):
            for array, other in zip(got, sent, strict=True):
                np.testing.assert_array_equal(array, other)
    assert sizes[3] < sizes[1] + 8, "floats of the step before were sent again"


def test_a_chain_names_all_that_was_run_in_its_order():
    steps = [(Kind.STEP, [b"a", b"b"]), (Kind.SAMPLE, [b"c"])]
    one, same, other = RunChain(), RunChain(), RunChain()
    for kind, parts in steps:
        digest = one.add(kind, parts)
        assert same.add(kind, [b"".join(parts)]) == digest, "it counts how a frame was put together"
    for kind, parts in reversed(steps):
        swapped = other.add(kind, parts)
    assert swapped != digest
    assert RunChain().add(Kind.STEP, [b"a"]) != RunChain().add(Kind.SAMPLE, [b"a"])
