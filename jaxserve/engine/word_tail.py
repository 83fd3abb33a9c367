"""Words of several tokens that an output may not hold: which ids would complete one now.

As in vLLM, a word's last token is barred where its other tokens stand right before it in the output; a prompt's tokens
do not count, nor does the same text in other tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class WordTail:
    """The last tokens of one output, as many as the longest word needs.

    Args:
      words: ids of each word, at least two.
    """

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        self._tail: deque[int] = deque(maxlen=max(map(len, words)) - 1)
        self._words_by_end: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for word in words:
            self._words_by_end.setdefault(word[-2], []).append((word[:-1], word[-1]))

    def append(self, token_id: int) -> None:
        """Notes the output's next token."""
        self._tail.append(token_id)

    def barred(self) -> list[int]:
        """Ids that would complete a word."""
        if not self._tail:
            return []
        words = self._words_by_end.get(self._tail[-1])
        if words is None:
            return []
        tail = tuple(self._tail)
        return [last for begin, last in words if tail[-len(begin) :] == begin]
