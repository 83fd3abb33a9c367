"""BlockTable: the beginnings of prompts that a replica was given lately, of bounded size.

It stands for a radix tree over prompts: a key names a whole beginning (`prompt_keys`), so a path down the tree is a run
of look-ups. It is a guess: the replica may have evicted more, or less.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockTable:
    """Keys in the order of their last use.

    Args:
      capacity: most keys; what was used longest ago goes first, and of a prompt its end before its beginning.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def match(self, keys: Sequence[bytes]) -> int:
        """How many of `keys`, from the first, are there."""
        for count, key in enumerate(keys):
            if key not in self._keys:
                return count
        return len(keys)

    def enter(self, keys: Sequence[bytes]) -> None:
        """A prompt with these blocks was given; of more than the capacity the first are kept."""
        # The first block last: a beginning whose own beginning is gone would never be found.
        for key in reversed(keys[: self._capacity]):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._capacity:
            self._keys.popitem(last=False)

    def clear(self) -> None:
        """The replica has lost its cache."""
        self._keys.clear()
