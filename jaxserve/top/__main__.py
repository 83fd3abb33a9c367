"""`python -m jaxserve.top --url=URL`: requests, tokens, queue, KV pages, slots and latencies of a running server."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from jaxserve.config.command import run_command
from jaxserve.config.flags import parse_flags
from jaxserve.sim.server_pages import UnreadableServerError
from jaxserve.top.frame import frame
from jaxserve.top.reader import Sample, ServerReader

WINDOW_S = 60.0
"""Time that the latencies of a live view are taken from."""


def main(argv: Sequence[str], console: Console | None = None) -> int:
    """Runs until Ctrl-C, or prints one frame.

    Returns:
      The exit status: 1 when the server cannot be read at the beginning, after saying why.
    """
    flags = parse_flags("top", argv)
    console = console or Console()
    try:
        reader = ServerReader(flags.url, flags.api_key)
        first = reader.read()
        if flags.once:
            time.sleep(flags.interval_s)
            console.print(frame(reader.url, reader.read(), first, None))
            return 0
    except UnreadableServerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    try:
        _watch(reader, first, flags.interval_s, console)
    except KeyboardInterrupt:
        return 0
    return 0


def _watch(reader: ServerReader, first: Sample, interval_s: float, console: Console) -> None:
    """Shows frame after frame; while the server does not answer, the last one and why."""
    samples = deque([first])
    shown = frame(reader.url, first, first, None)
    with Live(shown, console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            try:
                now = reader.read()
            except UnreadableServerError as error:
                live.update(Group(Text(str(error), style="bold red"), shown), refresh=True)
                continue
            while len(samples) > 1 and now.at - samples[1].at > WINDOW_S:
                samples.popleft()
            shown = frame(reader.url, now, samples[-1], samples[0])
            samples.append(now)
            live.update(shown, refresh=True)


if __name__ == "__main__":
    run_command(main)
