"""What an operator sees at start-up: a bar for weights, the memory plan, a bar for warm-up, then URLs.

On a terminal the bars move; elsewhere each stage gets one plain line when it begins and when it ends.
Everything here goes to stderr; stdout has the one machine-readable line of `jaxserve.server.launcher`.
"""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from jaxserve.core import peak_memory_bytes
from jaxserve.server.log_format import tell_failure

PlanRows = Callable[[], Sequence[tuple[str, str]]]


class StartupDisplay:
    """Shows start-up; `progress` may be called from any thread.

    Args:
      plan_rows: the memory plan's lines, asked for when warm-up begins.
      console: where; stderr when None.
    """

    def __init__(self, plan_rows: PlanRows | None = None, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._plan_rows = plan_rows
        self._lock = threading.Lock()
        self._stage = ""
        self._stage_began = self._began = time.monotonic()
        self._task: TaskID | None = None
        self._bar = Progress(
            TextColumn("{task.description:<8}"),
            BarColumn(),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[what]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )

    def progress(self, stage: str, done: int, total: int, what: str) -> None:
        """One step of a stage is done."""
        with self._lock:
            if stage != self._stage:
                self._begin(stage, total)
            if self._task is not None:
                count = f"{_amount(stage, done)} of {_amount(stage, total)}"
                self._bar.update(self._task, completed=done, total=total, count=count, what=what[:60])
            if done >= total > 0:
                self._end(done)

    def ready(self, model: str, http_url: str, grpc_address: str, api_key: bool, playground: bool = False) -> None:
        """Requests are taken: where, and a line that tries it."""
        self.close()
        seconds = time.monotonic() - self._began
        self._console.print(f"[bold]{model}[/bold] is ready after {seconds:.1f} s; {_peak()}")
        pages = f"playground {http_url}/, API" if playground else "API"
        self._console.print(f"  HTTP  {http_url}   ({pages} {http_url}/openapi.json)", highlight=False, soft_wrap=True)
        self._console.print(f"  gRPC  {grpc_address}   (jaxserve.v1.Inference)", highlight=False)
        # Printed without wrapping: a broken line would not survive pasting.
        self._console.print("  " + curl_line(model, http_url, api_key), soft_wrap=True, highlight=False, markup=False)

    def note(self, text: str) -> None:
        """One line about the server's state."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def fail(self, text: str) -> None:
        """The line that ends a start."""
        self.close()
        tell_failure(self._console, text)

    def close(self) -> None:
        """Ends the live display."""
        self._bar.stop()

    def _begin(self, stage: str, total: int) -> None:
        if self._task is not None:
            self._bar.stop()
        if stage == "warm-up" and self._plan_rows is not None:
            show_plan(self._plan_rows(), console=self._console)
        self._stage = stage
        self._stage_began = time.monotonic()
        if self._console.is_terminal:
            self._bar.start()
            self._task = self._bar.add_task(stage, total=total, count="", what="")
        else:
            self._console.print(f"{stage}: {_amount(stage, total)}", highlight=False)

    def _end(self, done: int) -> None:
        if not self._console.is_terminal:
            seconds = time.monotonic() - self._stage_began
            done_in = f"{self._stage}: {_amount(self._stage, done)} in {seconds:.1f} s; {_peak()}"
            self._console.print(done_in, highlight=False)


def show_plan(
    rows: Sequence[tuple[str, str]],
    file: TextIO | None = None,
    console: Console | None = None,
    about: str = "memory",
) -> None:
    """Writes a part of what is planned: a table on a terminal, plain lines elsewhere.

    Args:
      rows: label and value of each line.
      file: where, unless there is a `console`.
      about: what it plans; every plain line begins with it.
    """
    console = console or Console(file=file)
    if not console.is_terminal:
        for label, value in rows:
            console.print(f"{about}: {label}: {value}", highlight=False, soft_wrap=True)
        return
    table = Table(title=f"{about.capitalize()} plan", title_justify="left", show_header=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    for label, value in rows:
        table.add_row(label, value)
    console.print(table)


def _amount(stage: str, count: int) -> str:
    """Progress in the stage's unit: bytes of weights, programs of the warm-up."""
    return decimal(count) if stage == "weights" else f"{count} programs"


def _peak() -> str:
    return f"peak memory {decimal(peak_memory_bytes())}"


def curl_line(model: str, http_url: str, api_key: bool) -> str:
    """A shell command that asks the server something."""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'
    key = ' -H "Authorization: Bearer $JAXSERVE_API_KEY"' if api_key else ""
    return f"curl {http_url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d " + shlex.quote(body)
