"""Buckets: the smallest compiled shape that holds a plan, and an error when none does."""

import pytest

from jaxserve.config import SchedulerConfig
from jaxserve.core import MissingBucketError
from jaxserve.tables import Bucket, BucketTable


def table(**changes):
    config = dict(max_num_seqs=32, max_num_batched_tokens=512, prefill_chunk=512, page_size=16, max_model_len=8192)
    return BucketTable(SchedulerConfig(**(config | changes)))


def test_sizes_end_at_the_limits():
    buckets = table()
    assert buckets.decode == (8, 32)
    assert buckets.prefill == (64, 256, 512)
    assert buckets.widths == (32, 128, 512)


@pytest.mark.parametrize(
    ("budget", "sizes"),
    [(32, (32,)), (127, (127,)), (128, (64, 128)), (600, (80, 304, 600)), (2048, (64, 256, 1024, 2048))],
)
def test_prefill_sizes_are_half_the_limit_then_quarters(budget, sizes):
    assert table(max_num_batched_tokens=budget).prefill == sizes


def test_width_follows_the_longest_live_context():
    buckets = table()
    assert buckets.choose(decode_rows=3, prefill_tokens=0, pages=32) == Bucket(8, 0, 0, 32)
    assert buckets.choose(decode_rows=3, prefill_tokens=0, pages=33) == Bucket(8, 0, 0, 128)


def test_prefill_comes_with_no_decode_rows_or_all_of_them():
    buckets = table()
    assert buckets.choose(decode_rows=0, prefill_tokens=64, pages=1) == Bucket(0, 64, 8, 32)
    assert buckets.choose(decode_rows=1, prefill_tokens=64, pages=1) == Bucket(32, 64, 8, 32)


def test_a_quarter_of_padding_is_cheaper_than_another_program():
    buckets = table()
    assert buckets.choose(decode_rows=0, prefill_tokens=65, pages=1) == Bucket(32, 256, 8, 32)
    assert len(buckets.all()) == 3 * (2 + 2 + 1 + 1)


def test_every_choice_is_among_the_compiled_ones():
    buckets = table(max_num_seqs=5, max_num_batched_tokens=37, max_model_len=100, prefill_chunk=7, page_size=4)
    compiled = set(buckets.all())
    for rows in range(6):
        for tokens in range(38):
            for pages in (1, 13, 25):
                if rows or tokens:
                    bucket = buckets.choose(decode_rows=rows, prefill_tokens=tokens, pages=pages)
                    assert bucket in compiled
                    assert bucket.decode_rows >= rows and bucket.prefill_tokens >= tokens
                    assert bucket.table_width >= pages


def test_a_plan_too_large_is_an_error_naming_what_is_missing():
    with pytest.raises(MissingBucketError, match="decode_rows 33; the largest compiled one is 32"):
        table().choose(decode_rows=33, prefill_tokens=0, pages=1)
    with pytest.raises(MissingBucketError, match="table_width 513"):
        table().choose(decode_rows=1, prefill_tokens=0, pages=513)


def test_bad_sizes_are_refused_by_name():
    with pytest.raises(ValueError, match="decode_buckets is"):
        BucketTable(SchedulerConfig(), decode=(0, 4))
