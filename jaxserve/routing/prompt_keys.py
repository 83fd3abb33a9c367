"""A prompt's beginnings as keys: equal keys, equal beginnings, and few of them however long the prompt is.

The prompt's bytes are cut into blocks. A block's key is a hash over its bytes and the key of the block before it, so it
stands for everything up to its end, as the names of pages in `jaxserve.scheduler.prefix_cache` do; the chain starts
from what pages are not shared across: tenant, salt, adapter. What is left behind the last full block has no key.

Blocks grow with their place: `BLOCKS_PER_SIZE` of the first size, then as many of twice that, and so on. A beginning is
thus known to about a thirtieth of its length, and 8 MiB of prompt have 385 keys, not 131,072.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

TEXT_BLOCK_BYTES, TOKEN_BLOCK_BYTES = 64, 128
"""The first size: about 16 tokens of text, and 16 token ids of 8 bytes."""
BLOCKS_PER_SIZE = 32
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class PromptKeys:
    """The beginnings of a prompt.

    Attributes:
      keys: of the full blocks, from the first.
      ends: bytes up to the end of each.
      num_bytes: of the whole prompt.
    """

    keys: tuple[bytes, ...] = ()
    ends: tuple[int, ...] = ()
    num_bytes: int = 0

    def share(self, num_blocks: int) -> float:
        """The share of the prompt that its first `num_blocks` blocks are."""
        return self.ends[num_blocks - 1] / self.num_bytes if num_blocks else 0.0


NO_PROMPT = PromptKeys()
"""Of a request without one."""


def scope_root(*scope: str) -> bytes:
    """What the chain starts from: requests that differ in any part of `scope` share no beginning."""
    text = "".join(f"{len(each)}:{each}" for each in scope)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()


def keys_of_text(root: bytes, text: bytes) -> PromptKeys:
    """Keys of a prompt given as text, in UTF-8."""
    return _keys(root, text, TEXT_BLOCK_BYTES)


def keys_of_tokens(root: bytes, token_ids: Sequence[int]) -> PromptKeys:
    """Keys of a prompt given as token ids.

    Raises:
      OverflowError: an id does not fit 64 bits.
    """
    return _keys(root, array("q", token_ids).tobytes(), TOKEN_BLOCK_BYTES)


def _keys(root: bytes, content: bytes, size: int) -> PromptKeys:
    keys: list[bytes] = []
    ends: list[int] = []
    view, key, end = memoryview(content), root, size
    while end <= len(content):
        block = hashlib.blake2b(key, digest_size=_DIGEST_BYTES)
        block.update(view[end - size : end])
        key = block.digest()
        keys.append(key)
        ends.append(end)
        if not len(keys) % BLOCKS_PER_SIZE:
            size *= 2
        end += size
    return PromptKeys(tuple(keys), tuple(ends), len(content))
