"""Timeline: what the iterations did over time, in bounded memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Span:
    """Some iterations in a row.

    Attributes:
      began_at, ended_at: instants of the first's begin and the last's end.
      busy_s: sum of their durations.
      iterations: how many.
      decode_tokens, prefill_tokens: sums.
      pages_owned, queue, active: largest seen, after an iteration.
    """

    began_at: float
    ended_at: float
    busy_s: float
    iterations: int
    decode_tokens: int
    prefill_tokens: int
    pages_owned: int
    queue: int
    active: int


class Timeline:
    """Spans in order of time, at most `LIMIT`; when it is reached, neighbours are joined in pairs."""

    LIMIT = 4096

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._width = 1  # iterations per span

    def add(self, span: Span) -> None:
        """Appends one iteration."""
        last = self.spans[-1] if self.spans else None
        if last is not None and last.iterations < self._width:
            _join(last, span)
            return
        if len(self.spans) == self.LIMIT:
            for left, right in zip(self.spans[::2], self.spans[1::2], strict=True):
                _join(left, right)
            del self.spans[1::2]
            self._width *= 2
        self.spans.append(span)


def _join(left: Span, right: Span) -> None:
    left.ended_at = right.ended_at
    left.busy_s += right.busy_s
    left.iterations += right.iterations
    left.decode_tokens += right.decode_tokens
    left.prefill_tokens += right.prefill_tokens
    left.pages_owned = max(left.pages_owned, right.pages_owned)
    left.queue = max(left.queue, right.queue)
    left.active = max(left.active, right.active)
