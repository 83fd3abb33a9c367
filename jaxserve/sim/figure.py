"""Figure: one computed figure beside the one that was expected of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

SHARE, RATIO, COUNT, MILLISECONDS = "share", "ratio", "count", "ms"
_FORMS = {SHARE: "{:.2%}", RATIO: "{:.3f}", COUNT: "{:.0f}", MILLISECONDS: "{:.1f} ms"}


@dataclass(frozen=True, slots=True)
class Figure:
    """What was computed, and under which circumstances it holds.

    Attributes:
      topic: figures of one topic belong together.
      name: within the topic.
      value: in `unit`: "share" (of 1), "ratio", "count" or "ms".
      scope: model of time, slots, lengths.
      expected: in the same unit; None where there is no such figure.
      basis: where `expected` comes from, or what is expected instead of a number.
    """

    topic: str
    name: str
    value: float
    unit: str
    scope: str
    expected: float | None = None
    basis: str = ""

    def as_json(self) -> dict[str, Any]:
        """All attributes."""
        return asdict(self)


def markdown_table(figures: Iterable[Figure]) -> str:
    """The figures in order, one a row."""
    lines = ["| topic | figure | ours | expected | scope |", "| --- | --- | --- | --- | --- |"]
    topic = ""
    for figure in figures:
        form = _FORMS[figure.unit]
        number = "" if figure.expected is None else form.format(figure.expected)
        basis = f"({figure.basis})" if number and figure.basis else figure.basis
        expected = f"{number} {basis}".strip() or "-"
        shown = figure.topic if figure.topic != topic else ""
        topic = figure.topic
        lines.append(f"| {shown} | {figure.name} | {form.format(figure.value)} | {expected} | {figure.scope} |")
    return "\n".join(lines)
