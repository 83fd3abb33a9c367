"""Keys of a prompt's beginnings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.routing import NO_PROMPT, keys_of_text, keys_of_tokens, scope_root
from jaxserve.routing.prompt_keys import BLOCKS_PER_SIZE, TEXT_BLOCK_BYTES

ROOT = scope_root("tenant", "salt", "model")


@given(st.binary(max_size=20_000), st.binary(max_size=4000), st.binary(max_size=4000))
def test_prompts_share_keys_exactly_as_far_as_they_are_equal(beginning, one, other):
    a, b = keys_of_text(ROOT, beginning + one), keys_of_text(ROOT, beginning + other)
    equal = 0
    while (
        equal < min(len(beginning + one), len(beginning + other))
        and (beginning + one)[equal] == (beginning + other)[equal]
    ):
        equal += 1
    shared = sum(end <= equal for end in a.ends)
    assert a.keys[:shared] == b.keys[:shared]
    assert not set(a.keys[shared:]) & set(b.keys[shared:])


def test_what_is_behind_the_last_full_block_has_no_key():
    assert keys_of_text(ROOT, b"x" * (TEXT_BLOCK_BYTES - 1)).keys == ()
    assert keys_of_text(ROOT, b"x" * (2 * TEXT_BLOCK_BYTES + 1)).ends == (64, 128)


def test_a_long_prompt_has_few_keys_and_is_known_to_a_thirtieth_of_its_length():
    keys = keys_of_text(ROOT, b"x" * (8 << 20))
    assert len(keys.keys) <= 12 * BLOCKS_PER_SIZE
    blocks = [end - before for before, end in zip((0, *keys.ends), keys.ends, strict=False)]
    assert all(block <= max(TEXT_BLOCK_BYTES, end / 15) for block, end in zip(blocks, keys.ends, strict=True))
    assert keys.share(len(keys.keys)) == keys.ends[-1] / (8 << 20)
    assert keys.share(0) == 0 and NO_PROMPT.share(0) == 0


def test_another_tenant_salt_or_model_shares_nothing():
    text = b"x" * 1000
    roots = [scope_root(*scope) for scope in (("a", "b", "c"), ("ab", "", "c"), ("a", "b", "d"), ("", "ab", "c"))]
    found = [keys_of_text(root, text).keys for root in roots]
    assert len({key for keys in found for key in keys}) == sum(map(len, found))


def test_token_ids_are_prompts_too():
    a, b = keys_of_tokens(ROOT, range(100)), keys_of_tokens(ROOT, [*range(50), *range(50)])
    assert a.ends[0] == 128 and a.num_bytes == 800  # 16 ids of 8 bytes
    assert a.keys[:3] == b.keys[:3] and a.keys[3] != b.keys[3]
    with pytest.raises(OverflowError):
        keys_of_tokens(ROOT, [1 << 70])
