"""Figure: one computed figure beside the one that was expected of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

SHARE, RATIO, COUNT, MILLISECONDS = "share", "ratio", "count", "ms"
_FORMS = {SHARE: (100, "{:.2f} %"), RATIO: (1, "{:.3f}"), COUNT: (1, "{:.0f}"), MILLISECONDS: (1, "{:.1f} ms")}


@dataclass(frozen=True, slots=True)
class Figure:
    """What was computed, and under which circumstances it holds.

    Attributes:
      topic: figures of one topic belong together.
      name: within the topic.
      value: in `unit`: "share" (of 1), "ratio", "count" or "ms".
      scope: model of time, slots, lengths.
      expected: in the same unit; None where there is no such figure.
      basis: where `expected` comes from.
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
    """The figures in order, one a row; an empty topic or scope is that of the row above."""
    lines = ["| topic | figure | ours | expected | scope |", "| --- | --- | --- | --- | --- |"]
    topic = scope = ""
    for figure in figures:
        expected = "-" if figure.expected is None else f"{_shown(figure.expected, figure.unit)} ({figure.basis})"
        cells = (
            figure.topic if figure.topic != topic else "",
            figure.name,
            _shown(figure.value, figure.unit),
            expected,
            figure.scope if (figure.topic, figure.scope) != (topic, scope) else "",
        )
        topic, scope = figure.topic, figure.scope
        lines.append("".join(f"| {cell} " if cell else "| " for cell in cells) + "|")
    return "\n".join(lines)


def _shown(value: float, unit: str) -> str:
    scale, form = _FORMS[unit]
    return form.format(scale * value)
