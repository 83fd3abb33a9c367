"""Slot tables: what a plan looks like once padded."""

from dataclasses import replace

import numpy as np
import pytest

from jaxserve.config import SchedulerConfig
from jaxserve.core import Request, SamplingParams
from jaxserve.scheduler import Scheduler
from jaxserve.scheduler.plan import DecodeRow, DecodeRows, PageUpdate, Placement, PrefillChunk, StepPlan, StepResult
from jaxserve.tables import BucketTable, TableBuilder
from jaxserve.tables.layout import FLAG_EDITS, FLAG_HOLD_STOPS, FLAG_LIVE, FLAG_PROMPT_LOGPROBS, LIMIT_COLUMNS

CONFIG = SchedulerConfig(
    max_num_seqs=4, max_num_batched_tokens=16, prefill_chunk=8, page_size=4, max_model_len=32, max_prefill_seqs=2
)
SCRATCH = 4


def build(plan, requests):
    builder = TableBuilder(CONFIG, BucketTable(CONFIG, decode=(2,), widths=(2, 4)))
    tables = builder.build(plan, requests.__getitem__)
    return tables.bucket, builder.layout(tables.bucket).unpack(tables.ints, tables.floats)


def test_decode_and_prefill_rows_with_padding():
    requests = {
        "a": Request("a", tuple(range(10, 19)), SamplingParams(temperature=0.5, top_k=3), seed=(7 << 32) | 5),
        "b": Request("b", tuple(range(20, 27)), SamplingParams(temperature=0, prompt_logprobs=0)),
    }
    plan = StepPlan(
        iteration=3,
        decode=DecodeRows.of([DecodeRow("a", 2, 9)]),
        prefill=(PrefillChunk("b", 0, 2, (22, 23, 24, 25, 26), emits=True),),
        placements=(Placement("a", 2, 1, 7), Placement("b", 0, 0, -1)),
        pages=(PageUpdate(2, 0, (5, 6, 7)), PageUpdate(0, 0, (1, 9))),
    )
    bucket, fields = build(plan, requests)
    assert (bucket.decode_rows, bucket.prefill_tokens, bucket.prefill_rows, bucket.table_width) == (4, 16, 2, 4)
    np.testing.assert_array_equal(fields["decode_position"], [9, -1, -1, -1])
    np.testing.assert_array_equal(fields["decode_slot"], [2, SCRATCH, SCRATCH, SCRATCH])
    np.testing.assert_array_equal(fields["decode_pages"][:, 0], [[5, 6, 7, 0]])
    assert not fields["decode_pages"][:, 1:].any()
    np.testing.assert_array_equal(fields["prefill_tokens"], [22, 23, 24, 25, 26] + [0] * 11)
    np.testing.assert_array_equal(fields["prefill_position"][:5], [2, 3, 4, 5, 6])
    np.testing.assert_array_equal(fields["prefill_target"][:6], [23, 24, 25, 26, -1, -1])
    np.testing.assert_array_equal(fields["prefill_starts"], [0, 5, 5])
    np.testing.assert_array_equal(fields["prefill_context"], [7, 0])
    np.testing.assert_array_equal(fields["prefill_pages"][:, 0], [[1, 9, 0, 0]])
    np.testing.assert_array_equal(fields["slot"], [2, SCRATCH, SCRATCH, SCRATCH, 0, SCRATCH])
    np.testing.assert_array_equal(fields["sample_position"][[0, 4]], [10, 7])
    np.testing.assert_array_equal(fields["temperature"], [0.5, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(fields["top_k"], [3, 0, 0, 0, 0, 0])
    assert fields["seed_high"][0] == 7 and fields["seed_low"][0] == 5
    np.testing.assert_array_equal(fields["flags"], [FLAG_LIVE, 0, 0, 0, FLAG_LIVE | FLAG_PROMPT_LOGPROBS, 0])


def test_a_chunk_short_of_the_prompts_end_samples_nothing():
    requests = {"a": Request("a", tuple(range(9)))}
    plan = StepPlan(
        iteration=0,
        prefill=(PrefillChunk("a", 1, 0, (0, 1, 2), emits=False),),
        placements=(Placement("a", 1, 0, -1),),
        pages=(PageUpdate(1, 0, (3,)),),
    )
    bucket, fields = build(plan, requests)
    assert bucket.decode_rows == 4 and bucket.table_width == 2
    assert (fields["slot"] == SCRATCH).all() and (fields["decode_position"] == -1).all()
    assert not fields["flags"].any()


def test_two_chunks_lie_end_to_end():
    requests = {name: Request(name, tuple(range(9))) for name in "ab"}
    plan = StepPlan(
        iteration=0,
        prefill=(
            PrefillChunk("a", 0, 4, (4, 5), emits=False),
            PrefillChunk("b", 1, 0, (0, 1, 2), emits=False),
        ),
        placements=(Placement("a", 0, 0, -1), Placement("b", 1, 0, -1)),
    )
    _, fields = build(plan, requests)
    np.testing.assert_array_equal(fields["prefill_position"][:5], [4, 5, 0, 1, 2])
    np.testing.assert_array_equal(fields["prefill_row"][:5], [0, 0, 1, 1, 1])
    np.testing.assert_array_equal(fields["prefill_starts"], [0, 2, 5])
    np.testing.assert_array_equal(fields["prefill_context"], [6, 3])


def test_stop_ids_are_held_off_until_min_tokens_are_out():
    request = Request("a", (1, 2, 3), SamplingParams(min_tokens=2, max_tokens=9))
    held = []
    for position in (3, 4, 5):
        plan = StepPlan(
            iteration=0, decode=DecodeRows.of([DecodeRow("a", 0, position - 1)]), placements=(Placement("a", 0, 0, -1),)
        )
        _, fields = build(plan, {"a": request})
        assert fields["flags"][0] & FLAG_EDITS
        held.append(bool(fields["flags"][0] & FLAG_HOLD_STOPS))
    # Output 0 has write index 3, output 1 has 4; output 2 (index 5) may be a stop id.
    assert held == [True, True, False]


def test_the_whole_64_bit_seed_reaches_the_key_words():
    request = Request("a", (1,), seed=2**64 - 1)
    plan = StepPlan(iteration=0, decode=DecodeRows.of([DecodeRow("a", 0, 1)]), placements=(Placement("a", 0, 0, -1),))
    _, fields = build(plan, {"a": request})
    assert fields["seed_high"].view(np.uint32)[0] == fields["seed_low"].view(np.uint32)[0] == 0xFFFFFFFF


def test_several_steps_come_with_what_bounds_each_row():
    config = replace(CONFIG, max_decode_steps=8)
    eos = SamplingParams(stop_token_ids=(40, 30), min_tokens=3)
    requests = {
        "a": Request("a", (1, 2, 3), eos, eos_token_ids=(50,), free_running=True),
        "b": Request("b", (4,) * 9, SamplingParams(ignore_eos=True), eos_token_ids=(50,), free_running=True),
    }
    builder = TableBuilder(config, BucketTable(config, decode=(2,), widths=(2, 4)))
    first = StepPlan(
        iteration=0,
        prefill=(PrefillChunk("a", 2, 0, (1, 2, 3), True), PrefillChunk("b", 0, 0, (4,) * 9, True)),
        placements=(Placement("a", 2, 0, -1), Placement("b", 0, 0, -1)),
        pages=(PageUpdate(2, 0, (5,)), PageUpdate(0, 0, (1, 2, 3))),
    )
    assert builder.build(first, requests.__getitem__).limits is None
    plan = StepPlan(1, DecodeRows.of([DecodeRow("a", 2, 3, 6), DecodeRow("b", 0, 9, 2)]), num_steps=6)
    tables = builder.build(plan, requests.__getitem__)
    assert tables.bucket.decode_rows == 2 and tables.bucket.table_width == 4  # 9 tokens, then 11: 3 pages
    np.testing.assert_array_equal(tables.limits[0], [6, 6, 30, 40, 50, -1, -1, -1, -1, -1])
    np.testing.assert_array_equal(tables.limits[1], [2, 9] + [-1] * 8)
    tables = builder.build(StepPlan(2, plan.decode[1:], num_steps=2), requests.__getitem__)
    assert tables.limits.shape == (2, LIMIT_COLUMNS) and not tables.limits[1].any(), "padding has no step"
    assert (builder.empty_limits(tables.bucket)[:, 0] == 1).all()


def test_the_table_is_as_wide_as_the_last_of_several_steps_needs():
    buckets = BucketTable(CONFIG, decode=(2,), widths=(2, 4))
    rows = [DecodeRow("a", 0, 5, 3), DecodeRow("b", 1, 2, 1)]
    assert buckets.of_plan(StepPlan(0, DecodeRows.of(rows), num_steps=3)).table_width == 2
    assert buckets.of_plan(StepPlan(0, DecodeRows.of([*rows, DecodeRow("c", 2, 7, 2)]), num_steps=3)).table_width == 4


def test_every_group_of_layers_has_page_tables_of_its_own():
    config = replace(CONFIG, group_windows=(0, 5, 5))
    builder = TableBuilder(config, BucketTable(config, decode=(2,), widths=(2, 4)))
    requests = {"a": Request("a", tuple(range(9))), "b": Request("b", tuple(range(20, 27)))}
    plan = StepPlan(
        iteration=0,
        decode=DecodeRows.of([DecodeRow("a", 2, 9)]),
        prefill=(PrefillChunk("b", 0, 2, (22, 23, 24, 25, 26), emits=True),),
        placements=(Placement("a", 2, 1, 7), Placement("b", 0, 0, -1)),
        pages=(
            *(PageUpdate(2, 0, (5 + group, 6 + group, 7 + group), group) for group in (0, 1)),
            PageUpdate(2, 0, (0, 20, 21), 2),
            *(PageUpdate(0, 0, (30 + group,), group) for group in (0, 1, 2)),
        ),
    )
    tables = builder.build(plan, requests.__getitem__)
    fields = builder.layout(tables.bucket).unpack(tables.ints, tables.floats)
    np.testing.assert_array_equal(fields["decode_pages"][:, 0], [[5, 6, 7, 0], [6, 7, 8, 0], [0, 20, 21, 0]])
    np.testing.assert_array_equal(fields["prefill_pages"][:, 0], [[30, 0, 0, 0], [31, 0, 0, 0], [32, 0, 0, 0]])
    assert not fields["decode_pages"][:, 1:].any() and not fields["prefill_pages"][:, 1:].any()
    with pytest.raises(AssertionError):
        builder.build(StepPlan(1, plan.decode, pages=(PageUpdate(2, 0, (0,), 0),)), requests.__getitem__)


@pytest.mark.parametrize("windows", [(), (0, 6, 6), (3, 9)])
def test_rows_that_move_on_are_packed_as_from_scratch(windows):
    config = SchedulerConfig(
        max_num_seqs=4,
        max_num_batched_tokens=16,
        prefill_chunk=8,
        page_size=4,
        max_model_len=64,
        num_pages=64 * max(len(windows), 1),
        group_windows=windows,
    )
    scheduler = Scheduler(config)
    buckets = BucketTable(config, decode=(2, 4), prefill=(16,), widths=(4, 16))
    kept, fresh = TableBuilder(config, buckets), TableBuilder(config, buckets)
    params = [
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
        SamplingParams(top_k=5, seed=3, max_tokens=9, min_tokens=4, stop_token_ids=(7,)),
        SamplingParams(temperature=0.5, max_tokens=30),
    ]
    num_moved_on = 0
    requests = {
        str(i): Request(str(i), tuple(range(1, 4 + i)), params[i % 3], max_tokens=5 + 7 * (i % 5)) for i in range(12)
    }
    for request in requests.values():
        assert scheduler.add(request, 0.0) is None
    while not scheduler.idle:
        plan = scheduler.schedule(0.0)
        fresh._last = None
        before = kept._last
        mine, theirs = (builder.build(plan, requests.__getitem__) for builder in (kept, fresh))
        num_moved_on += before is not None and kept._last is before
        assert mine.bucket == theirs.bucket
        np.testing.assert_array_equal(mine.ints, theirs.ints)
        np.testing.assert_array_equal(mine.floats, theirs.floats)
        scheduler.update(plan, StepResult((9,) * len(plan.decode), (9,) * len(plan.prefill)), 0.0)
    assert num_moved_on > 10


def test_the_float_blob_is_the_same_array_until_its_values_change():
    requests = {
        "a": Request("a", (1, 2)),
        "b": Request("b", (1, 2)),
        "c": Request("c", (1, 2), SamplingParams(min_p=0.5)),
    }
    builder = TableBuilder(CONFIG, BucketTable(CONFIG, decode=(2,), widths=(2, 4)))

    def placed(name, iteration):
        rows = DecodeRows.of([DecodeRow(name, 0, 2)])
        plan = StepPlan(iteration, rows, placements=(Placement(name, 0, 1, 7),), pages=(PageUpdate(0, 0, (5,)),))
        return builder.build(plan, requests.__getitem__).floats

    first = placed("a", 0)
    assert placed("b", 1) is first
    changed = placed("c", 2)
    assert changed is not first and not np.array_equal(changed, first)


def test_rows_have_their_requests_adapter_and_padding_has_none():
    requests = {
        "a": Request("a", tuple(range(9)), adapter=7, adapter_place=2),
        "b": Request("b", tuple(range(9)), adapter=9, adapter_place=1),
        "c": Request("c", tuple(range(9))),
    }
    plan = StepPlan(
        iteration=3,
        decode=DecodeRows.of([DecodeRow("a", 2, 9), DecodeRow("c", 1, 9)]),
        prefill=(PrefillChunk("b", 0, 2, (22, 23, 24), emits=False),),
        placements=(Placement("a", 2, 9, 7), Placement("b", 0, 0, -1), Placement("c", 1, 9, 7)),
        pages=(),
    )
    builder = TableBuilder(CONFIG, BucketTable(CONFIG, decode=(2,), widths=(2, 4)), adapters=True)
    tables = builder.build(plan, requests.__getitem__)
    fields = builder.layout(tables.bucket).unpack(tables.ints, tables.floats)
    np.testing.assert_array_equal(fields["adapter"], [2, 0, 0, 0, 1, 0])
    builder.build(replace(plan, placements=(Placement("c", 2, 9, 7),), prefill=()), requests.__getitem__)
    later = DecodeRows.of([DecodeRow("c", 2, 10), DecodeRow("c", 1, 10)])
    tables = builder.build(StepPlan(4, later), requests.__getitem__)
    fields = builder.layout(tables.bucket).unpack(tables.ints, tables.floats)
    assert not fields["adapter"].any(), "the slot's last request left its adapter behind"


def test_without_adapters_tables_have_no_field_for_them():
    fields = build(
        StepPlan(0, prefill=(PrefillChunk("a", 0, 0, (1, 2, 3), emits=True),), placements=(Placement("a", 0, 0, -1),)),
        {"a": Request("a", (1, 2, 3))},
    )[1]
    assert "adapter" not in fields
