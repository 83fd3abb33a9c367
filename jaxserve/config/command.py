"""How the process of a command line tool ends."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn


def run_command(main: Callable[[Sequence[str]], int | None]) -> NoReturn:
    """Runs `main` with the process' arguments, and ends the process with the status that it returns.

    A reader of the output that has seen enough, like `head`, ends the process quietly, with status 1; rich does the
    same to what prints through it.

    Raises:
      SystemExit: always.
    """
    try:
        try:
            status = main(sys.argv)
        except SystemExit:
            _flush()
            raise
        _flush()
    except BrokenPipeError:
        if not _output_has_no_reader():
            raise
        # The interpreter writes at its end what is still buffered, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)


def _flush() -> None:
    print(end="", flush=True)  # nothing where there is no stdout


def _output_has_no_reader() -> bool:
    """Whether stdout is a pipe or a socket that nobody reads any more."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
