"""Compiled programs: in place, no copy of the pool, and a hard error for what was not compiled."""

import math
import re
import time

import jax
import pytest

from jaxserve.config import EngineConfig
from jaxserve.core import JaxserveError, MissingBucketError
from jaxserve.loading import load_model, resolve_model
from jaxserve.runtime import ModelRunner, make_mesh
from jaxserve.runtime import programs as programs_module
from jaxserve.runtime.memory_plan import format_bytes, make_plan
from jaxserve.runtime.programs import _check_in_place
from jaxserve.tables import Bucket

COPIED = re.compile(r"= \(?\w+\[([\d,]+)\][^ ]* (?:copy|copy-start|transpose)\(")
"""Dimensions of an array that compiled HLO makes by copying another."""


@pytest.fixture(scope="module")
def runner(tiny_model_dir):
    config = EngineConfig(
        model=str(tiny_model_dir),
        dtype="float32",
        max_num_seqs=2,
        max_num_batched_tokens=8,
        num_pages=9,
        decode_buckets=(2,),
        prefill_buckets=(8,),
        table_width_buckets=(4,),
        max_decode_steps=4,
    )
    mesh = make_mesh(1)
    loaded = load_model(resolve_model(str(tiny_model_dir)), "float32", mesh=mesh)
    return ModelRunner(loaded.config, loaded.params, config, 64, mesh)


@pytest.mark.parametrize("bucket", [Bucket(2, 0, 0, 4), Bucket(2, 8, 8, 4)])
def test_workspace_does_not_grow_with_the_pool(runner, bucket):
    programs = runner._programs
    small, large = programs.compile(bucket, 9), programs.compile(bucket, 900)
    assert small.memory_analysis().temp_size_in_bytes == large.memory_analysis().temp_size_in_bytes
    page = 2 * 2 * 2 * 16 * 16 * 4
    assert large.memory_analysis().alias_size_in_bytes >= 900 * page
    with pytest.raises(JaxserveError, match="would be copied"):
        _check_in_place(f"the step of bucket {bucket.name}", small, programs._kv.abstract(900))


def test_a_step_ahead_adds_what_it_leaves_to_the_workspace(runner):
    bucket = Bucket(2, 8, 8, 4)
    alone, ahead, further = (runner._programs.workspace_bytes(bucket, 9, steps) for steps in (0, 1, 2))
    logits_bytes = 10 * 264 * 4
    assert further - ahead == ahead - alone >= logits_bytes
    # With logits and token scores of ten rows and the scores of eight prompt tokens: no copy of pool or slot state.
    assert ahead - alone < 3 * logits_bytes


def test_the_decode_loop_copies_neither_pool_nor_weights_nor_slot_state(runner):
    programs, bucket = runner._programs, Bucket(2, 0, 0, 4)
    small, large = programs.compile_loop(bucket, 9), programs.compile_loop(bucket, 900)
    temp_bytes = large.memory_analysis().temp_size_in_bytes
    assert small.memory_analysis().temp_size_in_bytes == temp_bytes
    pool = programs._kv.abstract(900)
    state = programs._state
    donated = sum(math.prod(x.shape) * x.dtype.itemsize for x in (*jax.tree.leaves(pool), *state))
    assert large.memory_analysis().alias_size_in_bytes >= donated
    step, sampler = programs.compile(bucket, 900), programs.compile_sampler(2)
    parts = [program.memory_analysis().temp_size_in_bytes for program in (step, sampler)]
    logits_bytes = 2 * 264 * 4
    assert temp_bytes <= sum(parts) + 2 * logits_bytes
    kept = {x.shape for x in (*jax.tree.leaves(runner._params), *jax.tree.leaves(pool), *state)}
    assert not [dims for dims in COPIED.findall(large.as_text()) if tuple(map(int, dims.split(","))) in kept]


def test_a_workspace_holds_the_decode_loop_too(runner):
    programs = runner._programs
    needed = programs.workspace_bytes(Bucket(2, 8, 8, 4), 9)
    loop = programs.compile_loop(Bucket(2, 0, 0, 4), 9).memory_analysis()
    assert needed >= loop.temp_size_in_bytes + loop.output_size_in_bytes - loop.alias_size_in_bytes


def test_a_missing_decode_loop_is_a_hard_error(runner):
    with pytest.raises(MissingBucketError, match="the decode loop of bucket d1p0w4 was not compiled"):
        runner._programs.loop(Bucket(1, 0, 0, 4))


def test_a_missing_bucket_is_a_hard_error(runner):
    with pytest.raises(MissingBucketError, match="d1p0w4 was not compiled"):
        runner._programs.get(Bucket(1, 0, 0, 4))


def test_planned_kv_bytes_are_the_pools_real_bytes(runner):
    runner.warm_up()
    assert runner.memory_plan.kv_bytes == sum(x.nbytes for x in jax.tree.leaves(runner._pool))
    assert runner.memory_plan.state_bytes == sum(x.nbytes for x in runner._state)
    assert runner.memory_plan.max_tokens == 8 * 16


def plan(**changes):
    sizes = dict(
        allowed_bytes=1000,
        weights_bytes=400,
        workspace_bytes=100,
        state_bytes=50,
        page_bytes=10,
        page_size=16,
        num_pages=None,
        most_pages=100,
    )
    return make_plan(**(sizes | changes))


def test_what_is_left_becomes_pages_up_to_what_can_be_used():
    assert plan().num_pages == 45
    assert plan(most_pages=20).num_pages == 20
    assert plan(num_pages=7).num_pages == 7


def test_too_little_memory_is_refused_with_both_figures():
    with pytest.raises(ValueError, match=r"1000 B are allowed \(memory_fraction\) and 995 B are taken"):
        plan(weights_bytes=845)
    with pytest.raises(ValueError, match="num_pages is 46: 460 B of KV; 450 B are left"):
        plan(num_pages=46)


def test_bytes_are_shown_with_a_unit():
    assert [format_bytes(n) for n in (12, 1536, 5 << 20, 3 << 30)] == ["12 B", "1.5 KiB", "5.0 MiB", "3.00 GiB"]


def test_warm_up_counts_every_program_once(runner):
    told = []
    runner.warm_up(lambda done, total, what: told.append((done, total)))
    # Two steps, of decode alone and beside eight prompt tokens; their samplers, of which one is measured; placement;
    # the decode loop of the first.
    assert {total for _, total in told} == {6}
    assert [done for done, _ in told] == list(range(told[0][0], 7))


def test_a_program_that_cannot_be_compiled_is_told_before_the_others_are_begun(runner, monkeypatch):
    begun = []

    def compile(bucket, num_pages):
        begun.append(bucket)
        time.sleep(0.2)
        raise ValueError("of the compiler")

    monkeypatch.setattr(programs_module, "COMPILE_THREADS", 1)
    monkeypatch.setattr(runner._programs, "compile", compile)
    monkeypatch.setattr(runner._programs, "compile_sampler", lambda rows: begun.append(rows))
    with pytest.raises(ValueError, match="of the compiler"):
        runner._programs.warm_up([Bucket(rows, 0, 0, 4) for rows in range(1, 9)], 9)
    assert len(begun) <= 2, "the one that failed, and one that its thread had taken already"
