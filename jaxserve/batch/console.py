"""What an operator sees of a batch: a bar on a terminal, a line now and then elsewhere, a summary at the end.

Progress goes to stderr, the summary to stdout.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jaxserve.batch.tally import EngineFigures, Tally

BAR_PERIOD_S = 0.25
LINE_PERIOD_S = 10.0


class BatchDisplay:
    """Shows how far a run is.

    Args:
      tally: counted up by the run.
      figures: the engine's, at any time after `begin`.
      console: where; stderr when None.
      clock: seconds, monotonic.
    """

    def __init__(
        self,
        tally: Tally,
        figures: Callable[[], EngineFigures],
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tally = tally
        self._figures = figures
        self._console = console or Console(stderr=True)
        self._clock = clock
        self._began_at = clock()
        self._bar = Progress(
            TextColumn("batch   "),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[failed]}{task.fields[rate]:.0f} tok/s"),
            TimeElapsedColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=tally.num_lines, completed=tally.num_done, failed="", rate=0.0)

    @property
    def period_s(self) -> float:
        """Seconds between two calls of `update`."""
        return BAR_PERIOD_S if self._console.is_terminal else LINE_PERIOD_S

    def note(self, text: str) -> None:
        """One line."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def begin(self) -> None:
        """The engine is ready: time counts from here."""
        self._began_at = self._clock()
        self._bar.reset(self._task, completed=self._tally.num_done, failed="", rate=0.0)
        if self._console.is_terminal:
            self._bar.start()
        else:
            self.note(f"batch: {self._tally.num_left} of {self._tally.num_lines} lines to do")

    def update(self) -> None:
        """Shows the state of now."""
        tally = self._tally
        failed = tally.num_earlier_failed + tally.num_failed
        failures = f"{failed} failed  " if failed else ""
        rate = self._figures().output_tokens / max(self._elapsed_s, 1e-9)
        self._bar.update(self._task, completed=tally.num_done, failed=failures, rate=rate)
        if not self._console.is_terminal:
            done = f"batch: {tally.num_done}/{tally.num_lines} lines  "
            self.note(f"{done}{failures}{rate:.0f} tok/s  {self._eta()}")

    def close(self) -> None:
        """Ends the live display with the last state."""
        self.update()
        self._bar.stop()

    def summary(self, output: str, trace_file: str | None) -> list[str]:
        """The summary of the run, from `begin` to now."""
        return summary_lines(self._tally, self._figures(), self._elapsed_s, output, trace_file)

    @property
    def _elapsed_s(self) -> float:
        return self._clock() - self._began_at

    def _eta(self) -> str:
        """Time left at the pace of this run so far."""
        if not self._tally.num_new:
            return "time left unknown"
        left_s = round(self._elapsed_s * self._tally.num_left / self._tally.num_new)
        return f"{left_s // 3600}:{left_s // 60 % 60:02}:{left_s % 60:02} left"


def summary_lines(
    tally: Tally, figures: EngineFigures | None, elapsed_s: float, output: str, trace_file: str | None
) -> list[str]:
    """The summary of a run.

    Args:
      figures: None where no engine has run.
      elapsed_s: from the engine's readiness to the last line.
    """
    lines = [f"{output}: {tally.num_done} of {tally.num_lines} lines", *_counts(tally)]
    if figures is not None:
        rate = figures.output_tokens / max(elapsed_s, 1e-9)
        lines += [
            _row("time", f"{elapsed_s:.1f} s"),
            _row("prompt tokens", f"{tally.prompt_tokens}, {tally.cached_tokens} of them cached"),
            _row("output tokens", f"{tally.output_tokens}, {rate:.1f} tok/s"),
            _row("slot utilisation", f"{figures.slot_utilisation:.1%}"),
            _row("token budget use", f"{figures.budget_use:.1%}"),
            _row("preemptions", str(figures.preemptions)),
        ]
        if trace_file:
            lines.append(_row("trace", trace_file))
    return lines


def _counts(tally: Tally) -> list[str]:
    codes = ", ".join(f"{count} {code}" for code, count in sorted(tally.codes.items()))
    lines = [
        _row("answered", str(tally.num_answered)),
        _row("failed", f"{tally.num_failed} ({codes})" if codes else str(tally.num_failed)),
    ]
    if tally.num_earlier:
        failed = f", {tally.num_earlier_failed} of them failed" if tally.num_earlier_failed else ""
        lines.append(_row("by earlier runs", f"{tally.num_earlier}{failed}"))
    if tally.num_left:
        lines.append(_row("left", f"{tally.num_left}; the same command goes on there"))
    return lines


def _row(name: str, value: str) -> str:
    return f"  {name:<18}{value}"
