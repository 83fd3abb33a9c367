"""LengthEstimator: quantiles of the output lengths of the requests that completed last."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque


class LengthEstimator:
    """Keeps the last `WINDOW` output lengths, in order of arrival and of size."""

    WINDOW = 512

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def observe(self, num_tokens: int) -> None:
        """A request completed with so many output tokens."""
        if len(self._recent) == self.WINDOW:
            oldest = self._recent.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
        self._recent.append(num_tokens)
        insort(self._sorted, num_tokens)

    def expected(self, quantile: float, num_so_far: int, max_tokens: int) -> int:
        """Output tokens, in all, of a request that has `num_so_far` and may have `max_tokens`.

        Args:
          quantile: in (0, 1], among the observed lengths above `num_so_far`; `max_tokens` when there are none.
        """
        longer = bisect_right(self._sorted, num_so_far)
        count = len(self._sorted) - longer
        if not count:
            return max_tokens
        return min(self._sorted[longer + min(int(quantile * count), count - 1)], max_tokens)
